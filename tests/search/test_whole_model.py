"""A search of a model: its plan and effect, the timed model, the conversion."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ksopt
from ksopt import Chain
from ksopt.cli.main import main
from ksopt.errors import InvalidInputError
from ksopt.measure.timing import Measurement
from ksopt.nn import KSLinear
from ksopt.search import (
    LayerRequest,
    SearchRequest,
    ToMeasure,
    finals,
    layers_of_model,
    plan_of,
    run_search,
    trial_records,
    whole_model,
)
from ksopt.search.layers import Layers
from ksopt.search.plan import effect_of, effects_of
from ksopt.search.report import phrases

from layer_models import Tiny, inputs, keywords, on_meta, tiny  # isort: skip

HERE = Path(__file__).parent
OPTIONS = {"budgets": ("60%", "90%"), "batch": 16, "device": "cpu", "trials": 24}
WORDS = (
    *("search", "--model", "usersmodel:tiny", "--budget", "60%", "90%", "--batch", "16"),
    *("--device", "cpu", "--trials", "9", "--out", "out"),
)


def final_of(dense_us: float, chain_us: float) -> Callable[..., dict[str, Measurement]]:
    """A final that says so, whatever the machine is doing."""

    def final(
        request: LayerRequest, device: torch.device, chains: list[Chain], spare: object
    ) -> dict[str, Measurement]:
        times = {str(chain): chain_us + place for place, chain in enumerate(chains)}
        return {
            name: Measurement(us, 0.99 * us, 1.01 * us, 20)
            for name, us in {**times, "dense": dense_us}.items()
        }

    return final


@pytest.fixture
def slow_dense(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chain is faster than its dense layer, which took as long in the trials."""
    monkeypatch.setattr(finals, "final", final_of(dense_us=1000.0, chain_us=300.0))
    monkeypatch.setattr(trial_records, "dense_us", lambda _: 1000.0)


