"""A model made faster in one call: `ksopt.optimize`.

- `ksopt.optimization.run`: search, conversion, compilation and timing, one after the other;
- `ksopt.optimization.selection`: which layers are not searched;
- `ksopt.optimization.speed`: the whole model, dense and with chains, compiled and timed in turns;
- `ksopt.optimization.result`: what came of it.
"""
