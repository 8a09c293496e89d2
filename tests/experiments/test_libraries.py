"""The scripts that measure the cost of libraries."""

import json
from pathlib import Path

import pytest

import auto_config
import library_costs
import lock_costs
import spawned_workers


@pytest.mark.slow
def test_a_plot_and_an_import_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert library_costs.main(["ksopt", "jinja2", "no_such_library"]) == 0
    ours, jinja, missing = capsys.readouterr().out.splitlines()
    assert ours.startswith("ksopt: import ")
    assert " ms, a plot 15 kB" in ours
    assert jinja.startswith("jinja2: import ")
    assert missing == "no_such_library: not installed"


@pytest.mark.slow
def test_a_worker_of_ours_ends_with_its_parent(capsys: pytest.CaptureFixture[str]) -> None:
    assert spawned_workers.main(["--seconds", "8"]) == 0
    theirs, ours = (float(line.split()[-2]) for line in capsys.readouterr().out.splitlines())
    assert ours < 5 < theirs


@pytest.mark.slow
def test_both_ways_list_the_same_layers(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    file.write_text(json.dumps({**auto_config.LLAMA_70B, **small}), encoding="utf-8")
    assert auto_config.main([str(file)]) == 0
    theirs, ours = capfd.readouterr().out.splitlines()
    assert theirs.startswith("transformers: 15 layers in ")
    assert ours.startswith("ksopt: 15 layers in ")


@pytest.mark.slow
def test_costs_of_locks(capsys: pytest.CaptureFixture[str]) -> None:
    assert lock_costs.main(["--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    for kind in (lock_costs.OWN, lock_costs.OWN_LIMITED, lock_costs.FILELOCK):
        assert f"hand-over by {kind}: median" in printed
    assert "/proc/a.lock, ksopt: FileNotFoundError" in printed
    assert "/proc/a.lock, filelock with a limit of 5 s: Timeout" in printed
    assert "a locked file's contents, ksopt: kept" in printed
    assert "a dead process, by a lock" in printed
    assert "Optuna's heartbeat in a journal: False" in printed
