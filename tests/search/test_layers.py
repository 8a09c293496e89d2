"""Lists of a model's layers: from the model, from a config.json; their groups, roles and names."""

import json
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ksopt
from ksopt import Chain
from ksopt.conversion.plan import Plan, Rule
from ksopt.conversion.resolve import resolve
from ksopt.errors import InvalidInputError
from ksopt.patterns.size import Dims
from ksopt.search import hf_config, layers_of_config, layers_of_model
from ksopt.search.layers import Layer, Layers, grouped

from layer_models import Tiny, on_meta  # isort: skip

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(**change: Any) -> Path:
        values = {name: value for name, value in (CONFIG | change).items() if value is not ...}
        file = tmp_path / "config.json"
        file.write_text(json.dumps(values), encoding="utf-8")
        return file

    return write


def summary(layers: Layers) -> list[tuple[str, str, int, tuple[str, ...]]]:
    return [(str(g.dims), g.role, g.count, g.matches) for g in layers.groups]


@pytest.mark.parametrize("build", [Tiny, on_meta])
def test_a_models_layers(build: Callable[[], nn.Module]) -> None:
    actual = layers_of_model(build())
    assert summary(actual) == [
        ("16x48", "qkv", 2, ("blocks.*.qkv",)),
        ("16x32", "up", 2, ("blocks.*.up",)),
        ("32x16", "down", 2, ("blocks.*.down",)),
    ]
    assert list(actual.dense) == ["head"]
    assert "shared with embed.weight" in actual.dense["head"]
    assert actual.parameters == sum(p.numel() for p in build().parameters())
    assert actual.sizes == (Dims(16, 48), Dims(16, 32), Dims(32, 16))
    assert actual.sentence == (
        "the model: 6 linear layers (2 of 16x48, 2 of 16x32, 2 of 32x16); 1 other is left dense"
    )
    assert Layers.from_json(json.loads(json.dumps(actual.to_json()))) == actual


def test_include_and_exclude() -> None:
    actual = layers_of_model(Tiny(), exclude=["blocks.0.up", "*.qkv"])
    # No pattern fits the other `up` alone.
    assert summary(actual) == [
        ("32x16", "down", 2, ("blocks.*.down",)),
        ("16x32", "up", 1, ("blocks.1.up",)),
    ]
    assert actual.dense["blocks.0.up"] == "it is excluded"
    actual = layers_of_model(Tiny(), include=["*.down"])
    assert summary(actual) == [("32x16", "down", 2, ("blocks.*.down",))]
    assert actual.dense["blocks.0.qkv"] == "it is not among those included"
    with pytest.raises(InvalidInputError, match=r"exclude 'bloks\.\*' matches no linear layer.*it"):
        layers_of_model(Tiny(), exclude=["bloks.*"])
    with pytest.raises(InvalidInputError, match="no linear layer is left to search"):
        layers_of_model(Tiny(), exclude=["*"])
    assert layers_of_model(Tiny(), exclude=["head"]).count == 6  # it would stay dense anyway


def test_names_are_listed_where_a_pattern_fits_too_much() -> None:
    model = nn.ModuleDict(
        {
            "a": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
            "b": nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 8)]),
        }
    )
    actual = layers_of_model(model, exclude=["b.0"])
    assert summary(actual) == [
        ("4x4", "a.*", 2, ("a.*",)),
        ("4x8", "b.1", 1, ("b.1",)),
    ]
    layers = [Layer(name, Dims(4, 4), name) for name in ("x.0.q", "x.1.q", "x.0.in.q", "y.q")]
    assert [group.matches for group in grouped(layers)] == [
        ("x.0.q", "x.1.q"),  # x.*.q would fit x.0.in.q too
        ("x.0.in.q",),
        ("y.q",),
    ]


def test_layers_that_share_a_weight_count_it_once() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    (group,) = layers_of_model(model).groups
    assert (group.count, group.weights, group.dense_parameters) == (3, 2, 32)


def shared_weight() -> nn.Module:
    """Two layers of different roles, with one weight."""
    model = nn.ModuleDict({"enc": nn.Linear(4, 4, bias=False), "dec": nn.Linear(4, 4, bias=False)})
    model["dec"].weight = model["enc"].weight
    return model


def test_layers_of_two_roles_that_share_a_weight_count_it_once() -> None:
    actual = layers_of_model(shared_weight())
    assert [(group.role, group.count, group.weights) for group in actual.groups] == [
        ("enc", 1, 1),
        ("dec", 1, 0),
    ]
    assert sum(group.dense_parameters for group in actual.groups) == actual.parameters == 16


def test_a_layer_that_shares_its_weight_with_one_left_out_stays_dense() -> None:
    model = nn.ModuleDict({"tied": shared_weight(), "own": nn.Linear(4, 4)})
    actual = layers_of_model(model, exclude=["tied.dec"])
    assert summary(actual) == [("4x4", "own", 1, ("own",))]
    assert actual.dense["tied.dec"] == "it is excluded"
    assert "shared with tied.dec.weight" in actual.dense["tied.enc"]
    # A plan that named it would be refused.
    with pytest.raises(InvalidInputError, match=r"tied\.enc cannot be converted"):
        ksopt.convert(model, ksopt.Plan.of({"tied.enc": "(1,2,2,2)*(2,2,2,1)"}))


