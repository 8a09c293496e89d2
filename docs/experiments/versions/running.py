"""Runs one version of ksopt from a checkout as if it were installed, with simulated times."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[1]
ROOT = EXPERIMENTS.parents[1]
_FOLDERS = ("search", "csrc")
"""The folders beside ``ksopt/`` in a checkout, which are packages in it when installed."""
_LONGEST_S = 1800.0


class RunError(Exception):
    """A command ended with another exit code than its case; the message has its last line."""


@dataclass(frozen=True)
class Finished:
    """The outputs of a case.

    Attributes:
        folder: where it ran; its output is in ``out`` there.
        printed: the standard output of each of its commands.
    """

    folder: Path
    printed: tuple[str, ...]

    @property
    def out(self) -> Path:
        """The output folder."""
        return self.folder / "out"


@dataclass(frozen=True)
class Version:
    """A checkout, and a folder in which it is laid out as if it were installed.

    Attributes:
        name: of the version.
        tree: the checkout.
        home: a private folder.
    """

    name: str
    tree: Path
    home: Path

    @property
    def package(self) -> Path:
        """The folder for Python's path."""
        return self.home / "package"

    def lay_out(self) -> None:
        """Create the package from links."""
        package = self.package / "ksopt"
        package.mkdir(parents=True)
        parts = [*(self.tree / "ksopt").iterdir(), *(self.tree / name for name in _FOLDERS)]
        for part in parts:
            (package / part.name).symlink_to(part.resolve())

    def run(
        self,
        folder: Path,
        words: Sequence[str],
        code: int = 0,
        more: Mapping[str, str] | None = None,
        path: Sequence[Path] = (),
    ) -> str:
        """Run ``python -m`` with some words, and return its output.

        Args:
            folder: the working folder, which also holds the caches.
            words: the arguments of ``python -m``.
            code: the expected exit code.
            more: additional environment variables.
            path: additional folders of Python's path.

        Raises:
            RunError: it ended with another code.
        """
        command = [sys.executable, "-m", *words]
        ran = subprocess.run(
            command,
            cwd=folder,
            env={**self._environment(folder, path), **(more or {})},
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
        )
        if ran.returncode != code:
            last = [line for line in ran.stderr.splitlines() if line.strip()][-1:]
            raise RunError(f"exit code {ran.returncode}: {' '.join(last) or 'without a word'}")
        return self._without_folders(ran.stdout, folder)

    def _environment(self, folder: Path, path: Sequence[Path]) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("KSOPT_")}
        start = EXPERIMENTS / "versions" / "start"
        return inherited | {
            "PYTHONPATH": os.pathsep.join(map(str, [start, self.package, EXPERIMENTS, *path])),
            "KSOPT_CACHE_DIR": str(folder / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            # More threads change the order of sums, and would use other processes' cores.
            "OMP_NUM_THREADS": "1",
        }

    def _without_folders(self, text: str, folder: Path) -> str:
        """The output with the folders' names replaced."""
        for place, name in ((folder, "<folder>"), (self.tree.resolve(), "<checkout>")):
            text = text.replace(str(place), name)
        return text
