"""Build and load the C++ host library (csrc/host): built by ninja on first use, then cached."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path

import torch

from ksopt import settings
from ksopt.errors import CompilationError, KsoptError, UnavailableError
from ksopt.jit.cache import Artifact, ArtifactKey, find, get, store_root
from ksopt.system import child_processes, ownership

# The oldest torch whose stable ABI the library may use: one binary then serves all later ones.
_ABI_TARGET = "0x020b000000000000"  # 2.11


_loading = threading.Lock()
_followers: list[Callable[[], None]] = []


def load() -> str | None:
    """Build if needed and load the library that registers ``torch.ops.ksopt_host``.

    Returns:
        None once the library is loaded; otherwise the reason why not, as a sentence. The caller
        then launches from Python: same results, more host time per call. The reason is also
        reported once as a warning. Threads that load at once wait for the first of them.
    """
    with _loading:
        return None if is_loaded() else _load()


def load_built() -> bool:
    """Load the library if it was built before, which takes milliseconds; nothing is compiled.

    Returns:
        Whether it is loaded.
    """
    with _loading:
        return is_loaded() or _load_built()


@functools.cache
def _load_built() -> bool:
    if not (store_root() / _ARCH).is_dir():
        return False
    try:
        artifact = find(_key(settings.cxx_compiler(), _sources(), _flags()))
        if artifact is None or artifact.path is None:
            return False
        torch.ops.load_library(str(artifact.path))
    except (KsoptError, OSError):
        return False
    _follow()
    return True


def is_loaded() -> bool:
    """Whether this process has the operators, from any file: a second library would crash it."""
    return hasattr(torch.ops.ksopt_host, "launch")


@functools.cache
def _load() -> str | None:
    try:
        artifact = build()
        if artifact.path is not None:
            torch.ops.load_library(str(artifact.path))
        else:
            _load_from_memory(artifact.data)
    except (KsoptError, OSError) as error:
        reason = f"The C++ launcher is not available: {error}"
        warnings.warn(
            f"ksopt: {reason} Kernels are launched from Python, which costs some microseconds a "
            "call. `ksopt doctor` says how to fix it.",
            RuntimeWarning,
            stacklevel=2,
        )
        return reason
    _follow()
    return None


def when_loaded(follower: Callable[[], None]) -> None:
    """Call a function once the library is loaded: at once if it is, else after it was.

    Args:
        follower: takes the library into use; the first of them comes first.
    """
    with _loading:
        if is_loaded():
            follower()
        else:
            _followers.append(follower)


def _follow() -> None:
    while _followers:
        _followers.pop(0)()


def build() -> Artifact:
    """Compile the host library, or take it from the cache.

    Raises:
        UnavailableError: no C++ compiler or no ninja on this machine.
        CompilationError: the compiler failed; carries its output.
    """
    compiler = settings.cxx_compiler()
    sources, flags = _sources(), _flags()
    key = _key(compiler, sources, flags)
    return get(key, lambda: _compile(compiler, sources, flags))


_ARCH = f"host-{platform.machine()}"


def _key(compiler: str, sources: Mapping[str, str], flags: list[str]) -> ArtifactKey:
    # Where torch lies is left out: environments that have the same torch share the library.
    words = " ".join([*flags, *_libraries()]).replace(str(Path(torch.__file__).parent), "torch")
    parts = {
        **sources,
        "flags": words,
        "compiler": compiler_version(compiler),
        "torch": f"{torch.__version__} {torch.version.git_version}",
    }
    return ArtifactKey.of(_ARCH, "ksopt_host.so", parts)


def compiler_version(compiler: str) -> str:
    """First line of ``compiler --version``.

    Raises:
        UnavailableError: there is no such program, or it does not answer.
    """
    if shutil.which(compiler) is None:
        raise UnavailableError(
            f"no C++ compiler: {compiler!r} was not found. Install g++ or clang++, or name one in "
            "the environment variable CXX."
        )
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"the C++ compiler {compiler!r} does not work: {error}") from error
    return done.stdout.splitlines()[0] if done.stdout else compiler


def ninja_program() -> str:
    """Path of ninja: the Python package's, else the system's.

    Raises:
        UnavailableError: neither is there.
    """
    try:
        import ninja

        packaged = Path(ninja.BIN_DIR) / "ninja"
        if packaged.exists():
            return str(packaged)
    except ImportError:
        pass
    path = shutil.which("ninja")
    if path is None:
        raise UnavailableError("ninja was not found. Install the Python package ninja.")
    return path


def _sources() -> dict[str, str]:
    """The files of csrc/host by name."""
    folder = resources.files("ksopt.csrc") / "host"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith((".cpp", ".hpp")))
    return {name: (folder / name).read_text(encoding="utf-8") for name in names}


def _flags() -> list[str]:
    torch_folder = Path(torch.__file__).parent
    return [
        "-O2",
        "-std=c++20",
        "-fPIC",
        f"-DTORCH_TARGET_VERSION={_ABI_TARGET}",
        "-DAT_PER_OPERATOR_HEADERS",  # torch's own headers then include the operators they need
        f"-isystem{torch_folder / 'include'}",
    ]


def _libraries() -> list[str]:
    torch_folder = Path(torch.__file__).parent
    return [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl"]


def _compile(compiler: str, sources: dict[str, str], flags: list[str]) -> bytes:
    with ownership.temporary_folder("ksopt-build-") as name:
        folder = Path(name)
        for file, text in (sources | _units(sources)).items():
            (folder / file).write_text(text, encoding="utf-8")
        rules = _rules(compiler, list(_units(sources)), flags)
        (folder / "build.ninja").write_text(rules, encoding="utf-8")
        try:
            done = subprocess.run(
                child_processes.program([ninja_program(), "-C", name]),
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            child_processes.end_all_in(folder)
        if done.returncode != 0:
            raise CompilationError(
                f"the host library does not compile with {compiler}: {done.stdout[-2000:]}"
            )
        return (folder / "ksopt_host.so").read_bytes()


def _units(sources: Mapping[str, str]) -> dict[str, str]:
    """The compiled units: each file of the stable ABI, and all files that use ATen as one.

    ATen's headers take longer than what is ours: together 18 s of a core, one by one 42.
    """
    files = {name: text for name, text in sources.items() if name.endswith(".cpp")}
    units = {name: text for name, text in files.items() if "torch/csrc/stable/" in text}
    included = "".join(f'#include "{name}"\n' for name in files if name not in units)
    return units | ({"with_aten.cpp": included} if included else {})


def _rules(compiler: str, units: Sequence[str], flags: list[str]) -> str:
    """The ninja rules: each file by itself, in parallel, then one library."""

    def quoted(words: list[str]) -> str:
        return " ".join(map(_ninja_quote, words))

    files = [name.removesuffix(".cpp") for name in units]
    return "\n".join(
        [
            *("rule object", f"  command = {quoted([compiler])} -c $in -o $out {quoted(flags)}"),
            "rule library",
            f"  command = {quoted([compiler])} -shared $in -o $out {quoted(_libraries())}",
            *(f"build {name}.o: object {name}.cpp" for name in files),
            f"build ksopt_host.so: library {' '.join(f'{name}.o' for name in files)}\n",
        ]
    )


def _ninja_quote(word: str) -> str:
    """Protect a word from ninja's variables and from the shell that ninja starts."""
    shell = "'" + word.replace("'", "'\\''") + "'" if not word.isidentifier() else word
    return shell.replace("$", "$$")


def _load_from_memory(data: bytes) -> None:
    """Load a library that the cache could not store, from a private temporary file."""
    with ownership.temporary_folder("ksopt-host-") as name:
        path = Path(name) / "ksopt_host.so"
        path.write_bytes(data)
        torch.ops.load_library(str(path))  # stays mapped after the file is gone
