"""The notebook runs from its first cell to its last, and its stored output is of such a run."""

import nbformat
import pytest

import run_notebook


def shown(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """The output of each code cell: pages, or texts."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        [
            "page" if "text/html" in output.data else "text"
            for output in cell.outputs
            if output.output_type == "execute_result"
        ]
        for cell in cells
    ]


def test_it_lies_there_executed() -> None:
    notebook = nbformat.read(run_notebook.NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [kind for of_cell in shown(notebook) for kind in of_cell]
    assert kinds.count("page") == 4  # a search, a plan, a conversion, an explanation


@pytest.mark.slow
def test_it_runs() -> None:
    stored = nbformat.read(run_notebook.NOTEBOOK, as_version=4)
    assert shown(run_notebook.executed()) == shown(stored)
