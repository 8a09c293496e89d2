"""Whole models of the library ``transformers``, from their configurations, with random weights.

A model comes three times: dense, with layers as an author would write them in plain PyTorch
(`plain_layers.py`), and with `ksopt.KSLinear` of the same chains and weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ksopt.bench.models.chains import choices
from ksopt.bench.models.plain_layers import PlainLayer, SideBySide, plain_layer
from ksopt.conversion.layers import set_module
from ksopt.conversion.model_call import ModelCall
from ksopt.conversion.plan import Plan
from ksopt.errors import InvalidInputError, UnavailableError
from ksopt.nn import KSLinear, KSStacked
from ksopt.patterns.chain import Chain
from ksopt.system.suggest import nearest


@dataclass(frozen=True)
class Size:
    """Sizes of a model; the names are those of the libraries' configurations.

    Args:
        family: "vit", "gpt2" or "llama".
        op: that multiplies in its plain layers, of `plain_layers.MONARCH_LAYERS`.
        hidden: features between layers.
        inner: features inside the MLP.
        heads: of attention.
        key_heads: of its keys and values.
        depth: blocks.
        classes: of the head, or the vocabulary.
        batch: images, or sequences.
        length: tokens in a sequence, or pixels along an image's edge.
    """

    family: str
    op: str
    hidden: int
    inner: int
    heads: int
    key_heads: int
    depth: int
    classes: int
    batch: int
    length: int

    @property
    def least_bytes(self) -> int:
        """Memory that the dense model takes in float64, at least."""
        tokens = (self.length // 16) ** 2 if self.family == "vit" else self.length
        heads = self.batch * (1 if self.family == "vit" else tokens)
        weights = self.depth * self.hidden * (2 * self.hidden + 2 * self.inner)
        return 8 * (weights + self.batch * tokens * self.inner + heads * self.classes)


SIZES = {
    # ViT-S/16; GPT-2 medium (355 M); a Llama as wide as that of 7 billion weights; TinyLlama.
    "vit": Size("vit", "bmm", 384, 1536, 6, 6, 12, 1000, 128, 224),
    "gpt2": Size("gpt2", "einsum", 1024, 4096, 16, 16, 24, 50257, 8, 512),
    "llama": Size("llama", "vmap", 4096, 11008, 32, 32, 4, 32000, 4, 1024),
    "gpt2-124m": Size("gpt2", "einsum", 768, 3072, 12, 12, 12, 50257, 8, 1024),
    "tinyllama": Size("llama", "vmap", 2048, 5632, 32, 4, 22, 32000, 4, 1024),
}
"""The models, by name."""

SMALL = {
    "vit": Size("vit", "bmm", 48, 192, 3, 3, 2, 10, 3, 64),
    "gpt2": Size("gpt2", "einsum", 48, 192, 3, 3, 2, 61, 3, 24),
    "llama": Size("llama", "vmap", 64, 192, 4, 2, 2, 61, 3, 24),
}
"""The same in small, by family: for a machine without a GPU, and for tests."""


@dataclass(frozen=True)
class Built:
    """A model in three versions, and its inputs.

    Args:
        dense: the library's model; returns logits [..., classes].
        ks: the model with its linear layers replaced by an author's.
        linear: the model with its linear layers replaced by `KSLinear`, with the author's weights.
        inputs: one tensor: images [B, 3, H, W], or tokens [B, T].
        targets: classes, of the logits' shape without its last dim.
        chains: number of chains in the model.
        weights: (weights of the chains, weights of the dense layers that they replace).
    """

    dense: nn.Module
    ks: nn.Module
    linear: nn.Module
    inputs: Tensor
    targets: Tensor
    chains: int
    weights: tuple[int, int]

    def twin(self, name: str) -> nn.Module:
        """The version of that name."""
        return {"dense": self.dense, "ks": self.ks, "linear": self.linear}[name]


def size_of(
    name: str, small: bool = False, layers: int | None = None, batch: int | None = None,
    length: int | None = None,
) -> Size:  # fmt: skip
    """The sizes of a model, with the passed ones in place of its own.

    Raises:
        InvalidInputError: the model is unknown, or it has no such size.
    """
    if name not in SIZES:
        raise InvalidInputError(
            f"model {name!r} is unknown: it must be one of {', '.join(SIZES)}{nearest(name, SIZES)}"
        )
    size = SMALL[SIZES[name].family] if small else SIZES[name]
    if length is not None and size.family == "vit":
        raise InvalidInputError(f"--length {length}: a ViT's tokens are those of its images")
    return replace(
        size,
        depth=size.depth if layers is None else layers,
        batch=size.batch if batch is None else batch,
        length=size.length if length is None else length,
    )


def build(
    size: Size, dtype: torch.dtype, device: torch.device, *, rule: str = "half",
    plan: Plan | None = None, seed: int = 0,
) -> Built:  # fmt: skip
    """A model, its two Kronecker-sparse versions, and random inputs.

    Args:
        size: the model and its sizes.
        dtype: of the parameters.
        device: of the model and its inputs.
        rule: see `ksopt.bench.models.chains.chain_of`.
        plan: the chain of each replaced layer; used instead of the rule.
        seed: of the weights and inputs.

    Raises:
        InvalidInputError: the rule or the plan does not fit the model.
        UnavailableError: the library ``transformers`` is not installed, or its models differ.
    """
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), device:
        torch.manual_seed(seed)
        dense = _MAKERS[size.family](size)
        if size.family == "vit":
            inputs = torch.randn(size.batch, 3, size.length, size.length)
            targets = torch.randint(size.classes, (size.batch,))
        else:
            inputs = torch.randint(size.classes, (size.batch, size.length))
            targets = torch.randint(size.classes, (size.batch, size.length))
        chosen = choices(dense, rule, plan, ModelCall((inputs,), {}, "bench models"))
        ks = copy.deepcopy(dense)
        for choice in chosen:
            has_bias = choice.place.bias is not None
            chains = [one for one in choice.chains if isinstance(one, Chain)]
            if len(chains) < len(choice.chains):
                names = ", ".join(choice.place.names)
                raise InvalidInputError(f"the plan has other structures than chains for {names}")
            for name in choice.place.names:
                set_module(ks, name, plain_layer(chains, has_bias, size.op))
        linear = copy.deepcopy(ks)
        for choice in chosen:
            for name in choice.place.names:
                set_module(linear, name, by_ks_linear(ks.get_submodule(name)))
    first, second, third = (
        Logits(one).to(device=device, dtype=dtype) for one in (dense, ks, linear)
    )
    replaced = sum(one.place.in_features * one.place.out_features for one in chosen)
    nnz = sum(chain.nnz for one in chosen for chain in one.chains)
    count = sum(len(one.chains) for one in chosen)
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    return Built(first, second, third, inputs, targets, count, (nnz, replaced))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy, in at least float32."""
    kind = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, -2).to(kind), targets.flatten())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model's parameters, with `KSLinear`'s names and shapes."""
    gradients: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        own = list(module.named_parameters(path, recurse=False))
        if isinstance(module, PlainLayer):
            factors = module.factors(_gradient)
            gradients |= {f"{path}.weights.{at}": factor for at, factor in enumerate(factors)}
            own = [(f"{path}.bias", module.bias)] if module.bias is not None else []
        elif path.endswith(".weights") and isinstance(module, nn.ParameterList):
            parent = model.get_submodule(path.removesuffix(".weights"))
            own = [] if isinstance(parent, PlainLayer) else own
        gradients |= {name: _gradient(one) for name, one in own if one.grad is not None}
    return gradients


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()


def by_ks_linear(layer: nn.Module) -> nn.Module:
    """An author's layer, single or stacked, as `KSLinear` with the same weights."""
    if isinstance(layer, SideBySide):
        return KSStacked([_single(part) for part in layer.parts])
    return _single(layer)


