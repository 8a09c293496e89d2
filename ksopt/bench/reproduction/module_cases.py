"""The modules of Tables 4, 6 and 7, each in its versions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ksopt.bench.models.build import by_ks_linear
from ksopt.bench.models.chains import chain_of
from ksopt.bench.models.plain_layers import PlainLayer, SideBySide, plain_layer
from ksopt.bench.reproduction import transformer
from ksopt.bench.reproduction.transformer import (
    GPT2_MEDIUM,
    SMALL_GPT2,
    SMALL_VIT,
    VITS,
    Attention,
    Block,
    FeedForward,
    Make,
    Size,
    Transformer,
    dense,
)

DENSE, BMM, KERNEL = "fully-connected", "bmm", "kernel"
COMPLETE, LINEAR = "complete", "linear in FFNs"
GPT2 = "GPT-2 medium"
TABLE_4 = (
    *("Linear N x N", "Feed-forward network", "Multi-head attention", "Block"),
    *("Kronecker-sparse ViT-S/16", GPT2),
)
_LAYERS = {"Linear N x N": (1, 1), "Linear 4N x N": (1, 4), "Linear N x 4N": (4, 1)}
TABLE_7 = tuple(name + bias for name in _LAYERS for bias in ("", " + bias"))
TABLE_6 = tuple(VITS)


@dataclass(frozen=True)
class Built:
    """A case prepared for timing.

    Attributes:
        versions: modules by name.
        inputs: of each version.
        truth: the version that, in float64, is the reference; "" for none.
    """

    versions: Mapping[str, nn.Module]
    inputs: Mapping[str, Tensor]
    truth: str


def names(kind: str) -> tuple[str, ...]:
    """The names of the cases of Tables 4 and 7 ("modules"), or of Table 6 ("sizes")."""
    return TABLE_6 if kind == "sizes" else tuple(dict.fromkeys((*TABLE_4, *TABLE_7)))


def build(
    name: str, dtype: torch.dtype, device: torch.device, *, small: bool, seed: int = 0
) -> Built:
    """Build a case.

    Args:
        name: of `names`.
        dtype: of the parameters and inputs.
        device: of the parameters and inputs.
        small: whether to use small sizes, for a CPU.
        seed: of the weights and inputs.
    """
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), device, torch.no_grad():
        torch.manual_seed(seed)
        if name in VITS:
            return _by_size(SMALL_VIT if small else VITS[name], dtype, device)
        if name == GPT2:
            size = SMALL_GPT2 if small else GPT2_MEDIUM
            return _replaced(size, lambda make: Transformer(size, make), None, dtype, device)
        size = SMALL_VIT if small else VITS["ViT-S/16"]
        if name == "Kronecker-sparse ViT-S/16":
            return _replaced(size, lambda make: Transformer(size, make), None, dtype, device)
        kinds = {
            "Feed-forward network": FeedForward,
            "Multi-head attention": Attention,
            "Block": Block,
        }
        if name in kinds:
            module = kinds[name]
            return _replaced(size, lambda make: module(size, make), size.width, dtype, device)
        n_in, n_out = (size.width * times for times in _LAYERS[name.removesuffix(" + bias")])
        bias = name.endswith("bias")
        return _replaced(size, lambda make: make(n_in, n_out, bias, 1), n_in, dtype, device)


def _author(n_in: int, n_out: int, bias: bool, count: int) -> nn.Module:
    """Layers of the paper's chain (appendix B.7), multiplied by bmm as Monarch's authors do."""
    return plain_layer([chain_of("paper", n_in, n_out)] * count, bias, "bmm")


def _generic(n_in: int, n_out: int, bias: bool, count: int) -> nn.Module:
    """Layers of half a square layer's weights, for widths that the paper's chains do not divide."""
    return plain_layer([chain_of("half", n_in, n_out)] * count, bias, "bmm")


def _replaced(
    size: Size, module: Callable[[Make], nn.Module], width: int | None, dtype: torch.dtype,
    device: torch.device,
) -> Built:  # fmt: skip
    """A module with dense layers, with an author's layers, and with ksopt's of the same weights.

    Args:
        size: of the model that the module belongs to.
        module: builds the module from a factory of layers.
        width: features of its input; None for a whole model.
    """
    authors = module(_generic if size.is_causal else _author)
    kernel = _by_kernel(copy.deepcopy(authors))
    versions = {DENSE: module(dense), BMM: authors, KERNEL: kernel}
    if width is None:
        inputs = transformer.inputs_of(size, dtype, device)
    else:
        inputs = torch.randn(size.batch, size.tokens, width, dtype=dtype)
    ready = {key: one.to(device=device, dtype=dtype).eval() for key, one in versions.items()}
    return Built(ready, dict.fromkeys(ready, inputs), BMM)


def _by_kernel(module: nn.Module) -> nn.Module:
    """The module with `KSLinear` in place of an author's layers."""
    if isinstance(module, (PlainLayer, SideBySide)):
        return by_ks_linear(module)
    for name, child in list(module.named_children()):
        setattr(module, name, _by_kernel(child))
    return module


def _by_size(size: Size, dtype: torch.dtype, device: torch.device) -> Built:
    """A dense ViT, and all the linear layers of its feed-forward networks, without biases."""
    layers = []
    for _ in range(size.depth):
        layers += [dense(size.width, 4 * size.width, False)]
        layers += [dense(4 * size.width, size.width, False)]
    versions = {COMPLETE: Transformer(size, dense), LINEAR: nn.Sequential(*layers)}
    ready = {key: one.to(device=device, dtype=dtype).eval() for key, one in versions.items()}
    x = torch.randn(size.batch, size.tokens, size.width, dtype=dtype)
    return Built(ready, {COMPLETE: transformer.inputs_of(size, dtype, device), LINEAR: x}, "")
