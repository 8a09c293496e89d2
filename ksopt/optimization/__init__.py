"""Optimization of a model in one call: `ksopt.optimize`.

- `ksopt.optimization.run`: search, conversion, compilation and timing, in sequence;
- `ksopt.optimization.selection`: the layers that are not searched;
- `ksopt.optimization.speed`: the whole model, dense and with chains, compiled and timed in turns;
- `ksopt.optimization.result`: the result.
"""
