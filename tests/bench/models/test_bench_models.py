"""`ksopt bench models` as a user runs it: built, replaced, compiled, compared, timed, reported."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from ksopt.bench import results_log
from ksopt.bench.models import measuring, report
from ksopt.bench.models import run as runs
from ksopt.bench.models.accuracy import Outputs, faults_of, relative_errors
from ksopt.bench.models.build import SMALL, build, gradients_of, loss, size_of
from ksopt.bench.models.chains import chain_of
from ksopt.bench.models.measuring import How
from ksopt.bench.models.results import (
    DENSE,
    DENSE_AUTOTUNED,
    IMPLEMENTATIONS,
    KS_INDUCTOR,
    KS_KSOPT,
    LINEAR_KSOPT,
    Case,
    ImplementationResult,
    Subject,
)
from ksopt.cli import main
from ksopt.compile import backend
from ksopt.compile.sites import Place, Report, Site, Verdict
from ksopt.conversion.plan import Plan, Rule
from ksopt.errors import InvalidInputError
from ksopt.measure.timing import Measurement
from ksopt.nn import KSLinear
from ksopt.patterns.chain import Chain
from ksopt.patterns.surroundings import Surroundings

transformers = pytest.importorskip("transformers", reason="the models come from transformers")
CPU = torch.device("cpu")
LINEARS = {"vit": 6, "gpt2": 6, "llama": 7}  # chains in each block: GPT-2's q, k, v are three


@pytest.fixture
def quick(monkeypatch):
    """Graphs run through AOTAutograd, but eagerly: Inductor takes a minute a model."""
    words = measuring._words

    def eagerly(way):
        return {"backend": "aot_eager"} if way.backend == "inductor" else words(way)

    monkeypatch.setattr(measuring, "_words", eagerly)
    monkeypatch.setattr(
        backend, "compile_by_inductor", lambda gm, inputs, config: aot_eager(gm, inputs)
    )


def run(tmp_path, *words):
    out = tmp_path / "out"
    few = ["--small", "--layers", "1", "--device", "cpu", "--seconds", "0.01", "--out", str(out)]
    return main.main(["bench", "models", *few, *words]), out


def cases_of(out):
    return json.loads((out / "models.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize(("words", "passes"), [((), "forward step"), (("--train",), "step")])
def test_train_measures_steps_alone(words, passes, tmp_path, monkeypatch):
    requests = []
    monkeypatch.setattr(runs, "run_models", lambda request, *_, **__: requests.append(request))
    monkeypatch.setattr(results_log, "read_lines", lambda *_: {})
    assert run(tmp_path, "--models", "vit", "--dtypes", "float32", *words)[0] == 0
    assert [one.pass_ for one in requests[0].subjects] == passes.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "passes", "more"),
    [
        (["llama"], ["forward"], []),
        (["gpt2"], ["step"], ["--dynamic"]),
        (["vit"], ["step"], ["--chain", "paper"]),
    ],
    ids=["forward", "dynamic", "paper"],
)
def test_every_layer_is_a_site_and_results_are_right(names, passes, more, quick, tmp_path, capsys):
    words = ["--models", ",".join(names), "--dtypes", "float32", "--passes", ",".join(passes)]
    code, out = run(tmp_path, *words, *more)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "of the dense model's" in printed.out
    assert "there are no CUDA graphs: the mode graphs is left out" in printed.err
    cases = cases_of(out)
    assert [(case["model"], case["pass"], case["mode"]) for case in cases] == [
        (name, one, "default") for name in names for one in passes
    ]
    for case in cases:
        count = LINEARS[case["model"]]
        assert case["chains"] == count
        assert 0.2 < case["weights"] / case["weights_replaced"] < 0.55
        assert [way["way"] for way in case["ways"]] == list(IMPLEMENTATIONS)
        ways = {way["way"]: way for way in case["ways"]}
        rival = min(ways[name]["us"] for name in (DENSE, DENSE_AUTOTUNED))
        for way in case["ways"]:
            assert way["us"] > 0
            assert way["over_dense"] == pytest.approx(way["us"] / rival)
            assert 0 < way["logits_error"] < 1e-5  # float32, against float64
        assert ways[DENSE]["parameters"] > ways[KS_KSOPT]["parameters"]
        assert ways[KS_KSOPT]["parameters"] == ways[LINEAR_KSOPT]["parameters"]
        ours = ways[KS_KSOPT]
        assert ours["lowered"] == count
        assert ours["not_lowered"] == ours["not_recognised"] == 0
        assert ours["pass_s"] > 0
        assert ways[KS_INDUCTOR]["lowered"] is None
        is_step = case["pass"] == "step"
        assert [site["training"] for site in ours["sites"]] == [is_step] * count
        assert all(site["chain"].count("*") == 1 for site in ours["sites"])
        if is_step:
            assert all(0 < way["worst_gradient_error"] < 1e-4 for way in case["ways"])
    with (out / "models.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["way"] for row in rows] == len(cases) * list(IMPLEMENTATIONS)
    page = (out / "models.md").read_text(encoding="utf-8")
    assert "## Times" in page
    assert "ksopt bench models --models" in page


@pytest.mark.slow
def test_a_wrong_result_is_a_fault_and_not_timed(quick, tmp_path, capsys, monkeypatch):
    compile_by_inductor = backend.compile_by_inductor

    def wrong(gm, inputs, config):
        run = compile_by_inductor(gm, inputs, config)
        return lambda *args: [1.001 * one for one in run(*args)]

    monkeypatch.setattr(backend, "compile_by_inductor", wrong)
    words = ["--models", "vit", "--dtypes", "float32", "--passes", "step"]
    code, out = run(tmp_path, *words)
    assert code == 1
    printed = capsys.readouterr()
    fault = "vit float32 step default: KS, ksopt: logits: relative error 0.001, allowed"
    assert fault in printed.err
    assert "wrong" in printed.out
    for case in cases_of(out):
        ways = {way["way"]: way for way in case["ways"]}
        assert ways[KS_KSOPT]["us"] is None
        assert ways[KS_INDUCTOR]["us"] > 0
    assert any("gradient" in fault for fault in ways[KS_KSOPT]["faults"])


@pytest.mark.slow
def test_the_same_command_goes_on_where_it_stopped(quick, tmp_path, capsys):
    words = ["--models", "llama", "--dtypes", "float32", "--ways", "ksopt"]
    code, out = run(tmp_path, *words, "--passes", "forward")
    assert code == 0
    (first_line,) = (out / "rows.jsonl").read_text("utf-8").splitlines()
    code, out = run(tmp_path, *words, "--json")
    assert code == 0
    lines = (out / "rows.jsonl").read_text("utf-8").splitlines()
    assert [line == first_line for line in lines] == [True, False]
    printed = capsys.readouterr().out
    shown = json.loads(printed[printed.index("\n{\n") :])
    assert [case["pass"] for case in shown["cases"]] == ["forward", "step"]
    assert shown["command"].startswith("ksopt bench models --models llama --dtypes float32")
    code, _ = run(tmp_path, *words, "--chain", "quarter")
    assert code == 2
    assert "holds measurements of something else (chain half there and quarter here)" in (
        capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_plan_says_which_layers_become_which_chains(quick, tmp_path):
    chains = {"48x192": "(1,192,12,1)*(4,3,12,1)", "*.c_attn": ["(4,12,12,1)"] * 3}
    Plan.of(chains).write(tmp_path / "plan.json")
    words = ["--models", "gpt2", "--dtypes", "float32", "--passes", "forward", "--ways", "kslinear"]
    code, out = run(tmp_path, *words, "--plan", str(tmp_path / "plan.json"))
    assert code == 0
    (case,) = cases_of(out)
    assert [way["way"] for way in case["ways"]] == [DENSE, LINEAR_KSOPT]
    assert case["chains"] == 4
    assert case["weights"] == 192 * 12 + 12 * 12 + 3 * 4 * 144
    assert case["weights_replaced"] == 48 * 192 + 48 * 144


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_chain_is_where_its_condition_is_true(device):
    square, wide = "(1,24,24,2)*(2,24,24,1)", "(1,96,24,2)*(2,24,24,1)"
    three, activated = Surroundings(("bias",), 3), Surroundings(("bias", "gelu"))
    rules = (
        Rule((Chain.parse(square),), in_features=48, out_features=48, where=three),
        Rule((Chain.parse(square),) * 3, in_features=48, out_features=144, where=activated),
        Rule((Chain.parse(wide),), in_features=48, out_features=192, where=activated),
        Rule((), in_features=192, out_features=48),
    )
    size = size_of("vit", small=True)
    built = build(size, torch.bfloat16, torch.device(device), plan=Plan(rules))
    names = {name for name, one in built.linear.named_modules() if isinstance(one, KSLinear)}
    ends = {name.rpartition(".")[2] for name in names}
    assert len(names) == built.chains == 4 * size.depth
    assert ends == {"q_proj", "k_proj", "v_proj", "fc1"}
    assert built.inputs.dtype == torch.bfloat16


@pytest.mark.slow
def test_under_inductor(tmp_path, monkeypatch):
    # Few sizes: Inductor compiles every way for each of them.
    monkeypatch.setitem(SMALL, "gpt2", replace(SMALL["gpt2"], inner=SMALL["gpt2"].hidden))
    words = ["--models", "gpt2", "--dtypes", "float32", "--tune", "measure", "--fresh-caches"]
    code, out = run(tmp_path, *words, "--ways", "ksopt", "--passes", "forward")
    assert code == 0
    for case in cases_of(out):
        ours = next(way for way in case["ways"] if way["way"] == KS_KSOPT)
        assert ours["lowered"] + ours["not_lowered"] == LINEARS["gpt2"]
        assert all(one["measured"] and "under Inductor" in one["reason"] for one in ours["sites"])
        assert ours["first_s"] > ours["pass_s"] > 0


def test_a_missed_site_is_a_fault():
    missed = Site("n", Place("author.py", 3), "bmm", Verdict.NOT_RECOGNISED, "At node n: no.")
    lowered = Site("m", Place(), "bmm", Verdict.LOWERED, "")
    assert measuring._missing(Report([lowered, missed], graphs=1), 2) == [
        "1 site for 2 Kronecker-sparse chains",
        "author.py:3 is not recognised: At node n: no.",
    ]
    assert measuring._missing(Report([lowered], graphs=1), 1) == []
    left = Report(graphs=1, notes=["a graph was left alone"])
    assert measuring._missing(left, 0) == ["a graph was left alone"]
    assert measuring._missing(Report(), None) == ["the backend saw no graph"]


def test_gradients_that_are_nothing_are_not_compared():
    one = Outputs(torch.ones(2), torch.ones(()), {"w": torch.ones(4), "b": torch.tensor([1e-9])})
    other = Outputs(
        torch.ones(2), torch.ones(()), {"w": torch.full((4,), 1.5), "b": torch.tensor([7e-9])}
    )
    assert relative_errors(other, one) == {
        "logits": 0.0,
        "loss": 0.0,
        "gradients": pytest.approx(0.5),
        "gradient of w": 0.5,
    }


def test_what_is_allowed_is_measured():
    """Twice the larger of PyTorch's two errors; of one alone, four times."""
    ours, theirs = False, True
    eager, inductor, eps = {"logits": 1e-3}, {"logits": 2e-3}, 1e-7

    def faults(is_pytorch, error, *references):
        return faults_of({"logits": error}, references, eps, is_pytorch)

    assert faults(ours, 3.9e-3, eager, inductor) == []
    assert faults(ours, 4.1e-3, eager, inductor) == ["logits: relative error 0.0041, allowed 0.004"]
    assert faults(ours, 3.9e-3, eager) == []
    assert faults(ours, 4.1e-3, eager) != []
    assert faults(theirs, 7.9e-3, eager) == []
    assert faults(theirs, 8.1e-3, eager) != []
    assert faults(ours, float("nan"), eager, inductor) != []


