"""Conversion in Python: replaced, preserved and reported properties, and the reversal."""

import copy
import math

import pytest
import torch
from conversion_models import DOWN, FUSED, UP, Tiny, exact, tiny
from torch import Tensor, nn

import ksopt
from ksopt import Chain, InvalidInputError, KSLinear, KSStacked

PLAN = {"blocks.*.up": UP, "32x8": DOWN}
TOKENS = torch.arange(12).reshape(2, 6)


def as_product(layer: nn.Linear, chain: str) -> None:
    layer.weight.data = exact(chain, layer.weight.dtype)


def test_a_model_of_products_computes_the_same() -> None:
    model = tiny().double()  # attention to large values magnifies rounding
    for block in model.blocks:
        as_product(block.up, UP)
        as_product(block.down, DOWN)
    expected = model(TOKENS)
    done = ksopt.convert(model, PLAN)
    assert [layer.name for layer in done.layers] == [
        f"blocks.{index}.{name}" for index in (0, 1) for name in ("up", "down")
    ]
    assert all(layer.relative_error < 1e-13 for layer in done.layers)
    assert isinstance(model.blocks[1].up, KSLinear)
    assert type(model.blocks[0].qkv) is nn.Linear
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-8, atol=1e-8)


def test_the_errors_are_those_of_the_weights() -> None:
    model = tiny()
    before = copy.deepcopy(model)
    done = ksopt.convert(model, PLAN)
    for layer in done.layers:
        dense = before.get_submodule(layer.name).weight
        new = model.get_submodule(layer.name).to_dense()
        error = ((new - dense).norm() / dense.norm()).item()
        assert layer.relative_error == pytest.approx(error, rel=1e-4)
        assert 0 < layer.lower_bound <= layer.relative_error < 1
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert done.parameters == counted < done.dense_parameters
    assert done.dense_parameters == sum(p.numel() for p in before.parameters())
    rows = done.table().rows
    assert [row[0] for row in rows] == [layer.name for layer in done.layers]
    assert f"{done.parameters:,} parameters" in done.sentence


def test_revert_restores_the_very_layers() -> None:
    model = tiny()
    layers = dict(model.named_modules())
    expected = model(TOKENS)
    done = ksopt.convert(model, PLAN)
    with torch.no_grad():
        model.blocks[0].up.bias.add_(1)  # what is learned afterwards is not the dense layer's
    assert not torch.equal(model(TOKENS), expected)
    assert done.revert() is model
    assert dict(model.named_modules()) == layers
    assert torch.equal(model(TOKENS), expected)
    with pytest.raises(InvalidInputError, match="done before"):
        done.revert()


def test_revert_notices_a_layer_that_was_replaced_since() -> None:
    model = tiny()
    done = ksopt.convert(model, PLAN)
    model.blocks[0].up = nn.Linear(8, 32)
    with pytest.raises(InvalidInputError, match=r"blocks\.0\.up is no longer the one"):
        done.revert()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtype_mode_and_requires_grad_are_preserved(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8, bias=False)).to(dtype)
    model[0].eval().weight.requires_grad_(False)
    model[1].train()
    bias = model[0].bias.clone()
    ksopt.convert(model, {"0": UP, "1": DOWN})
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert [model[0].training, model[1].training] == [False, True]
    assert [weight.requires_grad for weight in model[0].weights] == [False, False]
    assert model[0].bias.requires_grad
    assert torch.equal(model[0].bias, bias)
    assert model[1].bias is None
    assert all(weight.requires_grad for weight in model[1].weights)


def test_no_random_numbers_are_drawn_and_gradients_flow() -> None:
    model = tiny().train()
    state = torch.get_rng_state()
    ksopt.convert(model, PLAN)
    assert torch.equal(torch.get_rng_state(), state)
    model(TOKENS).square().sum().backward()
    assert all(weight.grad.any() for weight in model.blocks[0].up.weights)


def test_a_fused_layer_takes_one_chain_or_one_for_each_part() -> None:
    part = "(1,4,4,2)*(2,4,4,1)"
    model = nn.Sequential(nn.Linear(8, 24))
    pieces = [exact(part) for _ in range(3)]
    model[0].weight.data = torch.cat(pieces)
    x = torch.randn(5, 8)
    expected = model(x)
    done = ksopt.convert(model, {"0": [part] * 3})
    assert isinstance(model[0], KSStacked)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model[0].to_dense(), torch.cat(pieces), rtol=1e-4, atol=1e-5)
    assert done.layers[0].parameters == 3 * Chain.parse(part).nnz
    done.revert()
    whole = ksopt.convert(model, {"0": FUSED})
    assert isinstance(model[0], KSLinear)
    assert whole.layers[0].relative_error > 0.01  # one chain for all three is another set


def test_the_error_of_parts_is_that_of_the_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 24))
    model[0].weight.data[:8] *= 5
    dense = model[0].weight.detach().clone()
    done = ksopt.convert(model, {"0": ["(1,4,2,2)*(2,2,4,1)", "(1,8,8,1)", "(1,8,1,1)*(1,1,8,1)"]})
    error = ((model[0].to_dense() - dense).norm() / dense.norm()).item()
    assert done.layers[0].relative_error == pytest.approx(error, rel=1e-4)


