"""Self-guided training: from a dense layer to its chain, and nothing left behind."""

import copy
import io

import pytest
import torch
from torch import nn

import ksopt
from ksopt.errors import InvalidInputError
from ksopt.nn import KSLinear, KSStacked, SelfGuided, SelfGuidedLinear

CHAIN = "(1,4,4,4)*(4,4,4,1)"


def trained(model, guide, steps, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        x = torch.randn(8, 16, dtype=next(model.parameters()).dtype)
        loss = (model(x) - x.roll(1, -1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        guide.step(optimizer)
    return optimizer


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_begins_at_a_trained_dense_layer_and_ends_at_the_chain(layout, activation):
    torch.manual_seed(0)
    dense = nn.Linear(16, 32, dtype=torch.float64)
    layer = KSLinear(
        16, 32, "(1,8,4,4)*(4,4,4,1)", layout=layout, activation=activation, dtype=torch.float64
    )
    with torch.no_grad():
        layer.bias.copy_(dense.bias)
    model = nn.Sequential(layer)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    expected = dense(x) if activation is None else nn.functional.gelu(dense(x))
    x = x.movedim(-1, 0) if layout == "batch_last" else x
    expected = expected.movedim(-1, 0) if layout == "batch_last" else expected
    of_chain = layer(x)
    guide = SelfGuided(model, steps=4, dense={"0.weight": dense.weight})
    assert guide.alpha == 1
    torch.testing.assert_close(model(x), expected)
    alphas = []
    for _ in range(4):
        guide.step()
        alphas.append(guide.alpha)
    assert alphas == pytest.approx([(2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0])
    assert torch.equal(model(x), of_chain)
    guide.step()  # more are nothing
    assert torch.equal(model(x), of_chain)


def test_halfway_it_is_the_mean_of_both_and_both_learn():
    torch.manual_seed(0)
    model = nn.Sequential(KSLinear(16, 16, CHAIN, dtype=torch.float64))
    dense = torch.randn(16, 16, dtype=torch.float64)
    x = torch.randn(5, 16, dtype=torch.float64)
    of_chain = model(x)
    guide = SelfGuided(model, steps=2, dense={"0.weight": dense})
    guide.step()
    y = model(x)
    torch.testing.assert_close(y, (of_chain + x @ dense.T + model[0].bias) / 2)
    torch.testing.assert_close(x @ model[0].to_dense().T + model[0].bias, y)
    y.square().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad.abs().max() > 0} == {
        "0.weights.0", "0.weights.1", "0.bias", "0.dense",
    }  # fmt: skip


def test_from_scratch_the_dense_matrix_starts_at_the_product_so_nothing_jumps():
    model = nn.Sequential(KSLinear(16, 16, CHAIN), nn.ReLU(), KSLinear(16, 16, CHAIN))
    x = torch.randn(5, 16)
    before = model(x)
    guide = SelfGuided(model, steps=7)
    for _ in range(7):
        torch.testing.assert_close(model(x), before)
        guide.step()
    assert torch.equal(model(x), before)


def test_afterwards_the_model_is_a_converted_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    dense = model.state_dict()
    before = copy.deepcopy(dense)
    ksopt.convert(model, {"*": CHAIN})
    names, layers = sorted(model.state_dict()), list(model)
    guide = SelfGuided(model, 5, dense)
    assert sorted(model.state_dict()) == sorted([*names, "0.dense", "2.dense"])
    optimizer = trained(model, guide, 5)
    assert sorted(model.state_dict()) == names
    assert list(model) == layers
    assert type(model[0]) is KSLinear
    assert guide.layers == []
    # The optimizer has let go of the dense matrices and their moments, and goes on.
    known = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in known} == {id(p) for p in model.parameters()}
    assert len(optimizer.state) == len(known)
    trained(model, guide, 2, optimizer)
    # The matrices that were handed over are not trained themselves.
    assert all(torch.equal(dense[key], before[key]) for key in dense if "weight" in key)


def test_parts_of_a_fused_layer_take_their_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48))
    dense = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(5, 16)
    expected = model(x)
    ksopt.convert(model, {"0": [CHAIN] * 3})
    assert isinstance(model[0], KSStacked)
    of_chains = model(x)
    guide = SelfGuided(model, 1, dense)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model[0].to_dense(), dense["0.weight"])
    guide.step()
    torch.testing.assert_close(model(x), of_chains)


