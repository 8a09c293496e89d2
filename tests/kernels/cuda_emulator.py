"""Runs the real device code of csrc/cuda on the CPU, and checks every access to memory.

The headers are copied and their two constructs that are not C++ are rewritten: inline PTX becomes
calls of emulator/instructions.hpp, shared memory becomes calls of emulator/runtime.hpp. The rest is
compiled as it stands, and launched through the library's own Python launcher. What counts as an
error is listed in emulator/runtime.cpp.

To emulate another family: give `Emulator.build` the generated sources of its kernels, and write
the PTX instructions that it uses, and that are not there yet, into emulator/instructions.hpp.
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import mmap
import re
import subprocess
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar
from unittest import mock

from torch import Tensor

from ksopt import settings
from ksopt.epilogue import After
from ksopt.jit import driver, nvrtc
from ksopt.kernels.launcher import _PythonLauncher
from ksopt.kernels.problem import Geometry, Problem

Case, Kernel = TypeVar("Case"), TypeVar("Kernel")

_HERE = Path(__file__).parent / "emulator"
_RUNTIME_COMMAND = [
    settings.cxx_compiler(),
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",  # its checks take a jump to another stack for an error
    "-fno-gnu-unique",  # libraries with such a symbol stay loaded
]
_DEVICE_COMMAND = [
    settings.cxx_compiler(),
    "-std=c++20",
    "-O1",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fsanitize=thread,alignment,bounds",
    "-fno-tree-loop-distribute-patterns",  # no memcpy instead of the loads and stores to be checked
    "-Wno-unknown-pragmas",
]


class EmulationError(AssertionError):
    """Device code did what it must not; the message says what, and where."""


class TranslationError(ValueError):
    """Device code uses a construct that the emulator does not know."""


@dataclass(frozen=True)
class Instance:
    """One kernel to compile.

    Attributes:
        problem: what it computes.
        source: the generated file, as the kernel's family writes it.
        geometry: how it is launched.
    """

    problem: Problem
    source: str
    geometry: Geometry


class _Range(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_size_t), ("end", ctypes.c_size_t)]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes from the first to the last element; what lies between counts as inside."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), reach * tensor.element_size()


class _Apart:
    """A copy of some bytes, as aligned as they are, far from all other operands: what a kernel
    reads or writes beside it is nobody's."""

    _GAP, _LINE = 1 << 20, 256

    def __init__(self, address: int, size: int) -> None:
        # Mapped: what nobody touches is not even cleared.
        room = size + 2 * self._GAP + self._LINE
        self._memory = (ctypes.c_char * room).from_buffer(mmap.mmap(-1, room))
        middle = ctypes.addressof(self._memory) + self._GAP
        self.at = middle + (address - middle) % self._LINE
        self.bytes = size
        self.range = _Range(self.at, self.at + size)
        ctypes.memmove(self.at, address, size)


class _Together:
    """Copies of several tensors in one range, as aligned as they are, with NaN between them."""

    _GAP = 512

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        extents = [_extent(tensor) for tensor in tensors]
        places, end = [], 0
        for address, size in extents:
            end += self._GAP - end % self._GAP if end else 0
            places.append(end + address % 256)
            end = places[-1] + size
        self._memory = ctypes.create_string_buffer(b"\xff" * (end + 256), end + 256)
        first = ctypes.addressof(self._memory)
        first += -first % 256
        self.at = [first + place for place in places]
        for at, (address, size) in zip(self.at, extents, strict=True):
            ctypes.memmove(at, address, size)
        self.range = _Range(self.at[0], self.at[-1] + extents[-1][1])


