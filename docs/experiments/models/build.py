"""Whole models of the library ``transformers``, from their configurations, with random weights.

Their dense layers are replaced by the layers of `layers.py`, as an author would who
wants a smaller model. What stays dense is what is no layer of a block: embeddings and the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ksopt.errors import InvalidInputError, UnavailableError
from models.layers import BlocksByVmap, ButterflyByEinsum, MonarchByBmm

_HEADS = ("classifier", "lm_head")


@dataclass(frozen=True)
class Blocks:
    """How a dense layer is replaced: (1, out/q, middle/q, q)*(p, middle/p, in/p, 1).

    Args:
        p: blocks of the factor that meets the input.
        q: interleaved blocks of the other.
        middle: features between them.
    """

    p: int
    q: int
    middle: int


@dataclass(frozen=True)
class Built:
    """A model and what it is called with.

    Args:
        model: gives logits [..., classes].
        inputs: one tensor: images [B, 3, H, W], or tokens [B, T].
        targets: classes, as the logits without their last dim.
        layers: how many of its layers are Kronecker-sparse.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    layers: int


@dataclass(frozen=True)
class Size:
    """Sizes of a model; the names are those of the libraries' configurations.

    Args:
        hidden: features between layers.
        inner: features inside the MLP.
        heads: of attention.
        key_heads: of its keys and values.
        depth: blocks.
        classes: of the head, or the vocabulary.
        batch: images, or sequences.
        length: tokens in a sequence, or pixels along an image's edge.
    """

    hidden: int
    inner: int
    heads: int
    key_heads: int
    depth: int
    classes: int
    batch: int
    length: int


SIZES = {
    # ViT-S/16; GPT-2 (124 M); TinyLlama (1.1 B).
    "vit": Size(384, 1536, 6, 6, 12, 1000, 128, 224),
    "gpt2": Size(768, 3072, 12, 12, 12, 50257, 8, 1024),
    "llama": Size(2048, 5632, 32, 4, 22, 32000, 4, 1024),
}
"""The models, by name."""

SMALL = {
    "vit": Size(48, 192, 3, 3, 2, 10, 3, 64),
    "gpt2": Size(48, 192, 3, 3, 2, 61, 3, 24),
    "llama": Size(64, 192, 4, 2, 2, 61, 3, 24),
}
"""The same in small: for a machine without a GPU, and for tests."""


def build(
    name: str, dtype: torch.dtype, device: torch.device, *, small: bool = False,
    layers: int | None = None, seed: int = 0,
) -> Built:  # fmt: skip
    """A model with Kronecker-sparse layers, and random inputs.

    Args:
        name: one of `SIZES`.
        dtype: of the parameters.
        device: where it is.
        small: take the sizes of `SMALL`.
        layers: blocks, if not as many as the model has.
        seed: of the weights and inputs.

    Raises:
        InvalidInputError: there is no such model.
        UnavailableError: the library ``transformers`` is not installed, or its models are others.
    """
    if name not in SIZES:
        raise InvalidInputError(f"model {name!r} is unknown: it must be one of {', '.join(SIZES)}")
    size = (SMALL if small else SIZES)[name]
    depth = size.depth if layers is None else layers
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), device:
        torch.manual_seed(seed)
        whole = _MAKERS[name](size, depth)
        count = _replace(whole, *_AUTHORS[name])
        model = Logits(whole).to(device=device, dtype=dtype)
        if name == "vit":
            inputs = torch.randn(size.batch, 3, size.length, size.length).to(dtype)
            targets = torch.randint(size.classes, (size.batch,))
        else:
            inputs = torch.randint(size.classes, (size.batch, size.length))
            targets = torch.randint(size.classes, (size.batch, size.length))
    return Built(model, inputs, targets, count)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, in float32 at least."""
    kind = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, -2).to(kind), targets.flatten())


class Logits(nn.Module):
    """A model of the library, its result the logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs).logits
        return logits


def _vit(size: Size, depth: int) -> nn.Module:
    library = _transformers()
    config = library.ViTConfig(
        hidden_size=size.hidden, intermediate_size=size.inner, num_hidden_layers=depth,
        num_attention_heads=size.heads, image_size=size.length, patch_size=16,
        num_labels=size.classes,
    )  # fmt: skip
    return _made(library.ViTForImageClassification, config)


def _gpt2(size: Size, depth: int) -> nn.Module:
    library = _transformers()
    config = library.GPT2Config(
        n_embd=size.hidden, n_inner=size.inner, n_layer=depth, n_head=size.heads,
        n_positions=size.length, vocab_size=size.classes, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _made(library.GPT2LMHeadModel, config)


def _llama(size: Size, depth: int) -> nn.Module:
    library = _transformers()
    config = library.LlamaConfig(
        hidden_size=size.hidden, intermediate_size=size.inner, num_hidden_layers=depth,
        num_attention_heads=size.heads, num_key_value_heads=size.key_heads,
        max_position_embeddings=size.length, vocab_size=size.classes, use_cache=False,
    )  # fmt: skip
    return _made(library.LlamaForCausalLM, config)


_MAKERS: dict[str, Callable[[Size, int], nn.Module]] = {
    "vit": _vit,
    "gpt2": _gpt2,
    "llama": _llama,
}


def _as_in_the_paper(n_in: int, n_out: int) -> Blocks:
    """(1,192,48,2)*(2,48,192,1) for 384x384, (1,768,192,2)*(6,64,64,1) for 384x1536."""
    return Blocks(2, 2, n_in // 4) if n_in == n_out else Blocks(6, 2, min(n_in, n_out))


def _in(blocks: int) -> Callable[[int, int], Blocks]:
    return lambda n_in, n_out: Blocks(blocks, blocks, min(n_in, n_out))


_AUTHORS: dict[str, tuple[type[nn.Module], Callable[[int, int], Blocks]]] = {
    "vit": (MonarchByBmm, _as_in_the_paper),
    "gpt2": (ButterflyByEinsum, _in(4)),
    "llama": (BlocksByVmap, _in(8)),
}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UnavailableError(
            f"the models come from the library transformers, which cannot be imported ({error}): "
            "pip install transformers"
        ) from error
    return transformers


def _made(model: type[nn.Module], config: Any) -> nn.Module:
    config._attn_implementation = "sdpa"
    return model(config)


def _replace(model: nn.Module, layer: type[nn.Module], blocks: Callable[[int, int], Blocks]) -> int:
    """Put an author's layers in the place of the dense ones; how many they are."""
    count = 0
    for name, dense in list(model.named_modules()):
        if isinstance(dense, nn.Linear):
            n_in, n_out = dense.in_features, dense.out_features
        elif type(dense).__name__ == "Conv1D":  # GPT-2's own linear layer, weight [in, out]
            n_in, n_out = dense.weight.shape
        else:
            continue
        path, _, own = name.rpartition(".")
        if own in _HEADS:
            continue
        how = blocks(n_in, n_out)
        has_bias = dense.bias is not None
        made = layer(n_in, n_out, how.middle, how.p, how.q, has_bias)
        setattr(model.get_submodule(path), own, made)
        count += 1
    if not count:
        raise UnavailableError(
            f"{type(model).__name__} of the installed transformers has no dense layers that are "
            "modules, so nothing could be replaced: another version is needed"
        )
    return count
