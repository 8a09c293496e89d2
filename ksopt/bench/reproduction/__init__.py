"""`ksopt bench paper`: the paper's tables and figures, measured with ksopt's kernels.

The measurements (`products` by `ksopt bench kernels`, `energy`, `models`) are stored in logs;
each table and figure is a function of their contents.
"""
