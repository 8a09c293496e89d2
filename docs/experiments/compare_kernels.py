"""Compares the kernels of two versions on the same problems: predictions and machine code.

    git worktree add /tmp/before cc24f4c
    python docs/experiments/compare_kernels.py /tmp/before .

Of the families of factors, on `--patterns` of the paper's in three dtypes and both layouts: whether
each predicts the same tile to be its fastest, and the same time; and, of three patterns, whether a
kernel of each has the same machine code; and one with an epilogue, of the families that take one.
Of the families of chains: whether the kernels of some layers and MLPs have, those that pack their
weights too; of the families of gradients, whether the first and the last launch of some problems
have, those that pack and add too, where both versions have such families (since 6c127f0). Needs
NVRTC, and no GPU. Names of functions and types are no machine code.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from versions.running import Version

PATTERNS = ("(4,64,64,4)", "(1,128,96,1)", "(3,40,48,16)")
DTYPES = ("float32", "float16", "bfloat16")
# Chain, activation, residual, siblings, dtype, batch last; three tiles of each family are compared.
LAYERS: tuple[tuple[str, Any, bool, int, str, bool], ...] = (
    ("(1,192,64,2)*(2,64,768,1)", "none", False, 1, "bfloat16", False),
    ("(1,768,64,2)*(2,64,192,1)", "gelu", False, 1, "float16", False),
    ("(1,192,64,2)*(2,64,192,1)", "none", False, 3, "bfloat16", False),
    ("(1,96,32,2)*(2,32,96,1)", "gelu", True, 3, "bfloat16", False),
    ("(1,768,64,2)*(2,64,192,1)", "silu_gate", True, 2, "bfloat16", False),
    ("(1,40,24,2)*(3,16,40,1)", "relu", True, 1, "float32", True),
    ("(1,24,16,4)*(2,16,12,2)*(2,24,32,1)", "none", False, 1, "float16", False),
)
MLPS = (
    ("(1,768,64,2)*(2,64,192,1)", "(1,192,64,2)*(2,64,768,1)"),
    ("(1,32,16,4)*(2,32,32,1)", "(1,16,16,4)*(2,32,64,1)"),
)
# Kind, factors, with bias, siblings, activation.
GRADIENTS: tuple[tuple[Any, str, bool, int, Any], ...] = (
    ("weight", "(1,768,64,2)", True, 1, "none"),
    ("weight", "(4,64,64,16)", False, 1, "none"),
    ("weight", "(3,40,48,8)", True, 1, "none"),
    ("chain_weights", "(1,192,64,2)*(2,64,768,1)", True, 1, "none"),
    ("chain_weights", "(1,192,64,2)*(2,64,192,1)", False, 3, "none"),
    ("chain_weights", "(1,136,72,2)*(2,72,264,1)", True, 1, "none"),
    ("chain_input", "(1,192,64,2)*(2,64,192,1)", False, 1, "none"),
    ("chain_input", "(1,192,64,2)*(2,64,192,1)", False, 3, "none"),
    ("chain_input", "(1,192,64,2)*(2,64,768,1)*(1,768,64,2)", False, 1, "gelu"),
)
ROWS = 25_088
FEW_ROWS = 64  # of families that take no more than a few hundred
_CODE_SECTION = ".text"


def code_of(cubin: bytes) -> list[str]:
    """The machine code of a cubin, a 64-bit ELF file: the sections named ``.text``, as hex."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    count, names_at = struct.unpack_from("<HH", cubin, 0x3C)
    # Of each: name, type, flags, address, offset, size.
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * at) for at in range(count)]
    names = cubin[sections[names_at][4] :]

    def is_code(section: tuple[int, ...]) -> bool:
        return names[section[0] :].startswith(_CODE_SECTION.encode())

    return [cubin[one[4] : one[4] + one[5]].hex() for one in sections if is_code(one)]


