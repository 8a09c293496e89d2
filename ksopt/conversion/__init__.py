"""Conversion of a trained model: chains replace its linear layers.

- `ksopt.conversion.plan`: which layers become which chains; a search writes a plan;
- `ksopt.conversion.layers`: the layers that can be converted, and their replacements;
- `ksopt.conversion.model_call`: a call of a model on the user's inputs;
- `ksopt.conversion.model_surroundings`: what surrounds each layer in the graph of such a call;
- `ksopt.conversion.resolve`: a plan applied to the layers of a model;
- `ksopt.conversion.apply`: the conversion, and its reversal;
- `ksopt.conversion.distillation`: training of the converted model on the dense model's outputs;
- `ksopt.conversion.folder`: a converted model on disk;
- `ksopt.cli.convert`: ``ksopt convert``.
"""
