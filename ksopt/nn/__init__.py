"""Layers whose matrix is a chain, how their factors are drawn, and what trains them."""

from ksopt.nn import init
from ksopt.nn.layers import KSLinear, KSStacked

__all__ = ["KSLinear", "KSStacked", "init"]