@pytest.fixture
def fast_dense(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is."""
    monkeypatch.setattr(finals, "final", final_of(dense_us=100.0, chain_us=300.0))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the user's module in it."""
    shutil.copy(HERE / "layer_models.py", tmp_path / "usersmodel.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "usersmodel", raising=False)
    return tmp_path


def results_in(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def test_from_a_model_to_the_model_converted(
    slow_dense: None, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--measure-model", "usersmodel:inputs"]) == 0
    printed = capsys.readouterr()
    assert f"importing {place / 'usersmodel.py'}, which runs its code" in printed.err
    assert printed.err.count("which runs its code") == 1
    assert "6 linear layers (2 of 16x48, 2 of 16x32, 2 of 32x16); 1 other is" in printed.err
    assert "With the plan 6 of the 6 linear layers of usersmodel:tiny become chains" in printed.out
    assert "Timed whole and eagerly, with random weights in the chains" in printed.out
    assert "Its layers saw 20 rows; the search measured them on 16." in printed.out
    assert str(place / "out" / "plan.json") in "".join(printed.out.split("\n"))
    assert printed.out.splitlines()[-1] == (
        "next:   ksopt convert --model usersmodel:tiny --inputs usersmodel:inputs --plan "
        "out/plan.json --out converted"
    )
    plan = json.loads((place / "out" / "plan.json").read_text("utf-8"))
    assert [rule["match"] for rule in plan["layers"]] == [
        "blocks.*.qkv",
        "blocks.*.up",
        "blocks.*.down",
    ]
    assert all(rule["chain"] for rule in plan["layers"])
    words = ["convert", "--model", "usersmodel:tiny", "--plan", "out/plan.json", "--out", "done"]
    assert main(words) == 0
    assert "6 layers converted" in capsys.readouterr().out
    model = ksopt.load_converted("done", Tiny())
    assert model(inputs()).shape == (4, 5, 50)
    effect = results_in(place / "out")["plan"]
    own = sum(m.chain.nnz for m in model.modules() if isinstance(m, KSLinear))
    assert effect["parameters"] == own
    assert sum(p.numel() for p in model.parameters()) == (
        sum(p.numel() for p in Tiny().parameters()) - effect["dense_parameters"] + own
    )


@pytest.mark.slow
def test_the_effect_is_the_sum_of_what_was_measured(slow_dense: None, tmp_path: Path) -> None:
    result = run_search(SearchRequest(layers_of_model(tiny()), out=tmp_path, **OPTIONS))
    actual = results_in(tmp_path)
    dense_us = latency_us = 0.0
    for one in actual["layers"]:
        # The plan takes the largest budget whose chain is faster: here all are.
        chosen = one["recommendations"][-1]["chosen"]
        (group,) = [
            g
            for g in actual["plan"]["groups"]
            if g["dims"] == f"{one['in_features']}x{one['out_features']}"
        ]
        assert group["chain"] == chosen["chain"]
        assert group["budget"] == "90%"
        assert group["count"] == group["weights"] == 2
        assert group["parameters"] == 2 * chosen["parameters"]
        dense_us += 2 * chosen["dense"]["median_us"]
        latency_us += 2 * chosen["latency"]["median_us"]
    assert actual["plan"]["dense_us"] == pytest.approx(dense_us)
    assert actual["plan"]["latency_us"] == pytest.approx(latency_us)
    assert actual["plan"]["latency_over_dense"] == pytest.approx(latency_us / dense_us)
    assert [one["budget"] for one in actual["budgets"]] == ["60%", "90%"]
    assert actual["budgets"][1]["latency_us"] == actual["plan"]["latency_us"]
    assert actual["budgets"][0]["parameters"] < actual["budgets"][1]["parameters"]
    assert actual["model"]["dense"].keys() == {"head"}
    assert actual["whole"] is None
    page = (tmp_path / "report.md").read_text("utf-8")
    assert "## Plan for the model" in page
    assert "The model was not timed whole." in page
    drawn = (tmp_path / "report.html").read_text("utf-8")
    total = phrases.microseconds(dense_us), phrases.microseconds(latency_us)
    assert f"Latencies of the linear layers: {total[0]} dense, {total[1]} by the plan" in drawn
    # Two sizes of the drawing, three groups and their sum, dense and by the plan.
    assert drawn.count('<rect class="box s') == 2 * (3 + 1) * 2
    assert "embed.weight" in page
    assert result.request.layers is not None
    assert str(tmp_path) in result.request.command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 460 weights are 60 % of 16x48, and 90 % of the others.
        ({"budgets": ("60%", "0.6", "460")}, {"60%": 6, "460": 6}),
        # 500 are less than 90 % of 16x48.
        ({"budgets": ("60%", "90%"), "max_params": "500"}, {"60%": 6, "90%": 6}),
    ],
)
def test_a_budget_is_of_every_size_whatever_its_step_is_called_there(
    slow_dense: None, tmp_path: Path, options: dict, expected: dict[str, int]
) -> None:
    request = SearchRequest(
        layers_of_model(tiny()), out=tmp_path, **{**OPTIONS, **options, "trials": 12}
    )
    result = run_search(request)
    effects = {text: effect.converted for text, effect in effects_of(result).items()}
    assert effects == expected


@pytest.mark.slow
def test_dense_layers_that_win_stay_dense(fast_dense: None, tmp_path: Path) -> None:
    request = SearchRequest(layers_of_model(tiny()), out=tmp_path, **OPTIONS)
    result = run_search(request, to_measure=ToMeasure(tiny(), inputs()))
    assert all(rule.chains == () for rule in plan_of(result).rules)
    effect = effect_of(result)
    assert effect is not None
    assert effect.converted == 0
    assert effect.latency_us == effect.dense_us == 600.0
    assert effect.parameters == effect.dense_parameters
    assert result.whole is None  # nothing would be compared
    page = (tmp_path / "report.md").read_text("utf-8")
    assert (
        "Keep the dense layers of the model: no chain that was measured is measurably 1.1 t" in page
    )
    dense = ksopt.convert(tiny(), tmp_path / "plan.json")
    assert dense.layers == ()


@pytest.mark.slow
def test_layers_stay_dense_where_no_chain_is_as_fast_as_requested(
    slow_dense: None, tmp_path: Path
) -> None:
    options = {**OPTIONS, "budgets": ("90%",), "trials": 3, "min_speedup": 50.0}
    run_search(SearchRequest(layers_of_model(tiny()), out=tmp_path, **options))
    page = (tmp_path / "report.md").read_text("utf-8")
    assert "3.33 times as fast as the dense layer" in page  # every chain is faster, but not so much
    assert "Keep the dense layers of the model: no chain that was measured is measurably 50" in page


@pytest.mark.slow
def test_json_is_one_document(quick: None, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--json", "--exclude", "*.qkv"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == results_in(place / "out")
    assert printed["request"]["dims"] == ["16x32", "32x16"]
    assert printed["model"]["dense"]["blocks.0.qkv"] == "it is excluded"
    command = printed["request"]["command"]
    assert command.startswith("ksopt search --model usersmodel:tiny --exclude '*.qkv' --budget")
    assert main(["search", "--replay", "out", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["plan"] == printed["plan"]
    assert again["model"] == printed["model"]
    assert main(shlex.split(command)[1:]) == 0  # it goes on with the same studies


@pytest.mark.slow
def test_a_plan_that_changes_nothing_is_not_timed(
    fast_dense: None, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--measure-model", "usersmodel:inputs"]) == 0
    assert "with this plan nothing in it would change" in capsys.readouterr().out
    page = (place / "out" / "report.md").read_text("utf-8")
    assert "with this plan nothing in it would change" in page
    assert "--measure-model does that" not in page


@pytest.mark.slow
def test_a_config_needs_no_model(
    quick: None, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "model_type": "bert",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    (place / "config.json").write_text(json.dumps(values))
    words = ["search", "--hf-config", "config.json", *WORDS[3:]]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "config.json (bert): 12 linear layers" in printed.err
    plan = ksopt.Plan.read("out/plan.json")
    assert plan.rules[0].match == "*encoder.layer.*.attention.self.query"
    assert len(plan.rules) == 6


# The model timed whole.


@pytest.mark.parametrize("arguments", [inputs(), (inputs(), 2.0), [inputs()], keywords()], ids=type)
def test_a_model_is_timed_with_its_plan(arguments: object) -> None:
    model = tiny()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = ksopt.Plan.of({"16x32": "(1,8,4,4)*(4,4,4,1)", "blocks.0.qkv": None})
    actual = whole_model.measure(
        model, arguments, plan, torch.device("cpu"), torch.float32, seconds=0.05
    )
    assert actual.converted == 2
    assert actual.dense.repeats >= 3
    assert actual.planned.repeats >= 3
    assert set(actual.rows.values()) == {20}
    assert set(actual.rows) == {
        "head",
        *(f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "up", "down")),
    }
    assert not any(isinstance(module, KSLinear) for module in model.modules())
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_layers_that_share_a_weight_go_on_sharing_it() -> None:
    model = nn.ModuleList([nn.Linear(16, 32), nn.Linear(16, 32)])
    model[1].weight = model[0].weight
    assert whole_model.at_random(model, ksopt.Plan.of({"*": "(1,8,4,4)*(4,4,4,1)"})) == 2
    one, other = model
    assert isinstance(one, KSLinear)
    assert isinstance(other, KSLinear)
    for first, second in zip(one.weights, other.weights, strict=True):
        assert first is second
        assert bool(torch.isfinite(first).all())


class NoCopy(Tiny):
    """As a model that holds a handle of the system may be."""

    def __deepcopy__(self, memo: object) -> None:
        raise TypeError("it holds a lock")


@pytest.mark.parametrize(
    ("build", "arguments", "words"),
    [
        (tiny, "tokens", "must be a tensor, a tuple of arguments or a mapping"),
        (tiny, torch.ones(4, 5), "does not take these inputs"),
        (tiny, {"token": inputs()}, "does not take these inputs: TypeError"),
        (on_meta, inputs(), "cannot be moved to cpu"),
        (NoCopy, inputs(), "cannot be copied: TypeError: it holds a lock"),
    ],
)
def test_models_that_cannot_be_timed(
    build: Callable[[], nn.Module], arguments: object, words: str
) -> None:
    plan = ksopt.Plan.of({"16x32": "(1,8,4,4)*(4,4,4,1)"})
    with pytest.raises(InvalidInputError, match=words):
        whole_model.measure(
            build(), arguments, plan, torch.device("cpu"), torch.float32, seconds=0.05
        )


def test_wrong_inputs_are_refused_before_the_search(quick: None, tmp_path: Path) -> None:
    request = SearchRequest(layers_of_model(tiny()), out=tmp_path / "out", **OPTIONS)
    with pytest.raises(InvalidInputError, match="does not take these inputs"):
        run_search(request, to_measure=ToMeasure(tiny(), torch.ones(4, 5)))
    assert not (tmp_path / "out").exists()


class Talking(Tiny):
    """A model with a forgotten print."""

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        print("forward")
        return super().forward(tokens, scale)


def test_what_a_model_prints_is_no_part_of_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ksopt.Plan.of({"16x32": "(1,8,4,4)*(4,4,4,1)"})
    where = torch.device("cpu"), torch.float32
    whole_model.check(Talking(), inputs(), *where)
    whole_model.measure(Talking(), inputs(), plan, *where, seconds=0.05)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "forward" in printed.err


@pytest.mark.slow
def test_a_model_that_cannot_be_timed_costs_no_report(slow_dense: None, tmp_path: Path) -> None:
    request = SearchRequest(layers_of_model(tiny()), out=tmp_path, **OPTIONS)
    with pytest.raises(InvalidInputError, match="cannot be copied"):
        run_search(request, to_measure=ToMeasure(NoCopy(), inputs()))
    actual = results_in(tmp_path)
    assert actual["plan"]["converted"] == 6
    assert actual["whole"] is None
    assert actual["stopped"] is None
    assert main(["search", "--replay", str(tmp_path)]) == 0


def test_a_models_layers_take_batch_first() -> None:
    layers: Layers = layers_of_model(tiny())
    with pytest.raises(InvalidInputError, match="the layers of a model take batch_first"):
        SearchRequest(layers, layout="batch_last")


# The command line's refusals: exit code 2, one sentence, nothing on stdout, no folder.

MODEL = ("--model", "usersmodel:tiny")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "--dims INxOUT, or --model MODULE:FACTORY, or --hf-config FILE"),
        (("--dims", "8x8", *MODEL), "--dims and --model exclude each other"),
        ((*MODEL, "--hf-config", "c.json"), "--model and --hf-config exclude each other"),
        (("--dims", "8x8", "--hf-config", "c.json"), "--dims and --hf-config exclude"),
        (("--dims", "8x8", "8y8"), "INxOUT"),
        (("--dims", "8x8", "--dims", "axb"), "INxOUT"),
        (("--dims",), "expected at least one argument"),
        (("--dims", "8x8", "8x16", "--include", "x"), "--include names layers of a model"),
        (("--dims", "8x8", "--exclude", "x"), "--exclude names layers of a model"),
        (("--dims", "8x8", "--measure-model"), "--measure-model times the model of --model"),
        (("--hf-config", "c.json", "--measure-model"), "--measure-model times the model of"),
        (("--dims", "8x8", "8x16", "--weights", "none.pt"), "there is no file none.pt"),
        (
            ("--model", "usersmodel:tiny", "--weights", "none.pt:up.weight"),
            "the layers of a model have names of their own",
        ),
        (("--dims", "8x8", "8x16", "--trials", "1"), "there are 2 layer sizes"),
        (("--dims", "8x8", "8x16", "--max-error", "0.1"), "--max-error 0.1 needs weights"),
        (
            ("--dims", "8x8", "7x7", "--budget", "65"),
            "budget '65' is more than the dense layer's 64",
        ),
        (("--dims", "8x8", "7x7", "--min-rank", "9"), "--min-rank 9: a 8x8 layer"),
        (("--dims", "8x8", "8x16", "--min-speedup", "0"), "--min-speedup 0.0: give a number"),
        (("--model", "usersmodel"), "write MODULE:FACTORY"),
        (("--model", "nowhere:build"), "there is no module nowhere"),
        (("--model", "usersmodel:nothing"), "has no function nothing"),
        (("--model", "usersmodel:not_a_model"), "must return a torch.nn.Module"),
        (("--model", "usersmodel:broken"), "broken() raised RuntimeError: no such file"),
        (("--model", "usersmodel:leaving"), "leaving() raised SystemExit"),
        (("--model", "unfinished:build"), "importing unfinished raised SyntaxError"),
        (("--model", "usersmodel:without_layers"), "has no linear layer that can be searched"),
        ((*MODEL, "--include", "nothing.*"), "include 'nothing.*' matches no linear layer"),
        ((*MODEL, "--exclude", "*"), "no linear layer is left to search"),
        ((*MODEL, "--layout", "batch_last"), "the layers of a model take batch_first"),
        ((*MODEL, "--measure-model"), "the model has no dummy_inputs of its own"),
        ((*MODEL, "--measure-model", "usersmodel:nothing"), "has no function nothing"),
        ((*MODEL, "--measure-model", "usersmodel:broken"), "broken() raised RuntimeError"),
        ((*MODEL, "--measure-model", "usersmodel:wrong_inputs"), "the inputs must be a tensor"),
        (
            (*MODEL, "--measure-model", "usersmodel:inputs_of_another_model"),
            "the model does not take these inputs",
        ),
        ((*MODEL, "--trials", "2"), "there are 3 layer sizes"),
        (("--hf-config", "none.json"), "--hf-config none.json cannot be read"),
        (("--hf-config", "usersmodel.py"), "--hf-config usersmodel.py is not JSON"),
        (("--hf-config", "unknown.json"), "the model type 'perceptron' is not known"),
        (("--replay", "out", *MODEL), "does not take --model"),
        (("--replay", "out", "--dims", "8x8"), "does not take --dims"),
        (("--replay", "out"), "there is no such folder"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_misuse_is_one_sentence(
    place: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: str
) -> None:
    (place / "unfinished.py").write_text("def build(:\n")
    (place / "unknown.json").write_text('{"model_type": "perceptron"}')
    out = () if "--replay" in words else ("--out", "result", "--device", "cpu", "--batch", "4")
    try:
        code = main(["search", *words, *out])
    except SystemExit as leaving:  # argparse's way
        code = leaving.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    *stages, sentence = printed.err.splitlines()
    assert sentence.startswith("ksopt")
    assert expected in sentence
    assert not any("Traceback" in line for line in stages)
    assert not (place / "result").exists()


def test_the_traceback_of_the_users_code_can_be_requested(place: Path) -> None:
    with pytest.raises(InvalidInputError) as reported:
        main(["search", "--model", "usersmodel:broken", "--traceback"])
    assert isinstance(reported.value.__cause__, RuntimeError)
