"""Run examples/optimize.ipynb, and keep in it what it shows: after a change of it.

    python docs/experiments/run_notebook.py

It needs `pip install 'ksopt[test]'`. Kept is what a reader sees: no warnings with paths of this
machine, and no text beside a result that shows itself as a page.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "optimize.ipynb"


def executed() -> nbformat.NotebookNode:
    """The notebook, run from its first cell in a kernel and a folder of its own."""
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
