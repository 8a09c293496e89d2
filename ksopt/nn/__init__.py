"""Layers whose matrix is a chain, their initialization and their training."""

from ksopt.nn import init
from ksopt.nn.layers import KSLinear, KSStacked
from ksopt.nn.learning_rates import param_groups
from ksopt.nn.self_guided import SelfGuided, SelfGuidedLinear

__all__ = ["KSLinear", "KSStacked", "SelfGuided", "SelfGuidedLinear", "init", "param_groups"]