def case_of(**times_ms: tuple[float, float, float]) -> Case:
    names = {"dense": DENSE, "autotuned": DENSE_AUTOTUNED, "ks": KS_INDUCTOR, "ours": KS_KSOPT}
    ways = tuple(
        ImplementationResult(
            names[name],
            100,
            peak_bytes=2**30,
            time=Measurement(median * 1e3, low * 1e3, high * 1e3, 5),
        )
        for name, (median, low, high) in times_ms.items()
    )
    subject = Subject("vit", "float32", "forward", "default")
    return Case(subject, 12, 72, (1, 2), (128, 3, 224, 224), ways)


def test_the_answer_compares_with_the_faster_dense_model():
    case = case_of(dense=(9, 8, 9), autotuned=(8, 7, 8), ks=(12, 12, 13), ours=(6, 6, 6))
    assert report.sentences([case]) == [
        "vit float32 forward default: KS, ksopt takes 6.00 ms, 0.75 of the dense model's 8.00 ms "
        "(faster), with 50 % of the weights of its linear layers."
    ]
    (row,) = report.times_table([case]).rows
    assert row[4:] == ("9.00 (1.12, noise)", "8.00 (1.00)", "12.00 (1.50)", "6.00 (0.75)")
    for table in (report.times_table, report.memory_table, report.first_calls_table):
        assert table([case]).heads[4] == DENSE
    assert Case.of_json(json.loads(json.dumps(case.to_json()))) == case


