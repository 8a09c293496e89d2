"""Structured operators: what may stand in the place of a dense matrix. Chains are the first."""
