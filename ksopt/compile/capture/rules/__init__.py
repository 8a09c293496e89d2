"""Capture rules, one module per group of ATen operators."""