class EmulatedKernel:
    """A compiled instance: called with (x, weight) on the CPU, it returns y."""

    def __init__(self, library: Path, loaded: ctypes.CDLL, index: int, instance: Instance) -> None:
        self._library = library
        self._loaded = loaded
        self._index = index
        self.instance = instance

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        seed: int = 0,
        out: Tensor | None = None,
        settled: bool = False,
    ) -> Tensor:
        """Compute y through ``ksopt.kernels.launcher``.

        Args:
            x: (*batch, N), or (N, *batch) for batch last; on the CPU.
            weight: (a, b, c, d).
            seed: order in which blocks and threads run; 0 is ascending.
            out: where y goes; the kernel may read what is there, and leave it. None for new memory,
                all of which it must write.
            settled: whether the kernel may read the weight before it waits for the one ahead.

        Raises:
            EmulationError: an access or a wait was wrong.
        """
        y: Tensor = self._run(
            lambda launcher: launcher(x, weight, out), x, (weight,), seed, out, settled
        )
        return y

    def with_epilogue(
        self, x: Tensor, weight: Tensor, after: After, seed: int = 0
    ) -> Tensor | None:
        """The result of a kernel with an epilogue, through ``Launcher.with_epilogue``."""
        summands = [one for one in (after.bias, after.residual) if one is not None]
        return self._run(
            lambda launcher: launcher.with_epilogue(x, weight, after),
            *(x, (weight, *summands), seed, None),
        )

    def packed(self, weight: Tensor, seed: int = 0) -> Tensor:
        """What a kernel that packs weights makes of one, through ``Launcher.packed``."""
        packed: Tensor = self._run(
            lambda launcher: launcher.packed(weight), None, (weight,), seed, None
        )
        return packed

    def _run(
        self,
        call: Callable[[_PythonLauncher], Any],
        x: Tensor | None,
        read: Sequence[Tensor],
        seed: int,
        out: Tensor | None,
        settled: bool = False,
    ) -> Any:
        """What a launcher returns that runs the kernel.

        Args:
            x: None for a kernel that packs.
            read: the weight, and the summands.
        """
        problem = self.instance.problem
        of_result = read[0] if x is None else x
        size = 4 if problem.epilogue.in_float32 else of_result.element_size()
        y_row_bytes = problem.pattern.out_features * size

        def launch(
            kernel: int,
            blocks: int,
            threads: int,
            shared_bytes: int,
            arguments: Any,
            device: int,
            early: bool = False,
        ) -> None:
            y_address = arguments.y
            near_x = _Apart(*((0, 0) if x is None else _extent(x)))
            near_y = _Apart(y_address, arguments.batch * y_row_bytes)
            names = ["weight", *(one for one in ("bias", "residual") if getattr(arguments, one))]
            places = [getattr(arguments, one) for one in ("x", *names)]
            operands = [None if one is None else one.data_ptr() for one in (x, *read)]
            assert places == operands, (
                "the launcher laid an operand out again: give the emulator what needs no copy"
            )
            arguments.x, arguments.y = near_x.at, near_y.at
            near_weight: Any
            if len(read) == 1:
                near_weight = _Apart(*_extent(read[0]))
                arguments.weight = near_weight.at
            else:
                near_weight = _Together(read)
                for name, at in zip(names, near_weight.at, strict=True):
                    setattr(arguments, name, at)
            message = ctypes.create_string_buffer(2048)
            self._loaded.emulate_updates(out is not None)
            self._loaded.emulate_settled(settled)
            arguments.weight_is_settled = settled
            status = self._loaded.emulate_launch(
                kernel,
                ctypes.byref(arguments),
                ctypes.c_size_t(ctypes.sizeof(arguments)),
                blocks,
                threads,
                ctypes.c_size_t(shared_bytes),
                seed,
                ctypes.byref(near_x.range),
                ctypes.byref(near_weight.range),
                ctypes.byref(near_y.range),
                message,
                ctypes.c_size_t(len(message)),
            )
            if status != 0:
                raise EmulationError(self._with_places(message.value.decode()))
            ctypes.memmove(y_address, near_y.at, near_y.bytes)

        launcher = _PythonLauncher(self.instance.problem, self.instance.geometry, self._index, None)
        with mock.patch.object(driver, "launch", launch):
            return call(launcher)

    def launched_as(self, geometry: Geometry) -> EmulatedKernel:
        """The same kernel with another launch, for example with fewer blocks."""
        instance = replace(self.instance, geometry=geometry)
        return EmulatedKernel(self._library, self._loaded, self._index, instance)

    def _with_places(self, message: str) -> str:
        """Replace addresses in the library by file and line, where addr2line is installed."""

        def place(matched: re.Match[str]) -> str:
            try:
                done = subprocess.run(
                    ["addr2line", "-s", "-e", str(self._library), matched[1]],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=True,
                )
            except (OSError, subprocess.SubprocessError):
                return matched[1]
            return done.stdout.strip()

        return re.sub(r"\{\+(0x[0-9a-f]+)\}", place, message)


