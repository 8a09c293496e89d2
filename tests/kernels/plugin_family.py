"""A module for `--plugins`, as users write one: it registers a family of chains."""

from toy_chains import ToyChain

from ksopt.kernels.families.base import register_family


@register_family
class PluginChain(ToyChain):
    """Chains of two factors by torch."""

    name = "plugin_chain"
