"""Runs examples/optimize.ipynb and stores its outputs, after a change of it.

    python docs/experiments/run_notebook.py

It needs `pip install 'ksopt[test]'`. Stored are the outputs that a reader sees, without warnings
with paths of this machine, and without the text of results that have HTML.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "optimize.ipynb"


def executed() -> nbformat.NotebookNode:
    """The notebook, run from its first cell in a separate kernel and folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    return notebook


def main() -> int:
    """Run it and write it back."""
    notebook = executed()
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
            for output in cell.outputs:
                if "text/html" in output.get("data", {}):
                    del output.data["text/plain"]
    nbformat.write(notebook, NOTEBOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
