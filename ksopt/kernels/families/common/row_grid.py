"""The grid of a kernel whose blocks, or clusters of blocks, take whole units of rows."""

from __future__ import annotations


def grid_of(rows: int, rows_per_unit: int, most_clusters: int, cluster: int = 1) -> tuple[int, int]:
    """Blocks of a launch and rows of each, as in ``ChainKernel::grid_of`` of csrc/host.

    Args:
        rows: at least one.
        rows_per_unit: each block, or cluster of blocks, takes a multiple of this many rows.
        most_clusters: the most clusters of a launch; blocks, where a cluster has one.
        cluster: blocks that share the work on the same rows.

    Example:
        >>> grid_of(1000, rows_per_unit=64, most_clusters=10)  # 16 units
        (8, 128)
    """
    units = -(-rows // rows_per_unit)
    of_cluster = -(-units // min(units, most_clusters))
    return -(-units // of_cluster) * cluster, of_cluster * rows_per_unit
