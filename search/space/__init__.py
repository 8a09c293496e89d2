"""The search space: the chains of a layer size."""
