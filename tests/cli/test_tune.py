"""`ksopt tune`: its output, stored choices and refusals."""

import json

import pytest
import torch

from ksopt import KSLinear
from ksopt import tune as tuning
from ksopt.cli.main import main
from ksopt.compile.lowering.decide import measured
from ksopt.compile.lowering.site_times import SiteCase, Times
from ksopt.kernels import tuning_cache, weight_cache
from ksopt.kernels.backends import cpu
from ksopt.kernels.backends.base import BACKENDS, backend_of
from ksopt.kernels.families.gradient_base import GradientProblem
from ksopt.kernels.gradient_record import GradientKey, GradientRecord
from ksopt.kernels.operands import Operands
from ksopt.kernels.problem import Problem, ProblemKey
from ksopt.kernels.tuning_cache import Timed
from ksopt.patterns.chain import Chain, Pattern

QUICK = ["--seconds", "0.01", "--device", "cpu"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    cpu.forget()
    yield
    cpu.forget()


def tune(*words: str) -> int:
    return main(["tune", *words])


def test_a_table_with_the_choice_its_rivals_and_the_reason(capsys):
    assert tune("--pattern", "(2,8,8,2)", "(1,16,16,1)", "--batch", "8", "40", *QUICK) == 0
    out, err = capsys.readouterr()
    head, *rows = out.splitlines()[:5]
    for word in ("pattern", "batch", "way", "predicted us", "measured us", "rivals, us"):
        assert word in head
    assert [row.split()[0] for row in rows] == ["(2,8,8,2)"] * 2 + ["(1,16,16,1)"] * 2
    assert "expand" in rows[0]
    assert "einsum" in rows[0]
    assert "(2,8,8,2) float32 batch_first batch<=64: measured" in out
    assert "4 choices, 4 measured now: 0 of ksopt's kernels, 4 of PyTorch's ways." in out
    assert str(tuning_cache.folder_of(cpu.fingerprint())) in out
    assert len(err.splitlines()) == 4  # one line each, as it goes


def test_recorded_products_are_measured_again_only_on_request(capsys, monkeypatch):
    words = ["--pattern", "(2,8,8,2)", "--batch", "40", "--json", *QUICK]
    assert tune(*words) == 0
    first = json.loads(capsys.readouterr().out)
    assert [choice["source"] for choice in first["choices"]] == ["measured"]
    assert tune(*words) == 0
    second = json.loads(capsys.readouterr().out)
    assert [choice["source"] for choice in second["choices"]] == ["recorded"]
    assert second["choices"][0]["timed"] == first["choices"][0]["timed"]
    assert tune(*words, "--again") == 0
    assert json.loads(capsys.readouterr().out)["choices"][0]["source"] == "measured"


def test_a_schema_of_another_number_has_keys_of_other_names(capsys):
    words = ["--pattern", "(2,8,8,2)", "--batch", "33", "--json", *QUICK]
    assert tune(*words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 2
    (choice,) = document["choices"]
    assert choice["key"]["pattern"] == "(2,8,8,2)"
    assert {one["weight"] for one in choice["timed"]} <= {"cached", "repacked", "any"}


def test_show_measures_nothing(capsys, monkeypatch):
    assert tune("--show", "--device", "cpu") == 0
    assert "No choices." in capsys.readouterr().out
    assert tune("--pattern", "(2,8,8,2)", "(1,16,16,1)", "--batch", "8", "40", *QUICK) == 0
    capsys.readouterr()
    monkeypatch.setattr(cpu.CpuBackend, "tune", None)
    assert tune("--show", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "4 choices, 0 measured now" in out
    assert tune("--show", "--device", "cpu", "--batch", "40", "--pattern", "(2,8,8,2)") == 0
    assert "1 choice, 0 measured now" in capsys.readouterr().out
    assert tune("--show", "--device", "cpu", "--json", "--batch", "9") == 0
    assert json.loads(capsys.readouterr().out)["choices"] == []


def test_show_lists_the_sites_that_the_compiler_timed(capsys):
    problem = Problem(Chain.parse("(1,8,4,4)*(4,4,8,1)"), "float32", batch_last=False)
    for batch, us in ((64, 5.0), (500, 9.0)):
        case = SiteCase(problem, batch, training=True, fused=("before",))
        measured(case, torch.device("cpu"), lambda *_, us=us: Times(us, 8.0))
    assert tune("--show", "--device", "cpu") == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith("(1,8,4,4)")]
    kind = ["(1,8,4,4)*(4,4,8,1)", "float32", "batch_first", "before", "training"]
    assert sorted(rows) == [
        [*kind, "500", "9.0", "8.0", *["left", "to", "PyTorch"]],
        [*kind, "64", "5.0", "8.0", "lowered"],
    ]
    assert "No choices." in out
    chosen = ("--batch", "50", "--pattern", "(1,8,4,4)", "(4,4,8,1)")
    assert tune("--show", "--device", "cpu", "--json", *chosen) == 0
    document = json.loads(capsys.readouterr().out)
    (only,) = document["sites"]
    assert (only["batch"], only["lower"], only["ksopt_us"]) == (64, True, 5.0)
    assert tune("--show", "--device", "cpu", "--json", "--pattern", "(2,8,8,2)") == 0
    assert json.loads(capsys.readouterr().out)["sites"] == []


def test_show_lists_the_gradients_that_training_has_timed(capsys):
    factors = Chain.parse("(1,8,4,4)*(4,4,8,1)").patterns
    tile = {"size": 8}
    timed = (
        Timed("pytorch", None, "any", 9.0, 8.0, 8.0, 8.0),
        Timed("toy", tile, "any", 2.0, 3.0, 3.0, 3.0),
    )
    fingerprint = backend_of("cpu").fingerprint(torch.device("cpu"))
    of_gelu = (*factors, Pattern(1, 16, 4, 2))
    for problem, at in (
        (GradientProblem("weight", factors[:1], "bfloat16", True), 1),
        (GradientProblem("chain_weights", factors, "bfloat16", siblings=3), 0),
        (GradientProblem("chain_input", of_gelu, "bfloat16", activation="gelu"), 0),
    ):
        tuning_cache.save(fingerprint, GradientRecord(GradientKey(problem, 6), 50, timed, at))
    assert tune("--show", "--device", "cpu") == 0
    out = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in out.splitlines() if "(1,8,4,4)" in line]
    assert sorted(rows) == [
        "(1,8,4,4) weight and bias, bfloat16 50 toy 2.0 3.0 pytorch 8.0",
        "(1,8,4,4)*(4,4,8,1) of gelu of (1,16,4,2) chain input, bfloat16 50 "
        "pytorch 9.0 8.0 toy 3.0",
        "3 x (1,8,4,4)*(4,4,8,1) chain weights, bfloat16 50 pytorch 9.0 8.0 toy 3.0",
    ]
    chosen = ("--batch", "64", "--pattern", "(1,8,4,4)")
    assert tune("--show", "--device", "cpu", "--json", *chosen) == 0
    (only,) = json.loads(capsys.readouterr().out)["gradients"]
    assert (only["key"]["gradient"], only["timed"][only["chosen"]]["config"]) == ("weight", tile)


def test_chains_dims_and_the_backward_pass(capsys):
    chain = ["--chain", "(1,24,4,2)*(2,4,6,1)", "--batch", "4", "--json", *QUICK]

    def tuned(*words):
        assert tune(*words) == 0
        choices = json.loads(capsys.readouterr().out)["choices"]
        return [choice["key"]["pattern"] for choice in choices]

    assert tuned(*chain) == ["(1,24,4,2)", "(2,4,6,1)"]
    assert tuned(*chain, "--backward")[2:] == ["(1,4,24,2)", "(2,6,4,1)"]
    named = tuned("--dims", "16x16", "--budget", "75%", "--batch", "4", "--json", *QUICK)
    assert len(named) == len(set(named)) > 2


def test_a_layer_takes_the_factors_that_were_tuned_with_its_epilogue(capsys):
    words = ["--chain", "(1,24,4,2)*(2,4,6,1)", "--batch", "8", "--epilogue", "bias"]
    assert tune(*words, "--json", *QUICK) == 0
    ways = [choice["way"] for choice in json.loads(capsys.readouterr().out)["choices"]]
    cpu.forget()
    layer = KSLinear(12, 48, "(1,24,4,2)*(2,4,6,1)")
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "raced", None)  # no product is timed again
        layer(torch.randn(8, 12))
    assert sorted(cpu.chosen().values()) == sorted(ways)