def test_the_paper_has_these_factors_in_vit_s_16():
    size = size_of("vit", layers=1)
    built = build(size, torch.float32, torch.device("meta"), rule="paper")
    shapes = {name: tuple(p.shape) for name, p in built.ks.named_parameters()}
    blocks = {shape for name, shape in shapes.items() if "blocks" in name}
    # (1,192,48,2)*(2,48,192,1), as [p, middle/p, in/p] and [q, out/q, middle/q]
    assert blocks == {(2, 48, 192), (2, 192, 48), (6, 64, 64), (2, 768, 192), (6, 64, 256),
                      (2, 192, 192)}  # fmt: skip


def test_models_are_drawn_alike_and_leave_the_random_state():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, two = (build(size_of("gpt2", small=True), torch.float32, CPU) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(one.inputs, two.inputs)
    for twin in ("dense", "ks", "linear"):
        pairs = zip(one.twin(twin).parameters(), two.twin(twin).parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("rule", ["half", "(1,out,mid,1)*(4,mid/4,mid/4,1)*(1,mid,in,1)"])
@pytest.mark.parametrize("name", list(SMALL))
def test_both_twins_are_one_function_with_the_same_gradients(name, rule):
    built = build(size_of(name, small=True, layers=1), torch.float64, CPU, rule=rule)
    results = {}
    for twin in ("ks", "linear"):
        model = built.twin(twin)
        logits = model(built.inputs)
        loss(logits, built.targets).backward()
        results[twin] = logits, gradients_of(model)
    torch.testing.assert_close(*(logits for logits, _ in results.values()))
    ks, linear = (gradients for _, gradients in results.values())
    assert ks.keys() == linear.keys()
    for key, gradient in linear.items():
        torch.testing.assert_close(ks[key], gradient, msg=key)


def test_a_rule_names_the_chain_of_every_size():
    assert str(chain_of("quarter", 64, 64)) == "(1,8,8,8)*(8,8,8,1)"
    assert str(chain_of("( 1, out/2, in / 2, 2)*(2,in/2,in/2,1)", 8, 4)) == "(1,2,4,2)*(2,4,4,1)"
    for rule, why in (
        ("(1,out/3,mid,1)", "out/3 is no whole number for a layer of 8x4, where out is 4"),
        ("(1,out/0,mid,1)", "out/0 is no whole number"),
        ("eighth", "it is one of half, quarter, paper, or a rule such as"),
        ("(1,in,out,1)", "for a layer of 8x4 that is (1,8,4,1), which is for 4x8"),
    ):
        with pytest.raises(InvalidInputError) as caught:
            chain_of(rule, 8, 4)
        assert why in str(caught.value)


def test_without_the_library_there_is_a_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out = run(tmp_path)
    assert code == 1
    assert "pip install transformers" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "bert"], "'bert' is unknown, it must be of vit, gpt2, llama"),
        (["--dtypes", "float64"], "it must be of float32, bfloat16, float16"),
        (["--passes", "backward"], "--passes backward: 'backward' is unknown"),
        (["--modes", "eager"], "it must be of default, graphs, recorded"),
        (["--modes", "graphs"], "--modes graphs: these replay CUDA graphs; the device is cpu"),
        (["--modes", "recorded,graphs"], "recorded,graphs: these replay CUDA graphs"),
        (["--ways", "eager"], "it must be of max-autotune, uncompiled, inductor, ksopt, kslinear"),
        (["--layers", "0"], "--layers 0: it must be at least 1"),
        (["--batch", "0"], "--batch 0: it must be at least 1"),
        (["--batch", "99999999999"], "give a smaller --batch"),
        (["--layers", "99999999999"], "model vit in float64 takes"),
        (["--models", "vit", "--length", "1"], "a ViT's tokens are those of its images"),
        (["--seconds", "0"], "must be above 0"),
        (["--timeout", "0"], "it must be above 0 seconds"),
        (["--tune", "never"], "it must be one of measure, model, off"),
        (["--chain", "(1,out/5,mid,1)"], "is no whole number"),
        (["--plan", "none.json"], "none.json cannot be read"),
        (["--plan", "none.json", "--chain", "(1,out,in,1)"], "--plan takes the place of --chain"),
        (["--device", "tpu"], "device 'tpu' is not available"),
    ],
)
def test_arguments_that_are_not_allowed(words, message, capsys, tmp_path):
    code, out = run(tmp_path, *words)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_plan_that_does_not_fit_leaves_nothing(capsys, tmp_path):
    plan = Path(tmp_path) / "plan.json"
    Plan.of({"7x7": "(1,7,7,1)"}).write(plan)
    code, out = run(tmp_path, "--models", "vit", "--plan", str(plan))
    assert code == 2
    assert "matches no linear layer of the model" in capsys.readouterr().err
    assert not out.exists()


