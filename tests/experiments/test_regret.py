"""The command that measures the search itself: its measurements, their order, its report."""

import csv
import functools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import search_regret
from ksopt.errors import InvalidInputError
from ksopt.kernels.compile_ahead import Target
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Chain
from ksopt.search.layer_request import LayerRequest
from ksopt.search.space.space import build
from regret import tables
from regret.device_process import DeviceProcess
from regret.reference import Predictions, Reference
from regret.rows import Book, Measured, Searched, Stage, TimedWay
from regret.schedule import Schedule, Unit
from regret.work import Work
from regret.worker import Bench
from search_regret import main

SCRIPT = Path(search_regret.__file__)
built = functools.cache(build)
REQUEST = LayerRequest("32x64", budgets=("30%", "60%"), batch=16, device="cpu", trials=4)


@pytest.fixture(autouse=True)
def spaces_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regret.reference.build", built)


def reference(size: int = 12) -> Reference:
    return Reference.of(REQUEST, None, None, size, seed=0)


def row(
    chain: str, us: float, stage: Stage = "uniform", budget: str = "60%", **more: object
) -> Measured:
    values = {"rho": us, "d_rho": us, "p20_us": 0.99 * us, "p80_us": 1.01 * us, "dense_us": 100.0}
    return Measured(
        "32x64",
        budget,
        stage,
        chain,
        Chain.parse(chain).nnz,
        latency_us=us,
        **{**values, **more},  # type: ignore[arg-type]
    )


def book(tmp_path: Path, chosen: dict[str, str | None]) -> Book:
    rows_of_book = Book.open(tmp_path / "r.jsonl", {"dtype": "float32"})
    rows_of_book.add([], Searched("32x64", chosen, 4, 3.0, 10.0, "a machine", {}))
    return rows_of_book


@pytest.mark.slow
def test_half_of_the_reference_is_uniform_and_of_every_step() -> None:
    drawn = reference().uniform
    assert len(drawn) == len(set(drawn)) == 6
    steps = [reference().step_of(chain) for chain in drawn]
    assert [step.budget.text for step in steps if step is not None] == ["30%", "60%"] * 3
    assert drawn == reference().uniform
    assert drawn != Reference.of(REQUEST, None, None, 12, seed=1).uniform


@pytest.mark.slow
def test_a_space_that_is_a_sample_gets_another_sample_beside_it() -> None:
    large = LayerRequest("96x192", budgets=("50%",), batch=16, device="cpu")
    sampled = Reference.of(large, None, None, 40, seed=7)
    assert not sampled.space.complete
    own = set(sampled.space.candidates)
    assert any(chain not in own for chain in sampled.uniform)  # outside the search's sample
    assert set(sampled.uniform) <= set(sampled.others)
    assert {chain for chain in sampled.guided([], 4000) if chain not in own}
    few = LayerRequest("8x12", budgets=("60%",), batch=16, device="cpu")
    small = Reference.of(few, None, None, 12, seed=7)
    assert small.space.complete
    assert small.others == small.space.candidates


def test_the_other_half_follows_measured_factors() -> None:
    whole = reference()
    inside = [chain for chain in whole.space.candidates if len(chain) == 2]
    patterns = {pattern for chain in inside for pattern in chain}
    shared = Counter(pattern for chain in inside for pattern in chain)
    quick = next(chain for chain in inside if all(shared[pattern] > 1 for pattern in chain))
    times = {pattern: 1.0 if pattern in quick else 50.0 for pattern in patterns}
    rows = [
        row(str(chain), 60.0, factors_us=tuple(times[pattern] for pattern in chain))
        for chain in inside
        if chain != quick
    ]
    assert whole.guided(rows, 1) == [quick]  # its factors are known from others
    # What was measured is not measured again.
    assert quick not in whole.guided([*rows, row(str(quick), 2.0)], 10)


