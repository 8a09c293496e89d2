"""`ksopt.optimize`: a model in, a faster one out, or the same with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ksopt
from ksopt import InvalidInputError, KSLinear, Optimized
from ksopt.optimization import speed

from optimization_models import Block, Optimize  # isort: skip


def inputs(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 32)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(32, 8))


def chains(of: nn.Module) -> dict[str, KSLinear]:
    return {name: one for name, one in of.named_modules() if isinstance(one, KSLinear)}


def test_a_model_becomes_faster(optimize: Optimize, tmp_path: Path) -> None:
    dense = model()
    before = {name: one.clone() for name, one in dense.state_dict().items()}
    done = optimize(dense, inputs(), "60%")
    assert isinstance(done, Optimized)
    assert done.is_changed
    assert done.reason == ""
    # The model runs, compiled, with chains where they win.
    assert isinstance(done.model, torch._dynamo.OptimizedModule)
    assert done.model(inputs(3)).shape == (3, 8)
    names = ["0.up", "0.down", "1"]
    assert [layer.name for layer in done.layers] == names
    assert done.conversion is not None
    assert list(chains(done.conversion.model)) == names
    # Speed before and after, weights and errors.
    assert done.speed is not None
    assert (done.speed.dense.median_us, done.speed.chains.median_us) == (2000.0, 1000.0)
    assert done.speed.times == 2.0
    for layer in done.layers:
        assert 0 < layer.parameters <= 0.6 * layer.dense_parameters
        assert 0 < layer.relative_error < 1
    assert dict(done.dense) == {"0.unused": "the inputs do not reach it as a layer"}
    # The plan and the page.
    assert done.report == tmp_path / "report" / "report.html"
    assert "<html" in done.report.read_text("utf-8")
    assert [layer.name for layer in ksopt.convert(model(), done.plan).layers] == names
    # What was passed is as it was.
    assert chains(dense) == {}
    assert dense.training
    assert all(torch.equal(one, before[name]) for name, one in dense.state_dict().items())
    # It is saved and loaded.
    folder = ksopt.save_converted(done.conversion, tmp_path / "converted")
    again = ksopt.load_converted(folder, model()).eval()
    x = inputs(3)
    torch.testing.assert_close(again(x), done.conversion.model.eval()(x))
    # What is printed says all of it.
    text = str(done)
    assert text.startswith("A call of the model took 1,000 us (p20 to p80: 990 to 1,010) with")
    assert "2,000 us (p20 to p80: 1,980 to 2,020) dense, compiled by Inductor: 2.00 times" in text
    assert "3 layers converted; the model has" in text
    assert "layer   INxOUT" in text
    assert "0.unused stays dense: the inputs do not reach it as a layer" in text
    assert "Distil it from the model that you passed" in text
    assert text.splitlines()[-1].startswith("report: ")
    # A notebook shows it.
    cell = done._repr_html_()
    assert "2.00x" in cell
    assert "0.up" in cell


@pytest.mark.slow
def test_layers_are_searched_as_the_model_sees_them(optimize: Optimize) -> None:
    torch.manual_seed(0)
    keywords = {"scale": 2.0, "x": inputs(24).bfloat16()}
    done = optimize(Block().bfloat16(), keywords, "60%")
    (request, *_) = (layer.request for layer in done.search.layers)
    assert (request.batch, request.dtype, request.device) == (24, "bfloat16", "cpu")
    assert not request.train
    assert [layer.name for layer in done.layers] == ["up", "down"]


@pytest.mark.slow
def test_training_times_a_step_and_leaves_nothing_behind(optimize: Optimize) -> None:
    dense = model().eval()
    losses = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        losses.append(output.square().mean())
        return losses[-1]

    done = optimize(dense, inputs(), "60%", "training", loss=loss)
    assert all(layer.request.train for layer in done.search.layers)
    assert "A training step of the model took 1,000 us" in str(done)
    assert len(losses) == 4  # dense and with chains: the call that compiles, and a timed one
    assert all(value.requires_grad for value in losses)
    assert done.conversion is not None
    for one in (dense, done.conversion.model):
        assert not one.training
        assert all(parameter.grad is None for parameter in one.parameters())
        norm = one.get_submodule("0.norm")
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.num_batches_tracked == 0
        assert torch.equal(norm.running_mean, torch.zeros(32))


@pytest.mark.slow
def test_layers_that_do_not_win_stay_dense(
    optimize: Optimize, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ksopt.search import finals

    final = finals.final

    def slow_heads(request: Any, device: Any, chains: list[Any], spare: Any) -> Any:
        times = final(request, device, chains, spare)
        if request.size.out_features == 8:
            times["dense"] = times[str(chains[0])]
        return times

    monkeypatch.setattr(finals, "final", slow_heads)
    done = optimize(model(), inputs(), "60%")
    assert [layer.name for layer in done.layers] == ["0.up", "0.down"]
    assert "At a budget of 60%" in done.dense["1"]


@pytest.mark.slow
def test_a_model_of_which_no_layer_wins_is_unchanged(
    optimize: Optimize, layer_us: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_us["dense"] = 100.0
    monkeypatch.setattr(speed, "measure", None)  # nothing is timed
    dense = model()
    done = optimize(dense, inputs(), "60%")
    assert done.model is dense
    assert not done.is_changed
    assert (
        done.reason
        == "no chain that was measured is enough faster than its dense layer on this device."
    )
    assert done.speed is None
    assert done.layers == ()
    assert set(done.dense) == {"0.up", "0.down", "0.unused", "1"}
    assert str(done).startswith(f"The model is unchanged: {done.reason}")
    assert done.report.exists()


@pytest.mark.parametrize(
    ("chains_us", "reason"),
    [
        (3000.0, "was slower with chains"),
        pytest.param(2000.0, "not measurably faster", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_is_not_faster_as_a_whole_is_unchanged(
    optimize: Optimize, model_us: dict[str, float], chains_us: float, reason: str
) -> None:
    model_us["chains"] = chains_us
    dense = model()
    done = optimize(dense, inputs(), "60%")
    assert done.model is dense
    assert reason in done.reason
    assert done.speed is not None
    assert done.speed.chains.median_us == chains_us
    assert f"took {chains_us:,.0f} us" in str(done)
    assert "The model is unchanged" in done._repr_html_()
    assert any(rule.chains for rule in done.plan.rules)  # for users who need only the weights


@pytest.mark.slow
def test_layers_of_a_large_error_stay_dense(optimize: Optimize) -> None:
    dense = model()
    done = optimize(dense, inputs(), "60%", max_error=0.01)
    assert done.model is dense
    assert "left out for its error" in done.reason
    assert "relative error would be" in done.dense["0.up"]


@pytest.mark.slow
def test_names_narrow_what_becomes_chains(optimize: Optimize) -> None:
    done = optimize(model(), inputs(), "60%", include=["0.*"], exclude="*.down")
    assert [layer.name for layer in done.layers] == ["0.up"]
    assert done.dense["0.down"] == "it is excluded"
    assert done.dense["1"] == "it is not among those included"


@pytest.mark.slow
def test_the_same_call_again_measures_no_chain_twice(optimize: Optimize, tmp_path: Path) -> None:
    first = optimize(model(), inputs(), 0.6)
    numbers = [len(layer.trials) for layer in first.search.layers]
    second = optimize(model(), inputs(), 0.6)
    assert [len(layer.trials) for layer in second.search.layers] == numbers
    assert second.plan.rules == first.plan.rules
    stored = json.loads((tmp_path / "report" / "results.json").read_text("utf-8"))
    assert stored["request"]["budgets"] == ["0.6"]


class Reader(Block):
    """A module that reads a layer's weight besides calling it, as T5 does."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x.to(self.up.weight.dtype), scale)


