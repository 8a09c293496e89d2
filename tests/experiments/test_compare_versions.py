"""`docs/experiments/compare_versions.py`: the definition of a difference, the simulated clock."""

import doctest
import json
from pathlib import Path

import pytest

import compare_versions
from versions import comparing, documents, played_times
from versions.cases import CASES, Case
from versions.comparing import NOTHING, Deliberate, Difference, differences, sorted_out
from versions.deliberate import DELIBERATE
from versions.running import ROOT, Finished, RunError, Version

OTHER_ROWS = Deliberate("search", "trials/.*/error", "^0.0", "other rows are checked")
FRONT = {"metrics": ["latency_us"], "trials": [0]}
TIMES = """\
import ksopt, torch
from ksopt.kernels.problem import Problem
from ksopt.measure import interleaved, timing
from ksopt.patterns.chain import Pattern
from ksopt.tune import TuneRequest, tune

y = torch.ones(4, 8)
calls = {"dense": lambda: y + 1, "(1,8,8,1)": lambda: y + 1, "copy": lambda: y.clone()}
times = timing.measure(calls, "cpu", max_seconds=5.0)
print(*(f"{one.median_us:.3f}" for one in times.values()))
problem = Problem.of_factor(Pattern(2, 16, 16, 2), "float32", False)
(report,) = tune(TuneRequest((problem,), (8,), torch.device("cpu"), budget_s=5.0))
print(report.way, report.measured_us, ksopt.__file__)
"""


@pytest.mark.parametrize("module", [comparing, documents, played_times])
def test_their_examples_are_true(module) -> None:
    failed, tried = doctest.testmod(module)
    assert tried > 1
    assert not failed


@pytest.mark.parametrize(
    ("before", "now", "paths"),
    [
        ({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 2.0 + 1e-9}]}, []),  # rounding
        ({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 2.001}]}, ["a/1/b"]),
        ({"a": 1}, {"a": 1, "more": 2}, []),  # keys are added
        ({"a": 1, "less": 2}, {"a": 1}, ["less"]),
        ({"a": None}, {"a": 0}, ["a"]),
        ({"a": True}, {"a": 1}, ["a"]),
        ({"a": [1, 2]}, {"a": [2, 1]}, ["a/0", "a/1"]),  # in order
        ({"a": [1, 2]}, {"a": [1]}, ["a/1"]),
        ({"a": []}, {"a": [1]}, ["a/0"]),
        ({"a": "use"}, {"a": "keep"}, ["a"]),
        ({"a": {"b": 1}}, {"a": "b"}, ["a"]),
    ],
)
def test_what_counts_as_a_difference(before: object, now: object, paths: list[str]) -> None:
    assert [one.path for one in differences(before, now)] == paths


def test_only_what_a_kind_names_is_deliberate() -> None:
    small, large = Difference("trials/3/error", 0.01, 0.02), Difference("trials/3/error", 1.0, 0.0)
    other = Difference("trials/3/chain", "(1,8,8,1)", NOTHING)
    unexpected, deliberate = sorted_out("search", [small, large, other], [OTHER_ROWS])
    assert unexpected == [large, other]
    assert deliberate == {OTHER_ROWS: [small]}
    assert sorted_out("tune", [small], [OTHER_ROWS])[0] == [small]


def test_a_kind_may_be_of_one_case_and_bound_how_much_a_number_changes() -> None:
    near, far = Difference("latency/median_us", 100.0, 101.0), Difference("us", 100.0, 102.0)
    text = Difference("us", 100.0, "100")
    kind = Deliberate("bench", ".*us", "", "other rounds", title="two ways", at_most=0.0101)
    for title, deliberate in (("two ways", [near]), ("three ways", []), ("", [])):
        unexpected, named = sorted_out("bench", [near, far, text], [kind], title)
        assert named.get(kind, []) == deliberate
        assert unexpected == [one for one in (near, far, text) if one not in deliberate]


def test_a_reason_in_other_words_is_deliberate_with_the_same_numbers_only() -> None:
    before = "hopeless after 2 repeats: more than {} times the dense layer's latency"
    now = "given up after 2 repeats: above 1.24 of the dense layer's latency "
    now += "it is none of the fastest"
    for number, unexpected in (("1.24", 0), ("1.36", 1)):
        one = Difference("trials.csv/25/reason", before.format(number), now)
        assert len(sorted_out("search", [one], DELIBERATE)[0]) == unexpected


def test_a_part_of_a_text_may_change_and_the_rest_may_not() -> None:
    site = "a.py:3 lowered: (2,16,16,1) as linear, {} rows of float32{}, fused ['behind']"
    before = site.format(33, ", epilogue ['bias', 'gelu']")
    for rows, epilogue, unexpected in ((33, "", 0), (33, ", epilogue ['bias']", 0), (5, "", 1)):
        one = Difference("sites/a/0", before, site.format(rows, epilogue))
        assert len(sorted_out("explain", [one], DELIBERATE)[0]) == unexpected


def test_every_kind_of_one_case_names_a_case_that_there_is() -> None:
    cases = {(one.command, one.title) for one in CASES}
    assert {(one.command, one.title) for one in DELIBERATE if one.title} <= cases


def _left(folder: Path, results: dict) -> dict:
    """The document of a search that left these results."""
    out = folder / "out"
    out.mkdir()
    (out / "results.json").write_text(json.dumps(results))
    (out / "plan.json").write_text(json.dumps({"schema": "1", "layers": [{"chain": None}]}))
    (out / "trials.csv").write_text("number,latency_median_us,seconds\n0,12.50,0.2\n")
    return documents.search(Finished(folder, ()))


