"""The linear layers that a transformers config.json describes.

The file is only read as JSON: no code is run, nothing is loaded from a network, and transformers
need not be installed. The list has the layers of the blocks, which repeat, and the head of a
language model that has weights of its own. It has no poolers and other heads, which depend on the
class that is built from the config.

Source: the module names of transformers 5, which, except for ViT's, are those of 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ksopt.errors import InvalidInputError
from ksopt.patterns.size import Dims
from ksopt.search.layers import Group, Layer, Layers, chosen, grouped
from ksopt.system import untrusted

# transformers 4 has other names for ViT's layers; if some are left out, no pattern fits both.
_VIT_NAMES = "The names are those of transformers 5."
_VIT_NOTE = f"{_VIT_NAMES} The plan's patterns fit those of transformers 4 too."


@dataclass(frozen=True)
class _Config:
    """A config's entries, read with their types checked.

    Args:
        values: Contents of the file.
        path: Of the file.
    """

    values: Mapping[str, Any]
    path: Path

    def size(self, *names: str, default: int | None = None) -> int:
        """The first present of some entries, a whole number from 1."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInputError(
                    f"--hf-config {self.path}: {name} is {value!r}, and must be a whole number "
                    "from 1"
                )
            return value
        if default is None:
            raise InvalidInputError(
                f"--hf-config {self.path}: there is no {names[0]} in it, which a config of model "
                f"type {self.values['model_type']} has"
            )
        return default

    def heads(self) -> tuple[int, int]:
        """Features of all query heads, and of all key (or value) heads."""
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        kind = self.values["model_type"]
        # Each type has other defaults for missing entries: only Llama's are safe.
        own = self.values.get("head_dim") is not None or kind in ("gemma", "qwen3")
        if "num_key_value_heads" not in self.values and kind != "llama":
            self.size("num_key_value_heads")
        if not own and hidden % heads:
            raise InvalidInputError(
                f"--hf-config {self.path}: hidden_size {hidden} is no multiple of "
                f"num_attention_heads {heads}"
            )
        width = self.size("head_dim") if own else hidden // heads
        return heads * width, self.size("num_key_value_heads", default=heads) * width


NamedSizes = Iterator[tuple[str, int, int]]


def _bert(config: _Config) -> NamedSizes:
    hidden = config.size("hidden_size")
    inner = config.size("intermediate_size")
    for i in range(config.size("num_hidden_layers")):
        at = f"encoder.layer.{i}"
        for name in ("query", "key", "value"):
            yield f"{at}.attention.self.{name}", hidden, hidden
        yield f"{at}.attention.output.dense", hidden, hidden
        yield f"{at}.intermediate.dense", hidden, inner
        yield f"{at}.output.dense", inner, hidden


def _distilbert(config: _Config) -> NamedSizes:
    hidden, inner = config.size("dim"), config.size("hidden_dim")
    for i in range(config.size("n_layers")):
        at = f"transformer.layer.{i}"
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            yield f"{at}.attention.{name}", hidden, hidden
        yield f"{at}.ffn.lin1", hidden, inner
        yield f"{at}.ffn.lin2", inner, hidden


def _vit(config: _Config) -> NamedSizes:
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
    for i in range(config.size("num_hidden_layers")):
        at = f"layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{at}.attention.{name}", hidden, hidden
        yield f"{at}.mlp.fc1", hidden, inner
        yield f"{at}.mlp.fc2", inner, hidden


def _gpt2(config: _Config) -> NamedSizes:
    hidden = config.size("n_embd", "hidden_size")
    inner = config.size("n_inner", default=4 * hidden)
    for i in range(config.size("n_layer", "num_hidden_layers")):
        yield f"h.{i}.attn.c_attn", hidden, 3 * hidden
        yield f"h.{i}.attn.c_proj", hidden, hidden
        yield f"h.{i}.mlp.c_fc", hidden, inner
        yield f"h.{i}.mlp.c_proj", inner, hidden


def _gpt_neox(config: _Config) -> NamedSizes:
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
    for i in range(config.size("num_hidden_layers")):
        at = f"layers.{i}"
        yield f"{at}.attention.query_key_value", hidden, 3 * hidden
        yield f"{at}.attention.dense", hidden, hidden
        yield f"{at}.mlp.dense_h_to_4h", hidden, inner
        yield f"{at}.mlp.dense_4h_to_h", inner, hidden


def _llama(config: _Config) -> NamedSizes:
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
    query, key = config.heads()
    for i in range(config.size("num_hidden_layers")):
        at = f"layers.{i}"
        yield f"{at}.self_attn.q_proj", hidden, query
        yield f"{at}.self_attn.k_proj", hidden, key
        yield f"{at}.self_attn.v_proj", hidden, key
        yield f"{at}.self_attn.o_proj", query, hidden
        yield f"{at}.mlp.gate_proj", hidden, inner
        yield f"{at}.mlp.up_proj", hidden, inner
        yield f"{at}.mlp.down_proj", inner, hidden


