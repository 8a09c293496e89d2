"""Writes the random modules of tests/fuzz for the backend: differently written layers.

python -m versions.written FOLDER COUNT
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from tests.fuzz.modules import program


def main() -> int:
    """Write the modules, deterministically by their number."""
    warnings.simplefilter("ignore")
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(count):
        text = program(seed).source()
        (folder / f"module_{seed:04}.py").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