def test_predictions_are_corrected_by_what_was_measured() -> None:
    whole = reference()
    chains = [chain for chain in whole.space.candidates if len(chain) == 2]
    known = {pattern: float(pattern.nnz) for chain in chains for pattern in chain}
    first = chains[0]
    known_factors = replace(whole, predictions=Predictions(_known=dict(known)))
    factors_us = tuple(3 * known[pattern] for pattern in first)
    estimates = known_factors._estimates([row(str(first), sum(factors_us), factors_us=factors_us)])
    assert estimates[first] == pytest.approx(3 * sum(known[p] for p in first))
    last = chains[-1]
    assert estimates[last] == pytest.approx(3 * sum(known[p] for p in last))
    # Factors overlap by 5 us in the one chain: so they are expected to in all.
    estimates = known_factors._estimates(
        [row(str(first), sum(factors_us) - 5, factors_us=factors_us)]
    )
    assert estimates[last] == pytest.approx(3 * sum(known[p] for p in last) - 5)


def test_rows_are_read_and_a_line_that_was_cut_off_is_not(tmp_path: Path) -> None:
    chain = str(reference().uniform[0])
    first = book(tmp_path, {"60%": chain})
    first.add([row(chain, 5.0, factors_us=(1.0, None))])
    with first.path.open("a") as file:
        file.write('{"kind": "measured", "dims": "32')
    again = Book.open(first.path, {"dtype": "float32"})
    assert again.measured == first.measured
    assert again.searched == first.searched
    again.add([row(chain, 6.0)])
    assert len(Book.open(first.path, {"dtype": "float32"}).measured) == 2
    with pytest.raises(InvalidInputError, match="dtype float32 there and float16 here"):
        Book.open(first.path, {"dtype": "float16"})


def test_rows_that_belong_together_are_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = [str(chain) for chain in reference().uniform[:3]]
    rows_of_book = book(tmp_path, {"60%": chains[0]})
    before = rows_of_book.path.read_text()

    class Cut(RuntimeError):
        pass

    def dumped(value: object) -> str:
        if value["chain"] == chains[1]:  # type: ignore[index]
            raise Cut
        return "{}"

    monkeypatch.setattr("regret.rows.json.dumps", dumped)
    with pytest.raises(Cut):  # a final of which one row is there would be taken for all of it
        rows_of_book.add([row(chain, 5.0, "final") for chain in chains])
    assert rows_of_book.path.read_text() == before
    assert rows_of_book.of("32x64", "final") == []


