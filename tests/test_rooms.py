"""Imports run one way: a room imports only rooms listed before it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the ground up, as in CONTRIBUTING.md; rooms of one line do not import each other.
ORDER = """
errors
settings
system
report
precision epilogue patterns
drawing reference
batched
baselines jit
doctor measure
kernels
ops
tune functional projection
nn
operators
compile.capture
compile.lowering
compile
conversion
integrations
bench
search
optimization
cli
"""
RANKS = {room: at for at, line in enumerate(ORDER.split("\n")) for room in line.split()}
# ``ksopt`` itself is the package's list of names, which are imported when they are used.
ANYWHERE = {"ksopt", "__main__"}
# The report of a graph, which all stages of the compiler fill.
DATA = {"ksopt.compile.sites"}


def modules() -> dict[str, Path]:
    files = [*ROOT.glob("ksopt/**/*.py"), *ROOT.glob("search/**/*.py")]
    names = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        parts = ("ksopt", *parts) if parts[0] == "search" else parts
        names[".".join(parts).removesuffix(".__init__")] = file
    return names


MODULES = modules()


def room(module: str) -> str:
    parts = module.split(".")
    if parts[1:2] == ["compile"] and parts[2:3] in (["capture"], ["lowering"]):
        return ".".join(parts[1:3])
    return parts[1] if len(parts) > 1 else "ksopt"


def imported(module: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inner & MODULES.keys()) or {str(node.module)}
    return {name for name in names if name.split(".")[0] == "ksopt"} - DATA


def test_the_table_of_rooms_has_their_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## The rooms\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    paths = [path for row in rows for path in re.findall("`(.+?)`", row)]
    rooms = [path.removeprefix("ksopt/").removesuffix(".py").strip("/") for path in paths]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    listed = [one.replace("/", ".") for one in rooms if not one.startswith(("csrc/", "docs/"))]
    assert listed == ORDER.split()


def test_every_module_is_in_a_room() -> None:
    assert {room(module) for module in MODULES} - ANYWHERE == RANKS.keys()


@pytest.mark.parametrize("module", sorted(m for m in MODULES if room(m) not in ANYWHERE))
def test_a_module_knows_only_the_rooms_below_its_own(module: str) -> None:
    own = room(module)
    others = {room(name): name for name in imported(module)}
    others = {other: name for other, name in others.items() if other not in {own, *ANYWHERE}}
    above = [name for other, name in others.items() if RANKS[other] >= RANKS[own]]
    assert not above, f"{module} imports {above}"
