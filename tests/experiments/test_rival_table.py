"""`python docs/experiments/rival_table.py`: rows, their table, and resumed runs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rival_table
from ksopt.operators.registry import operator_of, parse
from ksopt.patterns.size import Dims
from recipes import tasks
from rivals.choosing import chosen
from rivals.network import LargeLinear, ReferenceLinear, converted, new_network, sizes_of
from rivals.rows import Row, Speed, Table, Timed, markdown

ROOT = Path(__file__).parents[2]
MACHINE = {"name": "a processor", "threads": 2, "torch": "2.13.0"}
SETTINGS = {"steps": 3, "dense_steps": 9, "seeds": 2, "dtype": "float32"}
TASK = {"name": "digits", "data": "images", "rows": 64}


def row(structure: str, budget: str, *speeds: Speed) -> Row:
    return Row(structure, budget, speeds, 0.5, 0.25, 1e-3, (0.5, 0.75), (1.0, 0.5), "abc")


def table() -> Table:
    dense = row("dense", "", Speed("8x4", 2, "dense", 32, 64, 1.0, 1.0))
    half = row("low-rank", "50%", Speed("8x4", 2, "low-rank(8x4,1)", 12, 24, 30.0, 40.0))
    none = Speed("8x4", 2, "two-four(8x4)", 18, 32, None, None, "it needs something")
    return Table(MACHINE, SETTINGS, TASK, (dense, half, row("two-four", "57%", none)))


def test_the_table_says_what_was_measured_and_what_not(tmp_path: Path) -> None:
    table().write(tmp_path / "rows.json")
    again = Table.read(tmp_path / "rows.json")
    assert again == table()
    text = markdown(again)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:7]]
    assert cells[2][3:6] == ["100.0%", "100.0%", "1.00"]
    assert cells[3] == [
        *("50%", "low-rank", "low-rank(8x4,1)", "37.5%", "37.5%", "0.75", "0.500"),
        *("25.0%", "62.5%", "50.0 to 75.0", "0.001"),
    ]
    assert cells[4][5] == "-"
    assert text.endswith("two-four was not timed: it needs something.\n")
    assert "commit abc" in text


def test_a_size_counts_as_often_as_there_are_layers() -> None:
    speeds = (
        Speed("8x4", 3, "low-rank(8x4,1)", 12, 24, 10.0, 20.0),
        Speed("4x8", 1, "low-rank(4x8,1)", 12, 24, 50.0, 20.0),
    )
    assert row("low-rank", "", *speeds).ratio == pytest.approx((3 * 10 + 50) / (4 * 20))


def test_what_stands_for_a_structure_has_the_most_weights_and_is_nearest() -> None:
    torch.manual_seed(0)
    matrix, dims = torch.randn(24, 16), Dims(16, 24)
    low = chosen("low-rank", "50%", dims, matrix)
    assert str(low) == "low-rank(16x24,4)"
    assert chosen("two-four", "50%", dims, matrix) is None
    assert str(chosen("two-four", "57%", dims, matrix)) == "two-four(16x24)"
    chain = chosen("ks", "50%", dims, matrix)
    assert chain is not None
    assert chain.nnz <= 192
    assert chain.nearest(matrix).relative_error < 1


@pytest.mark.slow  # for scikit-learn's sake, which has the images
def test_a_network_is_converted_layer_by_layer() -> None:
    torch.manual_seed(0)
    task = tasks.digits(torch.device("cpu"), small=True)
    dense = new_network(task)
    sizes = sizes_of(task, dense)
    assert set(sizes.names) == {Dims(64, 128), Dims(128, 64)}
    assert sizes.rows == 128 * 16
    x, _ = task.draw(torch.Generator().manual_seed(0))
    for text, error in (("strassen-tile({},2,7)", 0.0), ("fp8-dense({})", 0.03)):
        operators = {dims: operator_of(parse(text.format(dims))) for dims in sizes.names}
        model, relative = converted(dense, operators)
        assert relative == pytest.approx(error, abs=1e-2)
        assert not any(isinstance(one, LargeLinear) for one in model.modules())
        simulated = [one for one in model.modules() if isinstance(one, ReferenceLinear)]
        assert bool(simulated) == text.startswith("fp8")
        with torch.no_grad():
            torch.testing.assert_close(model(x), dense(x), rtol=0, atol=0.05 if error else 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_it_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(device: torch.device, small: bool) -> tasks.Task:
        return replace(tasks.digits(device, small), steps=6)

    monkeypatch.setitem(rival_table.TASKS, "digits", short)
    file = tmp_path / "rows.json"
    words = ["--small", "--device", "cpu", "--structures", "two-four,strassen-tile"]
    words += ["--budgets", "57%", "--steps", "3", "--seeds", "1", "--rates", "0.002"]
    words += ["--out", str(file)]
    assert rival_table.main(words) == 0
    done = Table.read(file)
    expected = [("dense", ""), ("two-four", "57%"), ("strassen-tile", "57%"), ("strassen-tile", "")]
    assert [(one.structure, one.budget) for one in done.rows] == expected
    assert done.rows[1].ratio is None
    assert done.rows[3].fit_error == 0
    assert 0.1 < done.rows[3].fitted_accuracy == done.rows[0].fitted_accuracy
    assert not file.with_suffix(".pt").exists()

    stopped = done.rows[2]
    timed = Timed(stopped.structure, stopped.budget, stopped.speeds, "of an earlier commit")
    replace(done, rows=done.rows[:2], timed=(timed,)).write(file)
    assert rival_table.main(words) == 0
    again = Table.read(file)
    assert again.rows[:2] == done.rows[:2]
    assert again.rows[2] == replace(stopped, commit="of an earlier commit")
    assert again.timed == ()
    assert [(one.structure, one.budget) for one in again.rows] == expected
    capsys.readouterr()
    assert rival_table.main(["--show", str(file)]) == 0
    assert capsys.readouterr().out == markdown(again)
    assert rival_table.main([*words, "--seeds", "2"]) == 2
    assert "is of other settings" in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted(ROOT.glob("docs/data/rivals-*.json")), ids=lambda f: f.stem)
def test_the_page_has_the_table_of_the_data(file: Path) -> None:
    page = (ROOT / "docs/rivals.md").read_text(encoding="utf-8")
    begin, end = (f"<!-- {word} {file.name} -->" for word in ("begin", "end"))
    (shown,) = re.findall(f"{re.escape(begin)}\n(.*?){re.escape(end)}", page, re.DOTALL)
    assert shown == markdown(Table.read(file))
    assert json.loads(file.read_text("utf-8"))["rows"]