def compile_runtime(path: Path) -> None:
    """Compile what every emulated kernel is linked with, to an object file."""
    _run([*_RUNTIME_COMMAND, "-c", str(_HERE / "runtime.cpp"), "-o", str(path)])


def precompile_headers(folder: Path) -> None:
    """Compile what every kernel's file begins with: most of the time of a small kernel.

    g++ takes it in the place of device.hpp; clang++ reads device.hpp as ever.
    """
    folder.mkdir()
    object_file = folder / "device.hpp.gch"
    _run([*_DEVICE_COMMAND, "-x", "c++-header", str(_HERE / "device.hpp"), "-o", str(object_file)])


class Emulator:
    """Builds kernels for the CPU.

    Args:
        folder: for files; each build gets a folder inside.
        runtime: what `compile_runtime` has made.
        headers: the folder that `precompile_headers` has made.
        jobs: compilers that run at a time; a build of several kernels is spread over them.
    """

    def __init__(self, folder: Path, runtime: Path, headers: Path, jobs: int) -> None:
        self._folder = folder
        self._jobs = jobs
        self._builds = 0
        self._runtime = runtime
        self._headers = headers

    def build(
        self,
        instances: Sequence[Instance],
        edit: Callable[[str, str], str] = lambda name, text: text,
    ) -> list[EmulatedKernel]:
        """Compile kernels; several may have one name.

        Args:
            instances: the kernels.
            edit: makes a header's text another one, by its name in an include: to prove that the
                emulator finds faults.

        Raises:
            TranslationError: a header or source uses what the emulator does not know.
            RuntimeError: it does not compile; carries the compiler's words.
        """
        folder = self._folder / str(self._builds)
        self._builds += 1
        folder.mkdir()
        # Only what the sources include: another family's header may use what is not emulated.
        headers = nvrtc._reachable_headers("\n".join(instance.source for instance in instances))
        for header, body in headers.items():
            text = translate(edit(header, body), header)
            (folder / header).parent.mkdir(exist_ok=True)
            (folder / header).write_text(text, encoding="utf-8")
        jobs = min(self._jobs, len(instances))
        shares = [instances[job::jobs] for job in range(jobs)]
        with ThreadPoolExecutor(jobs) as pool:
            built = list(pool.map(partial(self._build_share, folder), range(jobs), shares))
        return [built[at % jobs][at // jobs] for at in range(len(instances))]

    def on_demand(
        self,
        instances: Sequence[Instance],
        edit: Callable[[str, str], str] = lambda name, text: text,
    ) -> OnDemand[Instance, EmulatedKernel]:
        """The kernels of a sweep, of which few may be run: see `build` and `OnDemand`."""
        return OnDemand(lambda group: self.build(group, edit), instances)

    def _build_share(
        self, folder: Path, job: int, instances: Sequence[Instance]
    ) -> list[EmulatedKernel]:
        unit, library = folder / f"kernels{job}.cpp", folder / f"kernels{job}.so"
        unit.write_text(_unit(instances), encoding="utf-8")
        object_file = unit.with_suffix(".o")
        places = [f"-I{one}" for one in (self._headers, _HERE, folder)]
        _run([*_DEVICE_COMMAND, *places, "-c", str(unit), "-o", str(object_file)])
        # The sanitizers' libraries are left out: their calls come to runtime.cpp.
        _run(
            [
                settings.cxx_compiler(),
                "-shared",
                str(object_file),
                str(self._runtime),
                "-o",
                str(library),
            ]
        )
        loaded = ctypes.CDLL(str(library))
        # Threads and shared memory are the library's own, and are as large as a GPU's.
        weakref.finalize(loaded, _ctypes.dlclose, loaded._handle)
        return [EmulatedKernel(library, loaded, at, one) for at, one in enumerate(instances)]


class OnDemand(Generic[Case, Kernel]):
    """Kernels that are built in groups, each when the first of it is requested.

    ``make test`` runs every twentieth case of a sweep, which are a group, and the last, which is
    one by itself. The others follow each other in groups.
    """

    _APART, _TOGETHER = 20, 8

    def __init__(
        self, build: Callable[[Sequence[Case]], Sequence[Kernel]], cases: Sequence[Case]
    ) -> None:
        self._build = build
        self._cases = cases
        self._built: dict[int, Kernel] = {}

    def __getitem__(self, at: int) -> Kernel:
        if at not in self._built:
            group = self._group(at)
            kernels = self._build([self._cases[one] for one in group])
            self._built.update(zip(group, kernels, strict=True))
        return self._built[at]

    def _group(self, at: int) -> Sequence[int]:
        last = len(self._cases) - 1
        if at == last:
            return [last]
        if at % self._APART == 0:
            return range(0, last, self._APART)
        others = [one for one in range(last) if one % self._APART]
        first = others.index(at) // self._TOGETHER * self._TOGETHER
        return others[first : first + self._TOGETHER]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[:8000]}")


def _cluster(source: str) -> int:
    """Blocks of the kernel's clusters."""
    matched = re.search(r"__cluster_dims__\((\d+), 1, 1\)", source)
    return 1 if matched is None else int(matched[1])


def _arguments(source: str) -> str:
    """The type of what the kernel is launched with."""
    matched = re.search(r"\(const __grid_constant__ (\w+) ", source)
    return "Arguments" if matched is None else matched[1]


def _unit(instances: Sequence[Instance]) -> str:
    """The file that instantiates every kernel, each in a namespace of its own."""
    includes: dict[str, None] = {}
    bodies, table = [], []
    for index, instance in enumerate(instances):
        includes |= dict.fromkeys(re.findall(r"^#include .*$", instance.source, re.MULTILINE))
        body = re.sub(r"^#include .*$", "", instance.source, flags=re.MULTILINE)
        matched = re.search(r'extern "C" __global__[^{]*?(\w+)\(const', body)
        if matched is None:
            raise TranslationError('the source has no extern "C" __global__ kernel')
        taken = _arguments(body)
        body = translate(body, f"kernel {index}").replace('extern "C" ', "static ")
        bodies.append(f"namespace instance_{index} {{\n{body}}}\n")
        table.append(
            f'    {{"{matched[1]}", {_cluster(instance.source)}, [](const void* arguments) {{\n'
            f"       instance_{index}::{matched[1]}(*static_cast<const {taken}*>(arguments));\n"
            "     }},\n"
        )
    return (
        '#include "device.hpp"\n'
        + "".join(line + "\n" for line in includes)
        + "".join(bodies)
        + 'extern "C" const emulate::Kernel emulated_kernels[] = {\n'
        + "".join(table)
        + "};\n"
        + f'extern "C" const int emulated_kernel_count = {len(instances)};\n'
    )


def translate(text: str, name: str) -> str:
    """Rewrite inline PTX and shared memory as C++, keeping every line where it is.

    Raises:
        TranslationError: a statement has a form that is not known, or accesses memory where the
            compiler may move it: its assembly is not volatile.
    """
    text = re.sub(
        r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w: ]+?)\s+(\w+)\[\]\s*;",
        r"\1* const \2 = static_cast<\1*>(emulate::dynamic_shared());",
        text,
    )
    text = re.sub(
        r"__shared__\s+(?:__align__\((\d+)\)\s+)?([\w:<>, ]+?)\s+(\w+)((?:\[[^;]*?\])*)\s*;",
        lambda m: (
            f"auto& {m[3]} = *static_cast<std::remove_reference_t<{m[2]}{m[4]}>*>("
            f"emulate::static_shared(sizeof({m[2]}{m[4]}), {m[1] or f'alignof({m[2]})'}));"
        ),
        text,
    )
    if re.search(r"__shared__", re.sub(r"//.*", "", text)):
        raise TranslationError(f"{name}: a declaration of shared memory has an unknown form")
    return _translate_assembly(text, name)