@pytest.mark.slow
def test_a_model_that_reads_a_converted_weight_gets_advice(optimize: Optimize) -> None:
    with pytest.raises(InvalidInputError, match=r"does not run: AttributeError.*exclude="):
        optimize(Reader(), inputs(), "60%")


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return model()


def frozen() -> nn.Module:
    return model().requires_grad_(False)


@pytest.mark.parametrize(
    ("build", "example_inputs", "options", "words"),
    [
        (lambda: 7, inputs(), {}, "must be a torch.nn.Module, and is int"),
        (lambda: nn.Sequential(nn.ReLU()), inputs(), {}, "has no linear layer"),
        (lambda: nn.Linear(32, 32), inputs(), {}, "the model is itself a Linear"),
        (on_meta, inputs(), {}, "is on the meta device, which holds no values"),
        (lambda: torch.compile(model()), inputs(), {}, "is compiled already"),
        (lambda: nn.ModuleDict({"a": nn.Linear(4, 4)}), inputs(), {}, "does not take these inputs"),
        (model, inputs().T, {}, "does not take these inputs: RuntimeError"),
        (model, {"y": inputs()}, {}, "does not take these inputs: TypeError"),
        (model, "tokens", {}, "must be a tensor, a tuple of arguments or a mapping"),
        (model, None, {}, "and are NoneType"),
        (model, inputs(), {"mode": "train"}, "must be 'inference' or 'training'"),
        (model, inputs(), {"mode": "training", "train": True}, "leave train out: mode='training'"),
        (model, inputs(), {"budget": "much"}, "budget 'much': write a share"),
        (model, inputs(), {"budget": "300%"}, "budget '300%' is more than"),
        (model, inputs(), {"trails": 3}, "no option 'trails': did you mean 'trials'"),
        (model, inputs(), {"exclude": "2"}, "exclude '2' matches no linear layer"),
        (model, inputs(), {"exclude": "*"}, "no linear layer is left to search"),
        (frozen, inputs(), {"mode": "training"}, "no parameter of the model requires a gradient"),
        (model, inputs(), {"device": "cpu"}, "leave device out: it is the model's"),
    ],
)
def test_misuse_is_one_sentence(
    optimize: Optimize, build: Any, example_inputs: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        optimize(build(), example_inputs, **{"budget": "60%", **options})
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_a_loss_without_a_gradient_is_refused(optimize: Optimize) -> None:
    with pytest.raises(InvalidInputError, match="the loss has no gradient"):
        optimize(model(), inputs(), "60%", "training", loss=lambda y: y.detach().mean())


def test_the_loss_of_a_models_output() -> None:
    two = torch.tensor([1.0, 3.0])
    assert speed.own_loss([two, {"b": two}]) == 10.0
    assert speed.own_loss({"loss": torch.tensor(7.0), "logits": two}) == 7.0
    with pytest.raises(InvalidInputError, match="give loss="):
        speed.own_loss(torch.tensor([1, 2]))


@pytest.mark.slow  # Inductor compiles the model twice
def test_a_model_is_compiled_and_timed(quick: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).eval()
    x = torch.randn(128, 512)
    done = ksopt.optimize(dense, x, "25%", trials=4, max_factors=2, out=tmp_path, quiet=True)
    assert done.speed is not None, done.reason
    assert done.speed.dense.repeats >= 10
    assert done.is_changed == (done.speed.comparison is speed.Comparison.FASTER)
    if done.conversion is not None:
        torch.testing.assert_close(done.model(x), done.conversion.model(x), atol=1e-4, rtol=1e-3)
