"""Counts in sentences."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A count and its noun, which takes an s for any number but 1.

    Example:
        >>> counted(1, "weight"), counted(0, "layer"), counted(1234, "chain")
        ('1 weight', '0 layers', '1,234 chains')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
