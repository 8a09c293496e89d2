"""LoRA of PEFT on models with chains."""

from collections import OrderedDict
from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn

import ksopt
from ksopt import InvalidInputError, KSLinear
from ksopt.integrations.peft import LoraChain, with_chains

PLAN = {"up": "(1,16,8,4)*(4,8,8,1)", "qkv": ["(1,8,8,4)*(4,8,16,1)"] * 3}
TARGETS = ["up", "qkv", "head"]


def converted(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(
            up=nn.Linear(32, 64), act=nn.ReLU(), qkv=nn.Linear(64, 96), head=nn.Linear(96, 4)
        )
    ).to(dtype)
    ksopt.convert(model, PLAN)
    return model


def config(**options: object) -> LoraConfig:
    return with_chains(LoraConfig(**{"r": 2, "target_modules": TARGETS, **options}))


def trained(model: PeftModel, x: Tensor) -> list[float]:
    """The losses of some steps of training."""
    learning = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2)
    losses = []
    for _ in range(10):
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("error")
def test_adapters_beside_chains_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    base, x = converted(), torch.randn(8, 32)
    expected = base(x)
    model = peft.get_peft_model(base, config())
    assert isinstance(base.up, LoraChain)
    assert isinstance(base.up.base_layer, KSLinear)
    torch.testing.assert_close(model(x), expected)  # adapters begin at zero
    names = {name for name, one in model.named_parameters() if one.requires_grad}
    assert names == {
        f"base_model.model.{layer}.lora_{side}.default.weight" for layer in TARGETS for side in "AB"
    }
    losses = trained(model, x)
    assert losses[-1] < 0.5 * losses[0]
    with model.disable_adapter():
        torch.testing.assert_close(model(x), expected)
    model.save_pretrained(tmp_path)
    read = with_chains(LoraConfig.from_pretrained(tmp_path))
    again = PeftModel.from_pretrained(converted(), tmp_path, config=read)
    torch.testing.assert_close(again(x), model(x))


def test_the_product_is_the_chains_and_the_adapters() -> None:
    x = torch.randn(5, 32)
    model = peft.get_peft_model(converted(), config(lora_alpha=6, init_lora_weights=False))
    layer = model.base_model.model.up
    low_rank = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    matrix = layer.base_layer.to_dense() + 3.0 * low_rank
    torch.testing.assert_close(layer(x), x @ matrix.T + layer.base_layer.bias)


def test_adapters_have_the_dtype_of_the_chain() -> None:
    model = peft.get_peft_model(converted(torch.bfloat16), config(), autocast_adapter_dtype=False)
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert model(torch.randn(2, 32).bfloat16()).dtype is torch.bfloat16


def test_an_adapter_is_not_merged() -> None:
    model = peft.get_peft_model(converted(), config())
    with pytest.raises(InvalidInputError, match="their sum is no chain"):
        model.merge_and_unload()


def test_ways_that_need_a_dense_weight_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="init_lora_weights='pissa' changes a dense weight"):
        peft.get_peft_model(converted(), config(target_modules=["up"], init_lora_weights="pissa"))
    with pytest.raises(ValueError, match="use_dora"):
        peft.get_peft_model(converted(), config(target_modules=["up"], use_dora=True))