class Conv1D(nn.Module):
    """As in transformers.pytorch_utils: the weight is [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.size()[:-1], self.bias.shape[0])
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


def test_conv1d_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Conv1D(32, 8))
    plan = {"0": UP}
    with pytest.raises(InvalidInputError, match="matches no linear layer"):
        ksopt.convert(model, plan)  # another library's class of that name may be anything
    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")
    model[0].weight.data = exact(UP).T.contiguous()
    x = torch.randn(2, 3, 8)
    expected = model(x)
    done = ksopt.convert(model, plan)
    assert done.layers[0].kind == "Conv1D"
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_a_weight_tied_to_an_embedding_stays_dense_and_tied() -> None:
    model = tiny()
    done = ksopt.convert(model, {"8x50": Chain.low_rank(8, 50, 2), **PLAN})
    assert model.head.weight is model.embed.weight
    assert done.dense["head"] == (
        "its weight is shared with embed.weight, which does not become the same"
    )
    with pytest.raises(InvalidInputError, match=r"head cannot be converted: its weight is shared"):
        ksopt.convert(tiny(), {"head": Chain.low_rank(8, 50, 2)})


def test_layers_that_share_a_weight_share_the_chains() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model.add_module("again", model[2])  # one module, two names
    chain = "(1,4,2,2)*(2,2,4,1)"
    x = torch.randn(3, 8)
    done = ksopt.convert(model, {"8x8": chain})
    assert model[0].weights[0] is model[1].weights[0]
    assert model[0].bias is not model[1].bias
    assert model.again is model[2]
    assert isinstance(model.again, KSLinear)
    assert [layer.names for layer in done.layers] == [("0",), ("1",), ("2", "again")]
    assert "shares its weights with 0" in done.layers[1].notes[0]
    assert done.parameters == sum(p.numel() for p in model.parameters())
    model(x).sum().backward()
    done.revert()
    assert type(model.again) is nn.Linear
    assert model.again is model[2]
    # Only one of the two would become a chain: neither does.
    stored = ksopt.convert(model, {"0": None, "8x8": chain})
    assert [layer.name for layer in stored.layers] == ["2"]
    assert "shared with 0.weight" in stored.dense["1"]
    assert model[0].weight is model[1].weight


def test_hooks_go_along_and_their_handles_still_remove_them() -> None:
    model = nn.Sequential(nn.Linear(8, 32))
    calls: list[str] = []
    handle = model[0].register_forward_hook(lambda m, a, o: calls.append(type(m).__name__))
    model[0].register_forward_pre_hook(lambda m, a: calls.append("before"))
    model[0].register_full_backward_hook(lambda m, i, o: calls.append("back"))
    model[0].weight.register_hook(lambda g: None)
    done = ksopt.convert(model, {"0": UP})
    assert done.layers[0].notes[0] == "Its 3 hooks went along."
    assert "gradient did not go along" in done.layers[0].notes[1]
    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert calls == ["before", "KSLinear", "back"]
    handle.remove()
    calls.clear()
    model(torch.randn(2, 8))
    assert calls == ["before"]
    done.revert()
    calls.clear()
    model(torch.randn(2, 8))
    assert calls == ["before"]  # removed from both


def test_layers_that_are_not_plain_stay_dense_with_a_reason() -> None:
    class Scaled(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "scaled": Scaled(8, 32),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(8, 32)),
            "attention": nn.MultiheadAttention(8, 2),
            "hooked": nn.Linear(8, 32),
            "plain": nn.Linear(8, 32),
            "complex": nn.Linear(8, 32, dtype=torch.complex64),
        }
    )
    model["hooked"]._register_state_dict_hook(lambda *arguments: None)
    done = ksopt.convert(model, {"8x32": UP})
    assert done.dense["attention.out_proj"] == "no rule of the plan matches it"  # of another size
    done.revert()
    done = ksopt.convert(model, {"8x32": UP, "8x8": Chain.dense(8, 8)})
    assert [layer.name for layer in done.layers] == ["plain"]
    assert "is a Scaled" in done.dense["scaled"]
    assert "parametrized" in done.dense["parametrized"]
    assert "NonDynamicallyQuantizableLinear" in done.dense["attention.out_proj"]
    assert "hooks on its state_dict" in done.dense["hooked"]
    assert "complex64" in done.dense["complex"]
    with pytest.raises(InvalidInputError, match="the layer scaled cannot be converted: it is a"):
        ksopt.convert(model, {"scaled": UP})
    with pytest.raises(InvalidInputError, match="the model is itself a Linear"):
        ksopt.convert(nn.Linear(8, 32), {"8x32": UP})


@pytest.mark.parametrize("masked", [False, True])
def test_pytorchs_own_transformer_leaves_its_fast_path(masked: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    for block in model.layers:
        as_product(block.linear1, UP)
        as_product(block.linear2, DOWN)
    x = torch.randn(3, 5, 8)
    mask = torch.arange(5) >= torch.tensor([[5], [4], [2]]) if masked else None
    with torch.inference_mode():
        expected = model(x, src_key_padding_mask=mask)
        done = ksopt.convert(model, {"*.linear1": UP, "*.linear2": DOWN})
        actual = model(x, src_key_padding_mask=mask)
        if masked:  # what stands at a masked place means nothing
            actual, expected = (
                actual.where(~mask[..., None], 0),
                expected.where(~mask[..., None], 0),
            )
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    done.revert()
    assert model.use_nested_tensor is True
    assert model.layers[0].activation_relu_or_gelu == 1


def test_include_and_exclude() -> None:
    plan = {"8x32": UP, "32x8": DOWN}
    for options, names in [
        ({"include": "blocks.1.*"}, ["blocks.1.up", "blocks.1.down"]),
        ({"exclude": ["*.down", "blocks.0.up"]}, ["blocks.1.up"]),
        ({"include": ["*.up"], "exclude": "blocks.1.up"}, ["blocks.0.up"]),
    ]:
        done = ksopt.convert(tiny(), plan, **options)
        assert [layer.name for layer in done.layers] == names
    with pytest.raises(InvalidInputError, match=r"exclude 'block\.0' matches no linear layer"):
        ksopt.convert(tiny(), plan, exclude="block.0")


def test_max_error_keeps_what_would_lose_more() -> None:
    model = tiny()
    as_product(model.blocks[0].up, UP)
    done = ksopt.convert(model, PLAN, max_error=0.01)
    assert [layer.name for layer in done.layers] == ["blocks.0.up"]
    assert "more than 0.01" in done.dense["blocks.1.down"]
    with pytest.raises(InvalidInputError, match="max_error -1: give a relative error"):
        ksopt.convert(model, PLAN, max_error=-1)


def test_refine_lowers_the_error_of_three_factors() -> None:
    plan = {"8x32": "(1,8,2,4)*(2,2,2,2)*(4,2,2,1)"}
    rough, fine = (ksopt.convert(tiny(), plan, refine=steps) for steps in (0, 20))
    for before, after in zip(rough.layers, fine.layers, strict=True):
        assert after.relative_error < before.relative_error


def test_weights_are_loaded_first() -> None:
    other = tiny()
    for parameter in other.parameters():
        parameter.data = parameter.data * 2
    expected = ksopt.convert(other, PLAN).model(TOKENS)
    actual = ksopt.convert(tiny(), PLAN, weights=other_state()).model(TOKENS)
    assert torch.equal(actual, expected)


def other_state() -> dict[str, Tensor]:
    model = tiny()
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    return model.state_dict()


def test_state_dict_round_trip() -> None:
    model = ksopt.convert(tiny(), PLAN).model
    state = model.state_dict()
    assert "blocks.0.up.weights.1" in state
    assert "blocks.0.up.weight" not in state
    other = ksopt.convert(Tiny().eval(), PLAN).model
    other.load_state_dict(state)
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_progress_names_the_layers() -> None:
    messages: list[str] = []
    ksopt.convert(tiny(), PLAN, progress=messages.append)
    assert messages[0] == "1/4 blocks.0.up"
    assert messages[-1] == "4/4 blocks.1.down"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"blocks.*.upp": UP},
            r"rule for 'blocks.\*.upp' matches no linear layer .* it has blocks",
        ),
        ({"8x33": "(1,33,8,1)"}, "of in_features=8 and out_features=33 matches no linear layer"),
        (
            {"blocks.0.up": DOWN},
            "blocks.0.up has in_features=8 and out_features=32, but the plan's",
        ),
        ({"blocks.0.qkv": ["(1,8,8,1)"] * 2}, "with in_features=8 and out_features=16"),
        ({}, "at least one rule"),
    ],
)
def test_plans_that_do_not_fit(plan: dict, message: str) -> None:
    model = tiny()
    before = list(model.modules())
    with pytest.raises(InvalidInputError, match=message):
        ksopt.convert(model, plan)
    assert list(model.modules()) == before


def test_layers_without_values_are_refused_and_nothing_is_changed() -> None:
    model = tiny()
    model.blocks[1].down.weight.data[0, 0] = math.nan
    before = list(model.modules())
    with pytest.raises(InvalidInputError, match=r"the layer blocks\.1\.down: .* NaN or infinity"):
        ksopt.convert(model, PLAN)
    assert list(model.modules()) == before
    with pytest.raises(InvalidInputError, match="meta device and has no values"):
        ksopt.convert(tiny().to("meta"), PLAN)


def test_stacked_layers_refuse_what_does_not_stack() -> None:
    with pytest.raises(InvalidInputError, match="one layer or more"):
        KSStacked([])
    with pytest.raises(InvalidInputError, match=r"in_features \[4, 8\]"):
        KSStacked([KSLinear(8, 4, "(1,4,8,1)"), KSLinear(4, 4, "(1,4,4,1)")])
    with pytest.raises(InvalidInputError, match="all batch_first"):
        KSStacked([KSLinear(8, 4, "(1,4,8,1)", layout="batch_last")])