def _translate_assembly(text: str, name: str) -> str:
    pieces, at = [], 0
    for begin in re.finditer(r'\basm\b\s*(?:volatile)?\s*\((?=\s*")', text):
        end = _closing(text, begin.end())
        statement = text[begin.start() : end]
        if "volatile" not in begin[0] and "[%" in statement:
            raise TranslationError(f"{name}: this accesses memory and is not volatile: {statement}")
        calls = _calls(text[begin.end() : end - 1], name)
        pieces += [text[at : begin.start()], calls, "\n" * statement.count("\n")]
        at = end
        while text[at] in " \n":
            at += 1
        if text[at] != ";":
            raise TranslationError(f"{name}: an asm statement does not end with ';'")
        at += 1
    return "".join(pieces) + text[at:]


def _calls(statement: str, name: str) -> str:
    """The calls for one statement's instructions, given what is between its parentheses."""
    sections = _split(statement, ":")
    template = "".join(_strings(sections[0])).replace("\\n", "").replace("\\t", "")
    operands = []
    for section in sections[1:3]:
        for operand in _split(section, ",") if section.strip() else []:
            matched = re.fullmatch(r'\s*"[=+]?\w"\s*\((.*)\)\s*', operand, re.DOTALL)
            if matched is None:
                raise TranslationError(f"{name}: operand {operand.strip()!r} has an unknown form")
            operands.append(" ".join(matched[1].split()))
    calls = []
    for instruction in filter(None, (part.strip() for part in template.split(";"))):
        mnemonic, _, rest = instruction.partition(" ")
        function = re.sub(r"[^A-Za-z0-9_]+", "_", mnemonic)
        # What is not known is an error where it runs: other kernels can be emulated all the same.
        if not re.fullmatch(r"[a-z][\w.:]*", mnemonic):
            return f'emulate::fail("{name}: predicates and PTX declarations are not emulated");'
        if function not in _known_instructions():
            return f'emulate::fail("{name}: {mnemonic} is not in emulator/instructions.hpp");'
        words = [word.strip(" []{}") for word in rest.split(",")] if rest.strip() else []
        words = [word for word in words if word != "_"]  # a destination that nobody reads
        values = [operands[int(word[1:])] if word.startswith("%") else word for word in words]
        calls.append(f"emulate::ptx::{function}({', '.join(values)});")
    return " ".join(calls)


@functools.cache
def _known_instructions() -> frozenset[str]:
    text = (_HERE / "instructions.hpp").read_text(encoding="utf-8")
    return frozenset(
        re.findall(r"(?:INSTRUCTION void |^inline void |^[A-Z_0-9]+\()(\w+)", text, re.MULTILINE)
    )


def _strings(text: str) -> list[str]:
    return re.findall(r'"((?:[^"\\]|\\.)*)"', text)


def _closing(text: str, start: int) -> int:
    """Index after the parenthesis that closes one opened before ``start``."""
    depth, at = 1, start
    while depth:
        if text[at] == '"':
            at = _after_string(text, at)
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at


def _after_string(text: str, at: int) -> int:
    matched = re.compile(r'"(?:[^"\\]|\\.)*"').match(text, at)
    assert matched is not None
    return matched.end()


def _split(text: str, separator: str) -> list[str]:
    """Split at ``separator`` where it is in no string and in no parentheses."""
    parts, depth, at, start = [], 0, 0, 0
    while at < len(text):
        if text[at] == '"':
            at = _after_string(text, at)
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
        if text[at] == separator and depth == 0:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    return [*parts, text[start:]]
