"""`python docs/experiments/training_recipes.py --small`: every way learns; the stored results."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import training_recipes
from recipes import results, tasks
from recipes.models import chain_linear, parameters

WAYS = ["dense", "KS", "KS, groups", "KS, guided", "KS, groups, guided", "dense, KS's time"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seeds", "rates"),
    [("digits", 1, [0.004]), ("text", 2, [0.002, 0.008])],
)
def test_every_way_learns(
    name: str,
    seeds: int,
    rates: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"--small --device cpu --tasks {name} --steps 30 --seeds {seeds} --rates"
    words += "".join(f" {lr}" for lr in rates)
    assert training_recipes.main([*words.split(), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out

    file = tmp_path / "training-recipes.json"
    machine, (task,) = results.read(file)
    assert machine["torch"] == torch.__version__
    assert [result.way for result in task.results] == WAYS
    for result in task.results:
        assert result.lr in rates
        assert [run.seed for run in result.runs] == list(range(seeds))
        for run in result.runs:
            assert run.points[0].step == 0
            assert run.points[-1].loss < 0.93 * run.points[0].loss, result.way
            assert run.points[-1].accuracy > run.points[0].accuracy
            seconds = [point.seconds for point in run.points]
            assert seconds == sorted(seconds)
        if "time" not in result.way:
            assert result.runs[0].points[-1].step == task.steps == 30
    dense, chains = task.results[0], task.results[1]
    assert dense.parameters == pytest.approx(chains.parameters, rel=0.04)
    # Seeds differ, and the sweep's choice is the best of its rates.
    assert len({run.points[-1].loss for run in dense.runs}) == seeds
    for result in task.results[:3]:
        tried = {trial.lr: trial.loss for trial in task.sweep if trial.way == result.way}
        assert result.lr == min(tried, key=lambda lr: tried[lr])

    # The picture: a curve of each way in each panel. Both come again from the file alone.
    drawn = (tmp_path / f"training-{name}.svg").read_text(encoding="utf-8")
    texts = [one.text for one in ElementTree.fromstring(drawn).iter() if one.tag.endswith("text")]
    assert set(WAYS) <= set(texts)
    assert {"steps", "seconds of training"} <= set(texts)
    (tmp_path / f"training-{name}.svg").unlink()
    assert training_recipes.main(["--show", str(file), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == printed
    assert (tmp_path / f"training-{name}.svg").read_text(encoding="utf-8") == drawn
    assert all(f"| {way} | " in printed for way in WAYS)


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    file.write_text(json.dumps({"schema": "other"}), encoding="utf-8")
    with pytest.raises(ValueError, match="schema other"):
        training_recipes.main(["--show", str(file)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "text"])
def test_the_networks_of_the_full_run_have_as_many_parameters(name: str) -> None:
    task = training_recipes.TASKS[name](torch.device("cpu"), False)
    with torch.device("meta"):
        dense = task.build(task.sizes["dense"], nn.Linear)
        chains = task.build(task.sizes["chains"], chain_linear)
    assert parameters(dense) == pytest.approx(parameters(chains), rel=0.015)
    (x, y), *_ = task.held_out
    drawn, labels = task.draw(torch.Generator().manual_seed(0))
    assert drawn.shape[1:] == x.shape[1:]
    assert labels.shape[1:] == y.shape[1:]


@pytest.mark.slow
def test_text_is_windows_of_bytes_whose_labels_are_the_next() -> None:
    task = tasks.text(torch.device("cpu"), small=True)
    x, y = task.draw(torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (16, 64)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert b"    " in bytes(x.flatten().tolist())  # Python is indented
