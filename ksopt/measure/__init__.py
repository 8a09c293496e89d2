"""Timing and judging of results: clocks, accuracy, rooflines, energy."""
