"""Patterns, chains and their algebra; no torch."""
