"""Whole models with Kronecker-sparse layers: how they are built, compared, timed and reported."""