def test_ways_in_cuda_graphs_are_all_compiled_for_them():
    case_ways = measuring.implementations(How(is_step=False, is_graphs=True))
    assert {way.mode for way in case_ways} == {"reduce-overhead", "max-autotune"}
    assert [way.name for way in case_ways][:2] == [DENSE, DENSE_AUTOTUNED]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "graphs", "recorded"])
def test_on_a_gpu_memory_is_counted_and_graphs_are_replayed(mode, tmp_path):
    out = tmp_path / "out"
    small = ["--small", "--layers", "1", "--models", "gpt2", "--dtypes", "bfloat16"]
    words = [*small, "--modes", mode, "--seconds", "0.1", "--out", str(out)]
    assert main.main(["bench", "models", *words, "--ways", "inductor,ksopt,kslinear"]) == 0
    cases = cases_of(out)
    assert [(case["pass"], case["mode"]) for case in cases] == [("forward", mode), ("step", mode)]
    for case in cases:
        for way in case["ways"]:
            assert way["us"] > 0
            # bfloat16 parameters, and at least the logits of 3 x 24 tokens
            assert way["peak_bytes"] >= 2 * (way["parameters"] + 3 * 24 * 61)


@pytest.mark.slow
def test_a_refused_run_leaves_no_folder_of_torchs_caches(tmp_path):
    command = [sys.executable, "-m", "ksopt", "bench", "models", "--models", "vit", "--small"]
    too_deep = ["--device", "cpu", "--layers", "99999999999999", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(
        [*command, *too_deep], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "GiB of memory" in done.stderr
    assert list(tmp_path.iterdir()) == []
