"""Chains and their rivals at the same budget, in place of a trained network's layers."""
