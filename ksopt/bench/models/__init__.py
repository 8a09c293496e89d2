"""``ksopt bench models``: whole models with Kronecker-sparse layers beside the dense ones.

- `ksopt.bench.models.options`, `request`: the options and the request;
- `ksopt.bench.models.build`, `chains`, `plain_layers`: the dense model and its two twins;
- `ksopt.bench.models.measuring`: one case, checked and timed in turns;
- `ksopt.bench.models.results`, `run`, `report`: the results, the run and the report.
"""
