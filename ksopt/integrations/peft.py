"""LoRA adapters of PEFT on chains."""

from __future__ import annotations

from typing import Any

from torch import nn

from ksopt.errors import InvalidInputError, UnavailableError
from ksopt.nn import KSLinear, KSStacked
from ksopt.operators.linear import StructuredLinear

try:
    from peft import LoraConfig
    from peft.tuners.lora.layer import Linear as LoraLinear
except ImportError as error:
    raise UnavailableError(
        f"LoRA on chains needs PEFT, which cannot be imported ({error}): pip install 'ksopt[peft]'"
    ) from error

_STARTS = (True, False, "gaussian", "orthogonal")


class LoraChain(LoraLinear):
    """A chain with low-rank adapters: x Wᵀ + s x Aᵀ Bᵀ, where W is the chain's matrix.

    The sum is no chain, so adapters cannot be merged into it.
    """

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **others: Any
    ) -> None:
        if config.init_lora_weights not in _STARTS:
            raise InvalidInputError(
                f"init_lora_weights={config.init_lora_weights!r} changes a dense weight, which a "
                "chain has not: take True, 'gaussian' or 'orthogonal'"
            )
        super().__init__(base_layer, adapter_name, config=config, **others)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        """The features of the layer; PEFT's own method warns of layers that it does not know."""
        assert isinstance(module, (KSLinear, KSStacked, StructuredLinear))
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], None]:
        """Plain LoRA only: the other variants read a dense weight."""
        return {(): None}

    def update_layer(self, adapter_name: str, *args: Any, **others: Any) -> None:
        """Add an adapter on the device and of the dtype of the chain's weights."""
        super().update_layer(adapter_name, *args, **others)
        weight = next(self.get_base_layer().parameters())
        for adapters in (self.lora_A, self.lora_B):
            adapters[adapter_name].to(weight.device, weight.dtype)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise: an adapter cannot be merged into a chain.

        Raises:
            InvalidInputError: Always.
        """
        raise InvalidInputError(
            "an adapter cannot be merged into a chain: their sum is no chain. Keep the adapter "
            "beside it, or merge into the dense model and convert that"
        )


def with_chains(config: LoraConfig) -> LoraConfig:
    """Allow chains as target modules of a LoRA config.

    Name them in ``target_modules``: PEFT's ``"all-linear"`` covers only dense layers. PEFT does not
    write this into a saved adapter, so a config that is read again needs this call again.

    Args:
        config: The config; changed in place.

    Returns:
        The config.

    Example:
        >>> import peft
        >>> model = nn.Sequential(KSLinear(8, 8, "(1,4,4,2)*(2,4,4,1)"), nn.ReLU())
        >>> config = with_chains(LoraConfig(r=2, target_modules=["0"]))
        >>> adapted = peft.get_peft_model(model, config)
        >>> [name for name, one in adapted.named_parameters() if one.requires_grad]
        ['base_model.model.0.lora_A.default.weight', 'base_model.model.0.lora_B.default.weight']
    """
    config._register_custom_module(
        dict.fromkeys((KSLinear, KSStacked, StructuredLinear), LoraChain)
    )
    return config
