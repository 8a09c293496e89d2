"""Names of candidates, and of their configurations, as people read them."""

from __future__ import annotations

from typing import Any

PAIR = "pair"
"""The name of the candidate that computes two factors by kernels that were timed together.

Its configuration has a way and a config for the ``first`` and the ``second`` product."""


def label_of(way: str, config: dict[str, Any] | None) -> str:
    """A candidate's name and its configuration.

    Args:
        way: its name.
        config: its tile as plain values, None where it has none.

    Example:
        >>> label_of("mma16", {"bm": 64}), label_of("bmm", None)
        ('mma16(bm=64)', 'bmm')
        >>> one, two = {"way": "mma16", "config": {"bm": 64}}, {"way": "bmm", "config": None}
        >>> label_of(PAIR, {"first": one, "second": two})
        'pair(mma16(bm=64) then bmm)'
    """
    if config is None:
        return way
    if way == PAIR:
        return f"{way}({' then '.join(label_of(**one) for one in config.values())})"
    return f"{way}({', '.join(f'{k}={v}' for k, v in config.items())})"


def name_of(way: str, config: dict[str, Any] | None) -> str:
    """A candidate's name, of a pair with those of its kernels.

    Args:
        way, config: as for `label_of`.

    Example:
        >>> one, two = {"way": "mma16", "config": {"bm": 64}}, {"way": "bmm", "config": None}
        >>> name_of(PAIR, {"first": one, "second": two}), name_of(**one)
        ('pair of mma16 and bmm', 'mma16')
    """
    if way != PAIR or config is None:
        return way
    return f"{way} of {' and '.join(one['way'] for one in config.values())}"


def is_pair(config: Any) -> bool:
    """Whether plain values, of whatever origin, are the configuration of a `PAIR`."""
    return (
        isinstance(config, dict)
        and [*config] == ["first", "second"]
        and all(
            isinstance(one, dict)
            and one.keys() == {"way", "config"}
            and isinstance(one["way"], str)
            and one["way"] != PAIR
            and isinstance(one["config"], dict | None)
            for one in config.values()
        )
    )
