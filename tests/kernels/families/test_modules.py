"""Each module of kernels/families is a family, and so is each template of csrc/cuda."""

from pathlib import Path

import ksopt.csrc
from ksopt.kernels import families as package
from ksopt.kernels.families.base import families
from ksopt.kernels.families.gradient_base import KINDS, gradient_families

MODULES = Path(package.__file__).parent
TEMPLATES = Path(ksopt.csrc.__file__).parent / "cuda"
NAMES = {family.name for family in families()} | {
    family.name for kind in KINDS for family in gradient_families(kind)
}


def test_each_module_but_the_base_classes_is_a_family() -> None:
    modules = {path.stem for path in MODULES.glob("*.py")}
    assert modules - {"__init__", "base", "gradient_base"} == NAMES


def test_each_template_is_a_family_of_its_name() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.cuh")} <= NAMES


def test_what_families_share_registers_none() -> None:
    for path in (MODULES / "common").glob("*.py"):
        assert "register_" not in path.read_text(encoding="utf-8"), path.name
