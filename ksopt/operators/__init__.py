"""Structured operators, which may replace a dense matrix. Chains are the first of them."""