_TYPES: Mapping[str, Callable[[_Config], NamedSizes]] = {
    "bert": _bert,
    "deit": _vit,
    "distilbert": _distilbert,
    "electra": _bert,
    "gemma": _llama,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "roberta": _bert,
    "vit": _vit,
    "xlm-roberta": _bert,
}
# Heads of language models: their names, and whether transformers ties them to the embedding by
# default.
_HEADS = {
    "gemma": ("lm_head", True),
    "gpt2": ("lm_head", True),
    "llama": ("lm_head", False),
    "mistral": ("lm_head", False),
    "qwen2": ("lm_head", False),
    "qwen3": ("lm_head", False),
}
_HEADED = ("ForCausalLM", "LMHeadModel")

KNOWN = tuple(sorted(_TYPES))
"""The model types that are known."""


def layers_of_config(
    path: str | Path, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Layers:
    """The linear layers of a config.json, or of the one in a folder.

    Args:
        path: The file, or its folder.
        include: Names or patterns for names: only these layers are searched.
        exclude: Names or patterns for names: these are not.

    Raises:
        InvalidInputError: It cannot be read, is no such config, has a model type that is not known,
            or an entry of include or exclude matches nothing.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "config.json"
        >>> _ = file.write_text(
        ...     '{"model_type": "bert", "hidden_size": 384, "intermediate_size": 1536,'
        ...     ' "num_hidden_layers": 6}'
        ... )
        >>> for group in layers_of_config(file).groups:
        ...     print(group.dims, group.role, group.count, *group.matches)
        384x384 query 6 *encoder.layer.*.attention.self.query
        384x384 key 6 *encoder.layer.*.attention.self.key
        384x384 value 6 *encoder.layer.*.attention.self.value
        384x384 attention.output.dense 6 *encoder.layer.*.attention.output.dense
        384x1536 intermediate.dense 6 *encoder.layer.*.intermediate.dense
        1536x384 layer.*.output.dense 6 *encoder.layer.*.output.dense
    """
    file = Path(path)
    file = file / "config.json" if untrusted.is_folder(file) else file
    config = _Config(_values(file), file)
    kind = config.values["model_type"]
    layers = [
        Layer(name, Dims(columns, rows), name, "Conv1D" if kind == "gpt2" else "Linear")
        for name, columns, rows in _TYPES[kind](config)
    ]
    tied: dict[str, str] = {}
    head = _head(config, kind)
    if isinstance(head, Layer):
        layers.append(head)
    elif head is not None:
        tied[head] = "its weight is the embedding's"
    selected, left = chosen(layers, include, exclude, known=tied)
    if not selected:
        raise InvalidInputError(
            f"--hf-config {file}: no linear layer is left to search: see --include and --exclude"
        )
    groups = grouped(selected, [layer for layer in layers if layer.name in left])
    is_vit = _TYPES[kind] is _vit
    note = (
        "The layers of the blocks"
        + (" and the head of the language model" if isinstance(head, Layer) else "")
        + " are listed; poolers and other heads are not in a config."
    )
    if is_vit:
        note += f" {_VIT_NOTE if not left else _VIT_NAMES}"
    return Layers(
        source=f"{file} ({kind})",
        groups=tuple(_for_plan(group, is_vit and not left) for group in groups),
        dense={**left, **tied},
        note=note,
    )


def _values(file: Path) -> Mapping[str, Any]:
    values = untrusted.json_of(file, "--hf-config")
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InvalidInputError(
            f"--hf-config {file}: a config of transformers is an object with a 'model_type'"
        )
    if values["model_type"] not in _TYPES:
        raise InvalidInputError(
            f"--hf-config {file}: the model type {values['model_type']!r} is not known; known are "
            f"{', '.join(KNOWN)}. For any other model give --model MODULE:FACTORY, or its sizes "
            "with --dims"
        )
    return values


def _head(config: _Config, kind: str) -> Layer | str | None:
    """The head of a language model; its name alone if it is tied; None if there is none."""
    classes = config.values.get("architectures") or []
    if not isinstance(classes, list):
        raise InvalidInputError(
            f"--hf-config {config.path}: architectures is {classes!r}, and must be a list of names"
        )
    if kind not in _HEADS or not any(str(name).endswith(_HEADED) for name in classes):
        return None
    name, tied = _HEADS[kind]
    if config.values.get("tie_word_embeddings", tied):
        return name
    hidden = config.size("n_embd", "hidden_size")
    return Layer(name, Dims(hidden, config.size("vocab_size")), name)


def _for_plan(group: Group, is_vit: bool) -> Group:
    """A group with name patterns for a plan that fit all classes built from the config.

    A base model is an attribute of a class with a head (``bert.encoder.layer...``), and ViT's
    layers have other names in transformers 4 (``encoder.layer.0.attention.attention.query``).
    """
    if is_vit:
        return replace(group, matches=("*layer*.*",))
    return replace(group, matches=tuple(f"*{match}" for match in group.matches))
