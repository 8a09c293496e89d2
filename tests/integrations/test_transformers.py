"""`KSConfig`: transformers loads dense checkpoints as chains, saves them and loads them again."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    CLIPTextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
)

import ksopt
from ksopt import InvalidInputError, KSConfig, KSLinear, KSStacked
from ksopt.conversion.plan import Plan, Rule
from ksopt.patterns.surroundings import Surroundings

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
CONFIGS = {
    "gpt2": GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=50,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "llama": LlamaConfig(hidden_size=32, intermediate_size=128, **SMALL),
    "bert": BertConfig(hidden_size=32, intermediate_size=128, **SMALL),
    "clip": CLIPTextConfig(hidden_size=32, intermediate_size=128, **SMALL),
    "vit": ViTConfig(hidden_size=32, intermediate_size=128, image_size=8, patch_size=4, **SMALL),
}
UP = "(1,32,8,4)*(4,8,8,1)"  # 32 inputs, 128 outputs
PLAN = {"32x128": UP, "128x32": "(1,8,8,4)*(4,8,32,1)"}
FUSED = {"*.c_attn": ["(1,8,8,4)*(4,8,8,1)"] * 3}
TOKENS = torch.arange(8)[None]


def inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    if model.config.model_type == "vit":
        return {"pixel_values": torch.ones(2, 3, 8, 8)}
    return {"input_ids": TOKENS}


def outputs(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(**inputs(model))[0]


def chains(model: nn.Module) -> dict[str, str]:
    return {n: str(one.chain) for n, one in model.named_modules() if isinstance(one, KSLinear)}


@pytest.fixture(params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A dense model in a folder."""
    AutoModel.from_config(CONFIGS[request.param]).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A dense language model, whose head shares the embedding's weight."""
    AutoModelForCausalLM.from_config(CONFIGS["gpt2"]).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def test_a_dense_checkpoint_is_loaded_as_chains_saved_and_loaded(
    checkpoint: Path, tmp_path: Path
) -> None:
    dense = AutoModel.from_pretrained(checkpoint)
    converted = ksopt.convert(dense, PLAN).model
    model = AutoModel.from_pretrained(checkpoint, quantization_config=KSConfig(PLAN))
    assert len(chains(model)) >= 4
    assert chains(model) == chains(converted)
    assert torch.equal(outputs(model), outputs(converted))
    folder = tmp_path / "chains"
    model.save_pretrained(folder)
    again = AutoModel.from_pretrained(folder)
    assert chains(again) == chains(model)
    assert torch.equal(outputs(again), outputs(model))
    # And once more, from the loaded model.
    again.save_pretrained(tmp_path / "twice")
    twice = AutoModel.from_pretrained(tmp_path / "twice", dtype=torch.bfloat16)
    assert chains(twice) == chains(model)
    assert next(twice.parameters()).dtype is torch.bfloat16
    assert (folder / "model.safetensors").stat().st_size < (
        checkpoint / "model.safetensors"
    ).stat().st_size


def test_the_saved_config_names_each_layer(gpt2: Path, tmp_path: Path) -> None:
    plan = {**PLAN, **FUSED}
    model = AutoModelForCausalLM.from_pretrained(gpt2, quantization_config=KSConfig(plan))
    fused = model.transformer.h[0].attn.c_attn
    assert isinstance(fused, KSStacked)
    model.save_pretrained(tmp_path / "chains")
    saved = json.loads((tmp_path / "chains" / "config.json").read_text("utf-8"))
    config = saved["quantization_config"]
    assert config["quant_method"] == "ksopt"
    assert [rule["match"] for rule in config["plan"]["layers"]] == [
        f"transformer.h.{at}.{name}"
        for at in range(2)
        for name in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")
    ]
    assert ksopt.Plan.from_json(json.dumps(config["plan"])).rules[0].chains == tuple(
        part.chain for part in fused.parts
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "chains")
    assert torch.equal(outputs(again), outputs(model))
    assert again.lm_head.weight is again.transformer.wte.weight  # tied, and so dense


def test_the_head_may_be_left_out_or_added(gpt2: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gpt2, quantization_config=KSConfig(PLAN))
    model.save_pretrained(tmp_path / "with")
    bare = AutoModel.from_pretrained(tmp_path / "with")
    assert len(chains(bare)) == 4
    assert torch.equal(outputs(bare), outputs(model.transformer))
    bare.save_pretrained(tmp_path / "without")
    headed = AutoModelForCausalLM.from_pretrained(tmp_path / "without")
    assert torch.equal(outputs(headed), outputs(model))


def test_layers_of_a_large_error_stay_dense(gpt2: Path, tmp_path: Path) -> None:
    config = KSConfig(PLAN, max_error=0.01)
    model = AutoModelForCausalLM.from_pretrained(gpt2, quantization_config=config)
    assert chains(model) == {}
    assert getattr(model.config, "quantization_config", None) is None
    model.save_pretrained(tmp_path / "same")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "same")
    assert torch.equal(outputs(again), outputs(AutoModelForCausalLM.from_pretrained(gpt2)))


