"""Several layer sizes, or all linear layers of a model, in one search.

- `ksopt.search.layers.layers`: a model's linear layers, grouped by size and role;
- `ksopt.search.layers.model`, `ksopt.search.layers.hf_config`: where the list comes from;
- `ksopt.search.layers.request`: what is asked;
- `ksopt.search.layers.study`: the search, from request to report;
- `ksopt.search.layers.run_record`: what it leaves in its storage, and the report written again;
- `ksopt.search.layers.results`: what it found, the plan, and what the plan does to the model;
- `ksopt.search.layers.whole_model`: the model itself, timed with the plan;
- `ksopt.search.layers.export`, `ksopt.search.layers.sections`: what is written and printed.
"""