@pytest.mark.parametrize("schema", ["one size", "several sizes"])
@pytest.mark.parametrize("chain", ["(1,8,8,1)", "(1,8,4,1)"])
def test_results_of_both_schemas_are_one_document(schema: str, chain: str, tmp_path: Path) -> None:
    def layer(request_of_layer: dict, chain: str, sentence: str) -> dict:
        trials = [{"number": 0, "chain": chain, "seconds": len(sentence)}]
        answers = [{"verdict": "use the chain", "sentence": sentence}]
        own = {"in_features": 8, "out_features": 8, "trials": trials, "front": FRONT}
        return {**own, "finalists": [], "recommendations": answers, "request": request_of_layer}

    before = layer({"dims": "8x8", "batch": 4, "study": "one"}, "(1,8,8,1)", "Use it.")
    before |= {"replayed": False, "folder": "/somewhere"}
    if schema == "several sizes":
        before = {"shapes": [before], "request": {"command": "ksopt search"}, "plan": None}
    request_of_layer = {"batch": 4, "siblings": 1, "study": "other"}
    now = layer({"dims": "8x8", "study": "one"}, chain, "At 25%, use it.")
    now = {
        "layers": [now],
        "request": request_of_layer,
        "replayed": False,
        "plan": None,
        "unmet": {},
    }

    both = []
    for name, results in (("before", before), ("now", now)):
        (tmp_path / name).mkdir()
        both.append(_left(tmp_path / name, results))
    assert both[0]["trials.csv"] == [{"number": 0.0, "latency_median_us": 12.5}]
    paths = [one.path for one in differences(*both)]
    assert paths == ([] if chain == "(1,8,8,1)" else ["trials, in order/8x8/0/chain"])


def test_sites_are_compared_by_line_and_a_layers_own_operator_by_what_it_is() -> None:
    def printed(spelling: str, verdict: str) -> str:
        site = {"place": {"file": "/a/b.py", "line": 3}, "spelling": spelling, "verdict": verdict}
        site |= {"chain": "(4,8,8,1)", "batch": 6, "dtype": "float32", "reason": "At node y: no."}
        kinds = ("epilogue", "fused", "training", "to_input", "computed", "predicted", "measured")
        around = {"linear_flops": 10, "graphs": 1, "notes": [], "graph_breaks": [], "passes": {}}
        explanation = around | {"sites": [site | dict.fromkeys(kinds)]}
        return json.dumps({"layer": {"training": explanation, "any batch": {"error": "KeyError"}}})

    def document(spelling: str, verdict: str) -> dict:
        return documents.explained(Finished(Path(), (printed(spelling, verdict),)))

    own = document("ks_mm", "lowered")
    assert own == document("ks_chain", "lowered")
    assert own["errors"] == {"layer, any batch": "KeyError"}
    (one,) = differences(document("bmm", "lowered"), document("bmm", "not recognised"))
    assert one.path == "sites/layer, training/0"
    assert one.now == "b.py:3 not recognised: (4,8,8,1) as bmm. At node y: no."


@pytest.mark.parametrize(
    ("before", "now", "same"), [("a", "a", "yes"), ("a", "b", "no"), ("a", None, "no")]
)
def test_a_row_says_whether_a_case_is_the_same(
    before: str, now: str | None, same: str, tmp_path: Path
) -> None:
    class Known(Case):
        def run(self, version: Version, folder: Path) -> dict:
            text = before if version.name == "before" else now
            if text is None:
                raise RunError("exit code 1: no times are played")
            return {"answers": [text]}

    case = Known("search", "8x8", (), documents.search)
    versions = [Version(name, ROOT, tmp_path) for name in ("before", "now")]
    outcome = compare_versions.compared(case, *versions, tmp_path)
    assert outcome.row.endswith(f"| {same} |")
    assert bool(outcome.unexpected) == (same == "no")


def test_cases_that_fail_alike_are_not_the_same(tmp_path: Path) -> None:
    class Failing(Case):
        def run(self, version: Version, folder: Path) -> dict:
            raise RunError("exit code 1: no times are played")

    versions = [Version(name, ROOT, tmp_path) for name in ("before", "now")]
    case = Failing("search", "8x8", (), documents.search)
    assert compare_versions.compared(case, *versions, tmp_path).row.endswith("| no |")


def test_every_command_has_cases_of_its_own() -> None:
    assert len({(one.command, one.title) for one in CASES}) == len(CASES)
    commands = {"search", "explain", "convert", "tune", "bench kernels", "doctor"}
    assert {one.command for one in CASES} == commands


@pytest.mark.slow
def test_this_version_is_laid_out_and_reads_the_played_clock(tmp_path: Path) -> None:
    version = Version("now", ROOT, tmp_path / "home")
    version.lay_out()
    (tmp_path / "times.py").write_text(TIMES)
    first, second = version.run(tmp_path, ["times"], path=[tmp_path]).splitlines()
    names = ("dense", "(1,8,8,1)", "copy")
    assert first.split() == [f"{played_times.played_us(name, 32):.3f}" for name in names]
    way, took_us, file = second.split()
    name = f"{way} by (2,16,16,2), torch.float32, last: False"
    assert float(took_us) == pytest.approx(played_times.played_us(name, 8 * 64), abs=0.001)
    assert file.startswith("<folder>/home/package/ksopt")
    with pytest.raises(RunError, match=r"exit code 1: .*No module named"):
        version.run(tmp_path, ["no_such_module"])
