"""The wheel, installed into an empty environment and used from another folder, does the job.

The environment has what the wheel says it needs, what that needs in turn, and nothing else, so that
a dependency that only the test environment happens to have is missed here. What it has is linked
from the test environment: to load and unpack a gigabyte once more takes two minutes.
"""

import email
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ksopt

ROOT = Path(__file__).parents[1]
PARTS = {"ksopt": "ksopt", "search": "ksopt/search", "csrc": "ksopt/csrc"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    # The environment's variables must not lead to the test environment.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=inherited,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def sources() -> set[str]:
    """Every file that the wheel must carry, under its name in the wheel."""
    return {
        f"{inside}/{path.relative_to(ROOT / part).as_posix()}"
        for part, inside in PARTS.items()
        for path in (ROOT / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: a build folder left in the checkout would end up in the wheel.
    checkout = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for part in PARTS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, checkout / part, ignore=ignored)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", folder=checkout)
    (built,) = (checkout / "dist").glob("*.whl")
    return built


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel in it, and a folder that is not the checkout."""

    folder: Path
    elsewhere: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def ksopt(self) -> Path:
        return self.folder / "bin" / "ksopt"

    def pip(self, *words: str | Path) -> None:
        """Run the test environment's pip on this environment."""
        quiet = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--python", self.python)
        run(sys.executable, *quiet, *words, folder=self.elsewhere)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("environment")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder)
    environment = Environment(folder, elsewhere)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in needed(wheel):
        link(distribution, packages)
    # pip sees the linked packages, and fails if the wheel needs more.
    environment.pip("install", "--no-index", wheel)
    yield environment
    shutil.rmtree(folder)


def needed(wheel: Path) -> list[metadata.Distribution]:
    """The wheel's requirements, and theirs, recursively."""
    distributions: dict[str, metadata.Distribution] = {}
    seen: set[str] = set()
    with zipfile.ZipFile(wheel) as file:
        (path,) = (one for one in file.namelist() if one.endswith(".dist-info/METADATA"))
        words = file.read(path).decode()
    pairs = [(line, "") for line in email.message_from_string(words).get_all("Requires-Dist", [])]
    while pairs:
        line, extra = pairs.pop()
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        distributions[name] = distribution = metadata.distribution(name)
        for option in {"", *requirement.extras}:
            if f"{name}[{option}]" not in seen:
                seen.add(f"{name}[{option}]")
                pairs += [(one, option) for one in distribution.requires or ()]
    return list(distributions.values())


def link(distribution: metadata.Distribution, packages: Path) -> None:
    """Install a distribution of the test environment in another one, as links to its files.

    Compiled ones too: Python takes 20 s to compile torch's anew.
    """
    for file in distribution.files or ():
        if file.parts[0] == "..":
            continue  # a program
        target = packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(Path(str(distribution.locate_file(file))).resolve())


def test_the_wheel_carries_every_source_and_nothing_else(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert names == sources()
    assert any(n.startswith("ksopt/csrc/cuda/") for n in names)
    assert any(n.startswith("ksopt/csrc/host/") for n in names)


def test_what_it_needs_is_installed_with_it(installed: Environment) -> None:
    installed.pip("check")


def test_it_is_imported_from_the_wheel(installed: Environment) -> None:
    script = """
import importlib, json, pkgutil
from importlib import resources
import ksopt
modules = [m.name for m in pkgutil.walk_packages(ksopt.__path__, "ksopt.")]
apart = ("ksopt.__main__", "ksopt.integrations.")  # these need optional packages
files = {
    name: importlib.import_module(name).__file__ for name in modules if not name.startswith(apart)
}
cuda = resources.files("ksopt.csrc") / "cuda"
sources = [p.name for folder in (cuda, cuda / "common") for p in folder.iterdir()]
print(json.dumps({"files": files, "sources": sources, "version": ksopt.__version__}))
"""
    done = run(installed.python, "-c", script, folder=installed.elsewhere)
    wheel = json.loads(done.stdout)
    assert wheel["version"] == ksopt.__version__
    assert {"ksopt.search", "ksopt.csrc", "ksopt.nn"} <= set(wheel["files"])
    outside = {
        name: file
        for name, file in wheel["files"].items()
        if not Path(file).resolve().is_relative_to(installed.folder.resolve())
    }
    assert outside == {}
    assert {"naive.cuh", "ptx.cuh"} <= set(wheel["sources"])


def test_the_command_says_its_version(installed: Environment) -> None:
    done = run(installed.ksopt, "--version", folder=installed.elsewhere)
    assert done.stdout == f"ksopt {ksopt.__version__}\n"


def test_torch_knows_the_backend(installed: Environment) -> None:
    script = "import torch._dynamo as d; print('ksopt' in d.list_backends())"
    done = run(installed.python, "-c", script, folder=installed.elsewhere)
    assert done.stdout == "True\n"


def test_the_doctor_finds_it_ready(installed: Environment) -> None:
    done = run(installed.ksopt, "doctor", folder=installed.elsewhere)
    assert done.stdout.splitlines()[-1].startswith("ready")


def test_a_search_measures_and_reports(installed: Environment) -> None:
    done = run(
        installed.ksopt,
        *("search", "--dims", "32x64", "--budget", "50%", "--batch", "16"),
        *("--trials", "4", "--device", "cpu", "--out", "report", "--json"),
        folder=installed.elsewhere,
    )
    printed = json.loads(done.stdout)
    report = installed.elsewhere / "report"
    assert printed == json.loads((report / "results.json").read_text(encoding="utf-8"))
    for name in ("report.md", "report.html", "trials.csv"):
        assert (report / name).stat().st_size > 0
