"""Several layer sizes, or all linear layers of a model, in one search.

- `ksopt.search.shapes.layers`: a model's linear layers, grouped by size and role;
- `ksopt.search.shapes.model`, `ksopt.search.shapes.hf_config`: where the list comes from;
- `ksopt.search.shapes.request`: what is asked;
- `ksopt.search.shapes.study`: the search, from request to report;
- `ksopt.search.shapes.record`: what it leaves in its storage, and the report written again;
- `ksopt.search.shapes.result`: what it found, the plan, and what the plan does to the model;
- `ksopt.search.shapes.whole`: the model itself, timed with the plan;
- `ksopt.search.shapes.report`, `ksopt.search.shapes.document`: what is written and printed.
"""
