"""`ksopt bench paper`: the paper's tables and figures, measured anew with ksopt's kernels.

What is measured (`products` by `ksopt bench kernels`, `energy`, `models`) is kept in journals; each
table and figure is a function of what they hold.
"""