def test_layers_that_share_factors_share_the_matrix_and_frozen_ones_are_left():
    first, second, frozen = (KSLinear(16, 16, CHAIN) for _ in range(3))
    for index in range(2):
        second.weights[index] = first.weights[index]
    frozen.requires_grad_(False)
    model = nn.Sequential(first, second, frozen)
    guide = SelfGuided(model, 3)
    assert first.dense is second.dense
    assert type(frozen) is KSLinear
    trained(model, guide, 3)
    assert [type(layer) for layer in model] == [KSLinear] * 3


def test_a_checkpoint_in_the_middle_goes_on():
    def run(steps, saved=None):
        torch.manual_seed(0)
        model = nn.Sequential(KSLinear(16, 16, CHAIN))
        guide = SelfGuided(model, 6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if saved is not None:
            for part, state in zip((model, guide, optimizer), saved, strict=True):
                part.load_state_dict(state)
            assert guide.alpha == 0.5
            assert model[0].alpha.item() == 0.5
        torch.manual_seed(saved is not None)
        trained(model, guide, steps, optimizer)
        return [part.state_dict() for part in (model, guide, optimizer)]

    file = io.BytesIO()
    torch.save(run(3), file)
    file.seek(0)
    again = run(3, torch.load(file, weights_only=True))
    assert sorted(again[0]) == ["0.bias", "0.weights.0", "0.weights.1"]

    model = nn.Sequential(KSLinear(16, 16, CHAIN))
    torch.manual_seed(0)
    model[0].reset_parameters()
    guide = SelfGuided(model, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in (0, 1):
        torch.manual_seed(seed)
        trained(model, guide, 3, optimizer)
    for key, value in model.state_dict().items():
        assert torch.equal(value, again[0][key])
    with pytest.raises(InvalidInputError, match="step 6 of 6"):
        SelfGuided(model, 6).load_state_dict(again[1])


def test_it_computes_in_autocasts_dtype_and_a_copy_is_guided_too():
    model = nn.Sequential(KSLinear(16, 16, CHAIN, activation="relu"))
    SelfGuided(model, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(3, 16)).dtype == torch.bfloat16
    other = copy.deepcopy(model)
    assert isinstance(other[0], SelfGuidedLinear)
    assert other[0].dense is not model[0].dense


def test_a_compiled_model_is_not_compiled_again_for_each_alpha():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(KSLinear(16, 16, CHAIN))
    guide = SelfGuided(model, 6)
    compiled, x = torch.compile(model, backend=backend), torch.randn(3, 16)
    for step in range(8):
        torch.testing.assert_close(compiled(x), model(x))
        assert len(graphs) == (1 if step < 6 else 2)
        guide.step()


def test_what_cannot_be_guided():
    model = nn.Sequential(KSLinear(16, 32, "(1,8,4,4)*(4,4,4,1)"))
    for arguments, message in (
        ((nn.Linear(2, 2), 3), "no KSLinear whose factors are trained"),
        ((model, 0), "steps 0"),
        ((model, 3, {"1.weight": torch.ones(32, 16)}), r"has no 0\.weight"),
        ((model, 3, {"0.weight": torch.ones(16, 32)}), r"is \[16, 32\], but .* is \[32, 16\]"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            SelfGuided(*arguments)
        assert type(model[0]) is KSLinear
    SelfGuided(model, 3)
    with pytest.raises(InvalidInputError, match="guided already"):
        SelfGuided(model, 3)
