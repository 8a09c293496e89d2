"""Patterns, chains and their algebra, without torch."""
