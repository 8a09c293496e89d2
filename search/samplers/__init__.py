"""Samplers: the choice of the next chain to measure."""
