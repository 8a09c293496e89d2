"""A trained model with chains in the place of its linear layers.

- `ksopt.conversion.plan`: which layers become which chains; what a search writes;
- `ksopt.conversion.layers`: the layers that can be converted, and what takes their place;
- `ksopt.conversion.resolve`: a plan applied to the names of a model;
- `ksopt.conversion.apply`: the conversion, and its way back;
- `ksopt.conversion.distillation`: what was converted learns from the dense model;
- `ksopt.conversion.folder`: a converted model on disk;
- `ksopt.cli.convert`: ``ksopt convert``.
"""