def chain_launchers(device: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """What loads the kernels of three tiles of each family of chains, of the imported version."""
    from ksopt.kernels.families.base import families
    from ksopt.kernels.problem import Epilogue, Problem, SecondLayer
    from ksopt.patterns.chain import Chain

    problems = [
        Problem(Chain.parse(text), dtype, last, True, Epilogue(True, activation, added), siblings)
        for text, activation, added, siblings, dtype, last in LAYERS
    ]
    for texts in MLPS:
        up, down = map(Chain.parse, texts)
        second = SecondLayer(down, Epilogue(True, "none", True))
        problems.append(Problem(up, "bfloat16", False, True, Epilogue(True, "gelu"), second=second))
    for problem in problems:
        for family in families():
            takes = family.takes_mlps if problem.second is not None else family.takes_chains
            if not takes or family.unsupported_reason(problem, device) is not None:
                continue
            tiles = family.configs(problem, device)
            fitting = [one for one in tiles if family.fits(problem, one, device)]
            for tile in fitting[:3]:
                yield f"{problem} {family.name}", partial(family.launcher, problem, tile, 0)


def gradient_launchers(device: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """What loads the kernels of two launches of each family of gradients, as above."""
    from ksopt.kernels.families.gradient_base import GradientProblem, gradient_families
    from ksopt.patterns.chain import Chain

    for kind, text, *others in GRADIENTS:
        problem = GradientProblem(kind, Chain.parse(text).patterns, "bfloat16", *others)
        for family in gradient_families(kind):
            if family.unsupported_reason(problem, device) is None:
                several = (family.launches(problem, rows, device) for rows in (ROWS, FEW_ROWS))
                launches = next(filter(None, map(list, several)))
                for launch in dict.fromkeys((launches[0], launches[-1])):
                    yield f"{problem} {family.name}", partial(family.launcher, problem, launch, 0)


def loaded_code(
    launchers: Iterable[tuple[str, Callable[[], object]]], device: Any
) -> dict[str, list[str]]:
    """The machine code of the kernels that are loaded, each by a name and its number."""
    from ksopt.jit import arch, driver, nvrtc
    from ksopt.kernels.problem import DeviceSpec

    code: dict[str, list[str]] = {}
    cubins: list[bytes] = []
    compile_to_cubin = nvrtc.cubin

    def compiled(source: str, _: str) -> Any:
        cubin = compile_to_cubin(source, "sm_90a")
        cubins.append(cubin.data)
        return cubin

    with (
        mock.patch.object(nvrtc, "cubin", compiled),
        mock.patch.object(arch, "of_device", return_value="sm_90a"),
        mock.patch.object(driver, "load_kernel", return_value=1),
        mock.patch.object(DeviceSpec, "of_device", return_value=device),
    ):
        for case, load in launchers:
            cubins.clear()
            load()
            code |= {f"{case} {len(code) + at}": code_of(one) for at, one in enumerate(cubins)}
    return code


def described(patterns: list[str]) -> dict[str, Any]:
    """The predictions and the machine code of the imported version."""
    from ksopt.jit import nvrtc
    from ksopt.kernels.families.base import TemplateFamily, families
    from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem
    from ksopt.patterns.chain import Pattern

    device = DeviceSpec((9, 0), 132, 228 * 1024)
    factors = [one for one in families() if not one.takes_chains]

    def cases(texts: list[str]) -> Iterator[tuple[str, Any, Any]]:
        for text in texts:
            for dtype in DTYPES:
                for last in (False, True):
                    problem = Problem.of_factor(Pattern.parse(text), dtype, last, True)
                    for family in factors:
                        if family.unsupported_reason(problem, device) is None:
                            yield f"{text} {dtype} {last} {family.name}", problem, family

    predicted, code, with_epilogue = {}, {}, {}
    for case, problem, family in cases(patterns):
        times = [
            (family.predicted_us(problem, tile, ROWS, device), at, dataclasses.astuple(tile))
            for at, tile in enumerate(family.configs(problem, device))
        ]
        predicted[case] = repr(min(times, default=None))
    for case, problem, family in cases(list(PATTERNS)):
        tiles = [
            one for one in family.configs(problem, device) if family.fits(problem, one, device)
        ]
        if isinstance(family, TemplateFamily) and tiles:
            for at, source in enumerate(family.sources(problem, tiles[0])):
                code[f"{case} {at}"] = code_of(nvrtc.cubin(source, "sm_90a").data)
            if getattr(family, "takes_epilogues", False):  # since eca76806
                both = dataclasses.replace(problem, epilogue=Epilogue(True, "gelu", True))
                source = family.source(both, tiles[0])
                with_epilogue[case] = code_of(nvrtc.cubin(source, "sm_90a").data)
    results: dict[str, Any] = {
        "predictions": predicted,
        "machine code of factors": code,
        "machine code of factors with an epilogue": with_epilogue,
        "machine code of chains": loaded_code(chain_launchers(device), device),
    }
    if importlib.util.find_spec("ksopt.kernels.families.gradient_base"):
        code = loaded_code(gradient_launchers(device), device)
        results["machine code of gradients"] = code
    return results


def main(arguments: list[str] | None = None) -> int:
    """Compare, and print what differs; 1 if anything does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout of the version before")
    parser.add_argument("now", type=Path, help="a checkout of the version now")
    parser.add_argument("--patterns", type=int, default=60, help="of the paper's (%(default)s)")
    options = parser.parse_args(arguments)
    from ksopt.bench.paper_patterns import stratified_sample

    sample = json.dumps([str(one) for one in stratified_sample(options.patterns, seed=0)])
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("before", "now"):
            home = Path(folder) / name
            home.mkdir()
            version = Version(name, getattr(options, name), home)
            version.lay_out()
            path = os.pathsep.join(map(str, (version.package, Path(__file__).parent)))
            more = {
                "KERNELS_OF": sample,
                "PYTHONPATH": path,
                "KSOPT_CACHE_DIR": str(home / "cache"),
            }
            command = [sys.executable, "-P", "-m", "compare_kernels"]
            ran = subprocess.run(command, env=os.environ | more, stdout=subprocess.PIPE, check=True)
            results.append(json.loads(ran.stdout))
    different = False
    for what in (one for one in results[0] if one in results[1]):
        before, now = (one[what] for one in results)
        cases = sorted({*before, *now})
        others = [case for case in cases if before.get(case) != now.get(case)]
        print(f"{what}: {len(cases) - len(others)} of {len(cases)} equal")
        for case in others:
            print(f"- {case}")
        different = different or bool(others)
    return int(different)


if __name__ == "__main__":
    if "KERNELS_OF" in os.environ:  # one version's process
        print(json.dumps(described(json.loads(os.environ["KERNELS_OF"]))))
    else:
        sys.exit(main())