def test_the_ways_of_a_factor_are_stored_for_fitting_models(tmp_path: Path) -> None:
    chain = str(reference().uniform[0])
    rows_of_book = book(tmp_path, {"60%": chain})
    way = TimedWay("(1,4,4,2)", "mma16", 3.0, 4.0, True, "cuda:0")
    rows_of_book.add(
        [row(chain, 9.0, factors_us=(4.0, 5.0), predicted_factors_us=(3.0, None))], ways=[way]
    )
    again = Book.open(rows_of_book.path, {"dtype": "float32"})
    assert again.ways == [way]
    assert again.measured[0].predicted_factors_us == (3.0, None)
    tables.write(again)
    with (tmp_path / "r-ways.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert (line["way"], line["predicted_us"], line["us"]) == ("mma16", "3.0", "4.0")
    with (tmp_path / "r-chains.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert (line["factors_us"], line["predicted_factors_us"]) == ("4;5", "3;")


def test_a_report_of_what_is_there_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, quick = (str(chain) for chain in reference().uniform[:2])
    rows_of_book = book(tmp_path, {"60%": slow})
    rows_of_book.add([row(slow, 10.0, "search"), row(quick, 9.0)])
    rows = rows_of_book.path.read_text()
    assert main(["--report", str(rows_of_book.path)]) == 0
    message = capsys.readouterr().out
    assert "Of 32x64 the final is still to come." in message
    assert "cases" not in message
    assert rows_of_book.path.read_text() == rows
    rows_of_book.add([row(slow, 10.0, "final"), row(quick, 9.0, "final")])
    assert main(["--report", str(rows_of_book.path)]) == 0
    message = capsys.readouterr().out
    assert "In 0 of 1 cases the recommended chain is within 3% of the best" in message
    assert "the largest regret is 11.1%, for 32x64 at 60%" in message
    assert (tmp_path / "r.md").read_text() in message


def test_regret_is_of_the_final(tmp_path: Path) -> None:
    slow, quick, other = (str(chain) for chain in reference().uniform[:3])
    rows_of_book = book(tmp_path, {"60%": slow, "30%": None})
    rows_of_book.add([row(slow, 10.0, "search"), row(quick, 9.0, "guided"), row(other, 11.0)])
    assert tables.cells(rows_of_book)[0].regret is None  # there was no final yet
    rows_of_book.add([row(slow, 10.5, "final"), row(quick, 10.0, "final")])
    cell = tables.cells(rows_of_book)[0]
    assert (cell.recommended, cell.best, cell.best_from) == (slow, quick, "guided")
    assert cell.regret == pytest.approx(0.05)
    assert cell.within_noise is False
    assert (cell.searched, cell.reference) == (1, 2)
    assert "5.0%" in tables.markdown(rows_of_book)
    assert tables.cells(rows_of_book)[1].recommended is None


def test_a_chain_of_two_steps_is_in_the_final_of_both(tmp_path: Path) -> None:
    edge, quick = "(1,8,4,8)*(4,8,8,1)", "(1,4,2,16)*(2,4,8,4)*(16,4,2,1)"
    assert Chain.parse(edge).nnz == Chain.parse(quick).nnz == 32 * 64 // 4
    rows_of_book = book(tmp_path, {"25%": quick, "50%": edge})
    rows_of_book.add([row(edge, 10.5, "search", "25%"), row(quick, 10.0, "search", "25%")])
    rows_of_book.add([row(edge, 10.5, "final", "25%"), row(quick, 10.0, "final", "25%")])
    quarter, half = tables.cells(rows_of_book)
    assert (quarter.recommended_us, quarter.best, quarter.regret) == (10.0, quick, 0.0)
    assert (half.recommended_us, half.best, half.best_from) == (10.5, quick, "search")
    assert half.regret == pytest.approx(0.05)


def test_the_final_has_the_best_of_a_step_whatever_step_their_rows_name(tmp_path: Path) -> None:
    request = LayerRequest("32x64", budgets=("25%", "50%"), device="cpu", batch=16)
    edge = [
        str(c) for c in Reference.of(request, None, None, 40, 0).space.candidates if c.nnz == 512
    ]
    rows_of_book = book(tmp_path, {"25%": edge[0], "50%": edge[0]})
    rows = [row(chain, 10.0 + at, "uniform", "25%") for at, chain in enumerate(edge[:4])]
    wide = next(c for c in Reference.of(request, None, None, 40, 0).space.candidates if c.nnz > 512)
    rows_of_book.add([*rows, row(str(wide), 50.0, "uniform", "50%")])
    schedule = Schedule(
        rows_of_book, {"32x64": request}, {"32x64": Reference.of(request, None, None, 0, 0)}
    )
    assert wide not in schedule.finalists("32x64")


def test_indistinguishable_chains_are_reported(tmp_path: Path) -> None:
    slow, quick = (str(chain) for chain in reference().uniform[:2])
    rows_of_book = book(tmp_path, {"60%": slow})
    rows_of_book.add([row(slow, 10.05, "final"), row(quick, 10.0, "final")])
    assert tables.cells(rows_of_book)[0].within_noise is True
    assert "0.5% (within noise)" in tables.markdown(rows_of_book)


def test_correlations_are_of_the_uniform_half(tmp_path: Path) -> None:
    chains = [str(chain) for chain in reference(40).uniform[:6]]
    rows_of_book = book(tmp_path, {"60%": chains[0]})
    rows_of_book.add(
        row(chain, 10.0 + place, predicted_us=100.0 - place, rho=float(place))
        for place, chain in enumerate(chains)
    )
    rows_of_book.add([row(chains[0], 1.0, "guided", predicted_us=1000.0)])  # picked: no fair sample
    cell = tables.cells(rows_of_book)[0]
    assert cell.spearman_predicted == -1
    assert cell.spearman_rho == 1
    assert cell.ranked == 6


def test_shares_count_all_that_held_the_device(tmp_path: Path) -> None:
    chains = [str(chain) for chain in reference().uniform[:3]]
    rows_of_book = book(tmp_path, {"60%": chains[0]})
    rows_of_book.add(
        [row(chains[0], 1.0, seconds=20.0), row(chains[1], 1.0, "guided", seconds=6.0)]
    )
    rows_of_book.add([row(chains[2], 1.0, "final", seconds=4.0, after=2)])
    (cost,) = tables.costs(rows_of_book)
    assert (cost.search_seconds, cost.reference_seconds, cost.share) == (3.0, 30.0, 0.1)
    assert "For 1 of 1 sizes the search held the device for at most 10%" in tables.markdown(
        rows_of_book
    )
    assert cost.reference_chains == 2


SMALL = LayerRequest("32x32", budgets=("60%",), batch=16, device="cpu", trials=4)


def two_sizes(tmp_path: Path, size: int, times: float = 0.0) -> Schedule:
    requests = {"32x64": REQUEST, "32x32": SMALL}
    references = {dims: Reference.of(one, None, None, size, 0) for dims, one in requests.items()}
    return Schedule(Book.open(tmp_path / "r.jsonl", {}), requests, references, times)


def searched(schedule: Schedule, unit: Unit, seconds: float = 1.0) -> str:
    """Note that a search has ended; its answer."""
    answer = str(schedule.references[unit.dims].uniform[0])
    rows_of_book = Searched(unit.dims, {"60%": answer}, 1, seconds, 1.0, "", {})
    schedule.done(unit, searched=rows_of_book)
    return answer


def measured(schedule: Schedule, unit: Unit | None, seconds: float = 0.5, **more: object) -> Unit:
    """Record that a unit was measured, and return the unit."""
    assert unit is not None
    assert unit.kind != "search"
    values = {"latency_us": 1.0, "dense_us": 2.0, "seconds": seconds, **more}
    rows = [schedule.row(unit.dims, unit.stage, {"chain": str(c), **values}) for c in unit.chains]
    schedule.done(unit, [one for one in rows if one is not None])
    return unit


def both_searched(schedule: Schedule, seconds: float = 1.0) -> None:
    units = [schedule.next("cuda:0"), schedule.next("cuda:1")]
    for unit in units:
        assert unit is not None
        searched(schedule, unit, seconds)


def test_devices_search_first_and_then_share_a_reference(tmp_path: Path) -> None:
    schedule = two_sizes(tmp_path, 30)
    first, second = schedule.next(), schedule.next()
    assert first is not None
    assert second is not None
    assert [(unit.kind, unit.dims) for unit in (first, second)] == [
        ("search", "32x64"),
        ("search", "32x32"),
    ]
    answer = searched(schedule, first)
    uniform = schedule.next()
    assert uniform is not None
    assert (uniform.kind, uniform.stage, uniform.dims) == ("chains", "uniform", "32x64")
    assert set(uniform.chains) <= set(schedule.references["32x64"].uniform)
    guided = schedule.next()
    assert guided is not None
    assert guided.stage == "guided"
    assert not set(guided.chains) & set(uniform.chains)
    for unit in (uniform, guided):
        measured(schedule, unit)
    final = schedule.next()
    assert final is not None
    assert final.kind == "final"
    assert answer in map(str, final.chains)
    schedule.stop()
    assert schedule.next() is None


def test_a_size_is_finished_before_the_next_one_begins(tmp_path: Path) -> None:
    schedule = two_sizes(tmp_path, 60)
    both_searched(schedule)
    done = []
    while (unit := schedule.next("cuda:0")) is not None:
        after = len(schedule.book.reference(unit.dims)) if unit.kind == "final" else 0
        done.append((measured(schedule, unit, after=after).dims, unit.kind))
    assert [dims for dims, _ in done] == sorted((dims for dims, _ in done), reverse=True)
    assert [dims for dims, kind in done if kind == "final"] == ["32x64", "32x32"]


def test_two_devices_take_different_sizes(tmp_path: Path) -> None:
    schedule = two_sizes(tmp_path, 60)
    both_searched(schedule)
    units = [schedule.next("cuda:0"), schedule.next("cuda:1")]
    assert [unit.dims for unit in units if unit is not None] == ["32x64", "32x32"]
    measured(schedule, units[1])
    again = schedule.next("cuda:1")
    assert again is not None
    assert again.dims == "32x32"


def test_a_reference_takes_ten_times_as_long_as_the_search(tmp_path: Path) -> None:
    schedule = two_sizes(tmp_path, 8, times=10.0)
    both_searched(schedule, seconds=2.0)
    held = 0.0
    while (unit := schedule.next()) is not None and unit.dims == "32x64":
        if unit.kind == "final":
            break
        measured(schedule, unit)
        held += 0.5 * len(unit.chains)
    assert 20.0 <= held < 20.5  # 40 chains of half a second, no portion more
    assert len(schedule.book.of("32x64", "uniform")) == 8 // 2


@pytest.mark.slow
def test_a_reference_ends_with_the_space(tmp_path: Path) -> None:
    schedule = two_sizes(tmp_path, 6, times=1e5)
    both_searched(schedule)
    while (unit := schedule.next()) is not None and unit.kind == "chains":
        measured(schedule, unit)
    assert unit is not None
    assert unit.kind == "final"
    chains = {one.chain for one in schedule.book.reference(unit.dims)}
    request = schedule.requests[unit.dims]
    samples = [build(replace(request, seed=seed)).candidates for seed in range(3)]
    assert chains == {str(chain) for sample in samples for chain in sample}
    assert len(samples[0]) < len(chains)  # more than the search's own sample


def test_when_time_is_short_finals_are_held_early_and_again_later(tmp_path: Path) -> None:
    schedule = two_sizes(tmp_path, 60)
    both_searched(schedule)
    measured(schedule, schedule.next("cuda:0"))
    assert schedule.finals_take_s(devices=2) > 0
    schedule.end_early()
    final = schedule.next("cuda:0")
    assert final is not None
    # Of the other size nothing was measured: a final would compare the search with itself.
    assert (final.kind, final.dims) == ("final", "32x64")
    early = len(schedule.book.reference("32x64"))
    measured(schedule, final, after=early)
    assert schedule.next("cuda:0") is None
    assert schedule.finals_take_s(devices=2) == 0

    later = Schedule(Book.open(schedule.book.path, {}), schedule.requests, schedule.references)
    while (unit := later.next("cuda:0")) is not None and unit.kind == "chains":
        measured(later, unit)
    assert unit is not None
    assert (unit.kind, unit.dims) == ("final", "32x64")
    assert "32x64 has grown since its final" in tables.markdown(later.book)
    measured(later, unit, after=len(later.book.reference("32x64")))
    last = later.book.final("32x64")
    assert {one.after for one in last} == {len(later.book.reference("32x64"))}
    assert len(last) == len(unit.chains)
    assert "has grown since" not in tables.markdown(later.book)


def test_what_a_process_left_comes_again_and_what_failed_does_not(tmp_path: Path) -> None:
    schedule = two_sizes(tmp_path, 60)
    both_searched(schedule)
    unit = schedule.next("cuda:0")
    assert unit is not None
    schedule.give_back(unit)
    assert schedule.next("cuda:0") == unit
    schedule.failed(unit)
    again = schedule.next("cuda:0")
    assert again is not None
    assert not set(again.chains) & set(unit.chains)


DEAD_WORKER = """
import json, os, signal, sys
sys.stdin.readline()
print(json.dumps({"device": "a device", "batch": 16, "target": None}), flush=True)
for task in map(json.loads, sys.stdin):
    for chain in task["chains"]:
        if chain == BAD:
            END
        row = {"chain": chain, "latency_us": 1.0, "dense_us": 2.0, "seconds": 0.1}
        print(json.dumps({"row": row, "ways": []}), flush=True)
    print(json.dumps({"measured": len(task["chains"])}), flush=True)
"""


@pytest.mark.parametrize(
    ("end", "blamed"),
    [("os.kill(os.getpid(), signal.SIGSEGV)", True), ("os.kill(os.getpid(), 15)", False)],
)
def test_a_process_that_dies_is_replaced(
    end: str,
    blamed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    schedule = two_sizes(tmp_path, 8)
    both_searched(schedule)
    schedule.book.searched.pop("32x32")
    schedule._failed.add(("search", "32x32"))
    schedule._failed.add(("final", "32x64"))
    chains = list(map(str, schedule.references["32x64"].uniform))
    script, already = tmp_path / "worker.py", tmp_path / "already"
    # Only the first process dies where the chain is not to blame: it is measured by the second.
    once = f"open({str(already)!r}, 'x'); {end}"
    once = f"if not os.path.exists({str(already)!r}): {once}"
    source = DEAD_WORKER.replace("BAD", repr(chains[2])).replace("END", once)
    script.write_text(source)
    monkeypatch.setattr("regret.device_process.MODULE", "worker")
    monkeypatch.setattr("regret.device_process.FOLDER", tmp_path)
    with DeviceProcess("cuda:0", [], str(tmp_path)) as process:
        process.hello()
        Work(schedule, None, time.monotonic(), 1).on(process)
    rows = {one.chain: one for one in schedule.book.reference("32x64")}
    assert len(rows) == 8  # those that were measured before it died, and the others
    assert set(chains) <= set(rows)
    failed = [one.chain for one in rows.values() if one.reason]
    assert failed == ([chains[2]] if blamed else [])
    if blamed:
        assert "was ended by signal 11" in str(rows[chains[2]].reason)
    assert "the process on cuda:0 was ended by signal" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_a_size_that_fails_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "r" / "32x32"
    other.mkdir(parents=True)
    (other / "study.db").write_text("no database")
    command = ["--dims", "32x32", "32x64", "--budgets", "60%", "--dtype", "float32", "--batch"]
    command += ["16", "--device", "cpu", "--trials", "2", "--reference", "2", "--times", "0"]
    assert main([*command, "--out", str(tmp_path / "r.jsonl")]) == 1
    message = capsys.readouterr()
    assert "32x32, search: cpu: InvalidInputError: storage" in message.err
    stored = Book.read(tmp_path / "r.jsonl")
    assert set(stored.searched) == {"32x64"}
    assert stored.final("32x64")


@pytest.mark.slow
def test_processes_that_predict_end_with_their_parent(tmp_path: Path) -> None:
    """Other processes predict only beside a GPU: here for one that does not exist."""
    # Run as the command is: nothing of such a file is known to the processes.
    script = tmp_path / "asking.py"
    script.write_text(
        "import os, signal\n"
        "from ksopt.kernels.problem import DeviceSpec\n"
        "from regret.predicting import processes\n"
        "from regret.reference import Reference\n"
        "from ksopt.search.layer_request import LayerRequest\n"
        "if __name__ == '__main__':\n"
        "    pool = processes(1)\n"
        "    request = LayerRequest('64x64', batch=64, dtype='float16', device='cpu')\n"
        "    machine = DeviceSpec((9, 0), 132, 228 * 1024)\n"
        "    found = Reference.of(request, machine, pool, 40, 1)\n"
        "    times = [found.predictions.of_chain(chain) for chain in found.uniform]\n"
        "    print(*pool._processes, min(times) > 0, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == -9, done.stderr
    child, predicted = done.stdout.split()
    assert predicted == "True"
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dims", "32"], "write INxOUT"),
        (["--dims", "32x64", "--budgets", "x"], "budget 'x'"),
        (["--dims", "32x64", "--workers", "0"], "at least 1"),
        (["--dims", "32x64", "--times", "-1"], "times from 0"),
    ],
)
def test_misuse_is_a_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--device", "cpu", "--out", str(tmp_path / "r.jsonl")]
    assert main([*words, *out]) == 2
    assert message in capsys.readouterr().err


def test_a_report_of_no_such_file_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--report", str(tmp_path / "none.jsonl")]) == 2
    assert "No such file" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text("[1]\n")
    assert main(["--report", str(other)]) == 2
    assert "its first line is not the settings" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_it_runs_stops_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    command = [sys.executable, str(SCRIPT), "--dims", "32x64", "--budgets", "60%"]
    command += ["--dtype", "float32", "--batch", "16", "--device", "cpu", "--trials", "2"]
    command += ["--reference", "4", "--times", "0", "--out", str(out)]
    done = subprocess.run([*command, "--timeout", "0.001"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()] == ["settings"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds = [json.loads(line) for line in out.read_text().splitlines()]
    stages = [one.get("stage", one["kind"]) for one in kinds]
    assert stages[:4] == ["settings", "search", "search", "searched"]
    assert stages[4:8] == ["uniform", "uniform", "guided", "guided"]
    assert set(stages[8:]) == {"final"}
    with (tmp_path / "r-cells.csv").open() as file:
        (cell,) = csv.DictReader(file)
    assert float(cell["regret"]) >= 0
    assert cell["dims"] == "32x64"
    before = out.read_text()
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0
    assert out.read_text() == before  # nothing was left to measure


def test_a_device_says_what_its_cost_model_has_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("cpu")
    target = Target(DeviceSpec((9, 0), 132, 228 * 1024), "sm_90a")
    monkeypatch.setattr(Target, "of", lambda device: target)
    hello = json.loads(json.dumps(bench.hello()))
    assert Target.from_json(hello["target"]) == target