def _single(layer: nn.Module) -> KSLinear:
    assert isinstance(layer, PlainLayer)
    chain = layer.chain
    layer_ks = KSLinear(chain.in_features, chain.out_features, chain, bias=layer.bias is not None)
    with torch.no_grad():
        for own, factor in zip(layer_ks.weights, layer.factors(lambda one: one), strict=True):
            own.copy_(factor)
        if layer_ks.bias is not None and layer.bias is not None:
            layer_ks.bias.copy_(layer.bias)
    return layer_ks


class Logits(nn.Module):
    """A model of the library that returns its logits only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """Images or tokens -> logits."""
        logits: Tensor = self.model(inputs).logits
        return logits


def _vit(size: Size) -> nn.Module:
    library = _transformers()
    config = library.ViTConfig(
        hidden_size=size.hidden, intermediate_size=size.inner, num_hidden_layers=size.depth,
        num_attention_heads=size.heads, image_size=size.length, patch_size=16,
        num_labels=size.classes,
    )  # fmt: skip
    library.AttentionInterface.register(_UNMASKED, _unmasked_attention)
    return _model(library.ViTForImageClassification, config, _UNMASKED)


_UNMASKED = "unmasked_sdpa"


def _unmasked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None,
    scaling: float | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of all tokens to all, [B, heads, T, d] each -> [B, T, heads, d].

    The library's own passes a mask of ones when it is compiled; with a mask, PyTorch computes the
    attention of 197 tokens by products in float32.
    """
    y = nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    return y.transpose(1, 2).contiguous(), None


def _gpt2(size: Size) -> nn.Module:
    library = _transformers()
    config = library.GPT2Config(
        n_embd=size.hidden, n_inner=size.inner, n_layer=size.depth, n_head=size.heads,
        n_positions=size.length, vocab_size=size.classes, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _model(library.GPT2LMHeadModel, config)


def _llama(size: Size) -> nn.Module:
    library = _transformers()
    config = library.LlamaConfig(
        hidden_size=size.hidden, intermediate_size=size.inner, num_hidden_layers=size.depth,
        num_attention_heads=size.heads, num_key_value_heads=size.key_heads,
        max_position_embeddings=size.length, vocab_size=size.classes, use_cache=False,
    )  # fmt: skip
    return _model(library.LlamaForCausalLM, config)


_MAKERS: dict[str, Callable[[Size], nn.Module]] = {"vit": _vit, "gpt2": _gpt2, "llama": _llama}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UnavailableError(
            f"the models come from the library transformers, which cannot be imported ({error}): "
            "pip install transformers"
        ) from error
    return transformers


def _model(model: type[nn.Module], config: Any, attention: str = "sdpa") -> nn.Module:
    config._attn_implementation = attention
    return model(config)
