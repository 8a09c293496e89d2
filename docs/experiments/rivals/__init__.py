"""Chains and their rivals at the same budget, in the place of a trained network's layers."""