def test_a_model_that_was_converted_otherwise_is_saved_too(gpt2: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gpt2)
    done = ksopt.convert(model, PLAN)
    model.config.quantization_config = KSConfig.of(done)
    model.save_pretrained(tmp_path / "chains")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "chains")
    assert torch.equal(outputs(again), outputs(model))
    with pytest.raises(InvalidInputError, match="no layer was converted"):
        KSConfig.of(ksopt.convert(AutoModel.from_pretrained(gpt2), {"32x128": None}))


def test_the_plan_may_be_a_file(gpt2: Path, tmp_path: Path) -> None:
    ksopt.Plan.of(PLAN).write(tmp_path / "plan.json")
    config = KSConfig(tmp_path / "plan.json")
    assert config.to_plan() == ksopt.Plan.of(PLAN)
    assert KSConfig.from_dict(config.to_dict()).to_plan() == config.to_plan()
    assert len(chains(AutoModel.from_pretrained(gpt2, quantization_config=config))) == 4


SQUARE = ksopt.Chain.parse("(1,8,8,4)*(4,8,8,1)")
THREE = Rule((SQUARE,), "*", 32, 32, where=Surroundings(("bias",), siblings=3))
SIBLINGS = Plan((THREE, *Plan.of(PLAN).rules))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A dense model, in which q, k and v are layers of one size on one input."""
    AutoModel.from_config(CONFIGS["llama"]).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def test_conditions_hold_for_what_the_inputs_show(llama: Path, tmp_path: Path) -> None:
    config = KSConfig(SIBLINGS, example_inputs={"input_ids": TOKENS})
    with pytest.warns(UserWarning, match="ksopt: ") as warned:
        model = AutoModel.from_pretrained(llama, quantization_config=config)
    done = ksopt.convert(
        AutoModel.from_pretrained(llama), SIBLINGS, example_inputs={"input_ids": TOKENS}
    )
    assert chains(model) == chains(done.model)
    squares = [name for name in chains(model) if "self_attn" in name]
    assert squares == [f"layers.{at}.self_attn.{one}_proj" for at in range(2) for one in "qkv"]
    (text,) = [str(one.message) for one in warned if "ksopt: " in str(one.message)]
    assert text == (
        "ksopt: layers.0.self_attn.o_proj, layers.1.self_attn.o_proj stay dense: the plan has "
        "chains for such layers only where they are 3 on one input, followed by a bias; this one "
        "is followed by a residual."
    )
    assert "example_inputs" not in repr(config)
    model.save_pretrained(tmp_path / "chains")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = AutoModel.from_pretrained(tmp_path / "chains")
    assert torch.equal(outputs(again), outputs(model))


def test_without_inputs_a_warning_names_the_layers_and_the_way(llama: Path) -> None:
    with pytest.warns(UserWarning, match="What surrounds it is not known") as warned:
        model = AutoModel.from_pretrained(llama, quantization_config=KSConfig(SIBLINGS))
    assert not any("self_attn" in name for name in chains(model))
    assert len(chains(model)) == 6
    (text,) = [str(one.message) for one in warned if "ksopt: " in str(one.message)]
    assert "layers.0.self_attn.q_proj, layers.0.self_attn.k_proj" in text
    assert "4 more stay dense: the plan has chains for such layers only where they are 3 on" in text
    assert "(example_inputs of ksopt.convert and KSConfig, --inputs of the command)" in text


@pytest.mark.parametrize(
    ("plan", "options", "words"),
    [
        ({"nothing": UP}, {}, "the plan's rule for 'nothing' matches no linear layer"),
        ({"128x32": UP}, {}, "is for layers of in_features=128"),
        ({"32x128": "chain"}, {}, "the plan's rule for '32x128'"),
        ("none.json", {}, "none.json"),
        (PLAN, {"bits": 4}, "KSConfig has no 'bits': it takes plan, max_error, refine and"),
        (PLAN, {"max_error": -1}, "max_error -1: give a relative error"),
        (SIBLINGS, {"example_inputs": 3}, "example_inputs: the inputs must be a tensor"),
    ],
)
def test_misuse_is_one_sentence(gpt2: Path, plan: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        AutoModel.from_pretrained(gpt2, quantization_config=KSConfig(plan, **options))
    assert words in str(refusal.value)


def test_a_loaded_model_trains(gpt2: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gpt2, quantization_config=KSConfig(PLAN))
    before = {name: one.clone() for name, one in model.named_parameters()}
    data = [{"input_ids": TOKENS[0], "labels": TOKENS[0]}] * 4
    words = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path / "run"), num_train_epochs=1, **words)
    Trainer(model=model, args=arguments, train_dataset=data).train()
    changed = [name for name, one in model.named_parameters() if not torch.equal(one, before[name])]
    assert "transformer.h.0.mlp.c_fc.weights.0" in changed


@pytest.mark.slow
def test_transformers_is_imported_by_its_own_module_alone() -> None:
    code = (
        "import sys, ksopt, ksopt.nn, ksopt.conversion.apply, ksopt.optimization.run\n"
        "assert not {'transformers', 'peft', 'timm'} & set(sys.modules)\n"
        "sys.modules['transformers'] = None\n"
        "from ksopt import *\n"
        "try:\n    ksopt.KSConfig\n"
        "except ksopt.UnavailableError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "KSConfig needs transformers, which cannot be imported" in done.stdout
    assert "pip install 'ksopt[transformers]'" in done.stdout
