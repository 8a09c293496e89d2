"""The scripts that measure the cost of libraries."""

import json
from pathlib import Path

import pytest

import auto_config
import library_costs
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
