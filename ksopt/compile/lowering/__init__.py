"""Lowering of recognised products to operators in a graph: choose, decide, rewrite."""