def test_what_cannot_be_converted_is_left_dense() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    actual = layers_of_model(model)
    assert summary(actual) == [("8x8", "0", 1, ("0",))]
    assert "NonDynamicallyQuantizableLinear" in actual.dense["1.out_proj"]
    with pytest.raises(InvalidInputError, match=r"no linear layer that can be searched.*out_proj"):
        layers_of_model(nn.Sequential(nn.MultiheadAttention(8, 2)))
    with pytest.raises(InvalidInputError, match="the model is itself a Linear"):
        layers_of_model(nn.Linear(4, 4))


def test_a_configs_layers(written: Written) -> None:
    actual = layers_of_config(written())
    assert summary(actual) == [
        ("64x64", "q_proj", 3, ("*layers.*.self_attn.q_proj",)),
        ("64x32", "k_proj", 3, ("*layers.*.self_attn.k_proj",)),
        ("64x32", "v_proj", 3, ("*layers.*.self_attn.v_proj",)),
        ("64x64", "o_proj", 3, ("*layers.*.self_attn.o_proj",)),
        ("64x96", "gate_proj", 3, ("*layers.*.mlp.gate_proj",)),
        ("64x96", "up_proj", 3, ("*layers.*.mlp.up_proj",)),
        ("96x64", "down_proj", 3, ("*layers.*.mlp.down_proj",)),
        ("64x50", "lm_head", 1, ("*lm_head",)),
    ]
    assert layers_of_config(written().parent) == actual
    tied = layers_of_config(written(tie_word_embeddings=True))
    assert tied.dense == {"lm_head": "its weight is the embedding's"}
    assert layers_of_config(written(architectures=["LlamaModel"])).dense == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model_type": "mamba"},
            "model type 'mamba' is not known; known are bert, deit, .*--dims",
        ),
        ({"model_type": ...}, "an object with a 'model_type'"),
        ({"hidden_size": ...}, "there is no hidden_size in it"),
        ({"hidden_size": "64"}, "hidden_size is '64', and must be a whole number"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"architectures": 5}, "architectures is 5, and must be a list of names"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', and must be"),
        ({"num_attention_heads": 5}, "hidden_size 64 is no multiple of num_attention_heads 5"),
        ({"model_type": "mistral", "num_key_value_heads": ...}, "no num_key_value_heads"),
        ({"model_type": "qwen3"}, "there is no head_dim in it"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_used(written: Written, change: dict, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        layers_of_config(written(**change))


def test_files_that_are_no_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(InvalidInputError, match="cannot be read: No such file"):
        layers_of_config(file)
    for text, words in (("{", "is not JSON"), ("[1]", "an object with a 'model_type'")):
        file.write_text(text)
        with pytest.raises(InvalidInputError, match=words):
            layers_of_config(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        layers_of_config(file)


SIZES: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "default": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}
KEYED = ("gemma", "llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("kind", hf_config.KNOWN)
def test_the_names_and_sizes_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = SIZES.get(kind, SIZES["default"])
    sizes = sizes | ({"num_key_value_heads": 2, "head_dim": 16} if kind in KEYED else {})
    config = transformers.AutoConfig.for_model(kind, vocab_size=50, pad_token_id=0, **sizes)
    with torch.device("meta"):
        if kind in hf_config._HEADS:
            model = transformers.AutoModelForCausalLM.from_config(config)
        else:
            model = transformers.AutoModel.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    actual = layers_of_config(tmp_path)
    expected: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "Conv1D":
            expected[name] = tuple(module.weight.shape)
        elif isinstance(module, nn.Linear):
            expected[name] = (module.in_features, module.out_features)
    reported: dict[str, tuple[int, int]] = {}
    for group in actual.groups:
        size = (group.dims.in_features, group.dims.out_features)
        alike = [
            name
            for name in expected
            if expected[name] == size and any(fnmatchcase(name, m) for m in group.matches)
        ]
        assert len(alike) >= group.count > 0
        reported |= dict.fromkeys(alike, size)
    left = {name for name in expected if name not in reported}
    # What a config does not tell, and a head that is the embedding's.
    assert all(re.search(r"pooler|embeddings_project", n) or n in actual.dense for n in left), left
    assert actual.count == len(reported)
    # What `ksopt convert` makes of a plan with these names.
    rules = {
        Rule((Chain.monarch(*size, p=2),), match, *size)
        for group in actual.groups
        for size in [(group.dims.in_features, group.dims.out_features)]
        for match in group.matches
    }
    choices, _ = resolve(model, Plan(tuple(rules)), (), ())
    assert {choice.place.name for choice in choices} == set(reported)


def test_a_vits_patterns_fit_both_of_its_names(written: Written) -> None:
    """transformers 4 and 5 name its layers otherwise."""
    actual = layers_of_config(written(model_type="vit"))
    old = "encoder.layer.0."
    names = {
        (64, 64): (f"{old}attention.attention.query", f"{old}attention.output.dense"),
        (64, 96): (f"{old}intermediate.dense", "layers.0.mlp.fc1"),
        (96, 64): (f"vit.{old}output.dense", "vit.layers.0.mlp.fc2"),
    }
    for group in actual.groups:
        for name in names[group.dims.in_features, group.dims.out_features]:
            assert any(fnmatchcase(name, match) for match in group.matches)
    assert "transformers 4" in actual.note
    assert (
        "transformers 4" not in layers_of_config(written(model_type="vit"), exclude=["*fc1"]).note
    )