def test_the_dims_of_a_layer_with_an_epilogue_name_chains(capsys):
    words = ["--dims", "16x16", "--budget", "75%", "--batch", "4", "--json", *QUICK]
    assert tune(*words) == 0
    alone = json.loads(capsys.readouterr().out)["choices"]
    assert tune(*words, "--epilogue", "bias", "--siblings", "3") == 0
    assert len(json.loads(capsys.readouterr().out)["choices"]) == len(alone)  # no whole on a CPU


def test_the_tuned_choice_is_what_a_product_takes():
    pattern = Pattern(2, 8, 8, 2)
    problem = Problem.of_factor(pattern, "float32", batch_last=False)
    request = tuning.TuneRequest((problem,), (40,), torch.device("cpu"), budget_s=0.01)
    (report,) = tuning.tune(request)
    cpu.forget()
    cpu.run(torch.randn(40, 32), torch.randn(pattern.weight_shape), False)
    assert list(cpu.chosen().values()) == [report.way]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --pattern, --chain or --dims, or --show"),
        (["--pattern", "(1,2,2)"], "is not a pattern"),
        (["--pattern", "(1,0,2,1)"], "b must be at least 1"),
        (["--chain", "(1,2,2,2)*(1,3,3,1)"], "(1,3,3,1)"),
        (["--dims", "12"], "write INxOUT"),
        (["--dims", "12x8", "--budget", "1"], "no chain of the named families"),
        (["--budget", "25%"], "--budget needs --dims"),
        (["--pattern", "(1,2,2,2)", "--batch", "0"], "batch must be at least 1"),
        (["--pattern", "(1,2,2,2)", "--epilogue", "bais"], "did you mean 'bias'?"),
        (["--pattern", "(1,2,2,2)", "--epilogue", "relu_gate"], "siblings is 1: it must be 2"),
        (["--pattern", "(1,2,2,2)", "--siblings", "9"], "at most 4 layers share an input"),
        (["--pattern", "(1,2,2,2)", "--dtype", "int8"], "dtype 'int8' is unknown"),
        (["--pattern", "(1,2,2,2)", "--layout", "last"], "layout 'last' is unknown"),
        (["--pattern", "(1,2,2,2)", "--seconds", "0"], "give more than 0"),
        (["--pattern", "(1,2,2,2)", "--device", "cpu", "--tf32"], "TF32 is a precision of float32"),
        (["--pattern", "(1,2,2,2)", "--device", "tpu"], "device 'tpu' is not available"),
    ],
)
def test_misuse_is_answered_by_a_sentence(words, message, capsys):
    assert tune(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("words", [["--pattern", "(1,2,2,2)"], ["--show"]])
def test_a_machine_without_cuda_says_so(words, capsys):
    assert tune(*words, "--device", "cuda") == 2
    assert "device 'cuda' is not available: this machine has cpu" in capsys.readouterr().err


def test_a_setting_that_makes_tuning_useless_is_mentioned(capsys, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "off")
    assert tune("--pattern", "(2,8,8,2)", "--batch", "8", *QUICK) == 0
    assert "KSOPT_TUNE is off, so products will not use" in capsys.readouterr().err


def test_stopping_it_loses_nothing_that_was_measured(capsys, monkeypatch):
    real, done = cpu.tune, []

    def stopped(*args):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(real(*args))
        return done[-1]

    words = ["--pattern", "(2,8,8,2)", "(1,16,16,1)", "(4,4,4,1)", "--batch", "8", *QUICK]
    monkeypatch.setattr(cpu.CpuBackend, "tune", staticmethod(stopped))
    assert tune(*words) == 130
    monkeypatch.setattr(cpu.CpuBackend, "tune", staticmethod(real))
    capsys.readouterr()
    assert tune(*words, "--json") == 0
    sources = [choice["source"] for choice in json.loads(capsys.readouterr().out)["choices"]]
    assert sources == ["recorded", "recorded", "measured"]


def _multiply(x, weight):
    return cpu.run(x, weight, False)


def test_a_row_of_a_gpus_choice_tells_prediction_ratio_and_rivals():
    from ksopt.cli.tune import table
    from ksopt.kernels.explain import from_record
    from ksopt.kernels.tuning_cache import Record, Timed

    key = ProblemKey.of(Pattern(4, 64, 64, 16), "float16", 25_088, False)
    timed = (
        Timed("bmm", None, "repacked", 500.0, 563.0, 560.0, 570.0),
        Timed("bmm", None, "cached", 500.0, 552.0, 550.0, 560.0),
        Timed("mma16", {"mt": 2}, "any", 156.0, 139.0, 138.0, 140.0),
        Timed("mma16", {"mt": 1}, "any", 157.0, 150.0, 149.0, 151.0),
    )
    choice_report = from_record(Record(key, 25_088, timed, cached=2, repacked=2), "measured")
    (row,) = table([choice_report]).rows
    assert row == (
        *("(4,64,64,16)", "float16 batch_first", "25088", "mma16", "156.0", "139.0", "3.97"),
        "bmm 552.0",
    )
    assert tuning.summary([choice_report]) == (
        "1 choice, 1 measured now: 1 of ksopt's kernels, 0 of PyTorch's ways."
    )


def test_tuned_weights_are_not_cached():
    weight_cache.refresh()
    problem = Problem.of_factor(Pattern(2, 8, 8, 2), "float32", batch_last=False)
    request = tuning.TuneRequest((problem,), (8,), torch.device("cpu"), budget_s=0.01)
    list(tuning.tune(request))
    assert weight_cache.cached_bytes(torch.device("cpu")) == 0


@pytest.mark.parametrize("tf32", [False, True])
def test_the_precision_is_the_callers_again_between_products(monkeypatch, tf32):
    matmul, during = torch.backends.cuda.matmul, []

    def measured(x, weight, batch_last, budget_s):
        during.append(matmul.fp32_precision)
        return cpu.tune(x, weight, batch_last, budget_s)

    class Played(cpu.CpuBackend):
        device_type = "cuda"
        tune = staticmethod(measured)

    monkeypatch.setitem(BACKENDS, "cuda", Played())
    on_cpu = Operands(torch.randn(8, 4), (torch.randn(1, 2, 2, 2),))
    monkeypatch.setattr(tuning, "random_operands", lambda *_: on_cpu)
    before = matmul.fp32_precision
    problem = Problem.of_factor(Pattern(1, 2, 2, 2), "float32", False, exact=not tf32)
    device = torch.device("cuda")
    request = tuning.TuneRequest((problem,), (8, 64), device, budget_s=0.01, again=True)
    for _ in tuning.tune(request):
        assert matmul.fp32_precision == before
    assert during == ["tf32" if tf32 else "ieee"] * 2
