"""Advice for the user about this machine.

`ksopt.doctor.machine` collects the facts; `advise` turns them into sentences and reads nothing
else, so that tests can check its advice for any machine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from ksopt import settings
from ksopt.doctor.machine import Device, Facts, examine
from ksopt.report import tables
from ksopt.system.plurals import counted

_REQUIRED = ("torch", "optuna", "pandas", "rich")
_OLDEST_TORCH = (2, 11)
_OLDEST_CAPABILITY = (8, 0)  # Ampere: the first with bf16 tensor cores and asynchronous copies


@dataclass(frozen=True)
class Advice:
    """One or two sentences of advice for the user.

    Args:
        level: ``broken`` (ksopt cannot do its work), ``slow`` (it works, slower than it could),
            ``note`` (worth knowing).
        text: The sentences.
        remedy: The action to take, in a few words; empty if there is none.
    """

    level: Literal["broken", "slow", "note"]
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The facts about a machine and the advice that follows from them."""

    facts: Facts
    advice: tuple[Advice, ...]

    @property
    def is_broken(self) -> bool:
        """Whether a fact prevents ksopt from working at all."""
        return any(a.level == "broken" for a in self.advice)

    @property
    def verdict(self) -> str:
        """The state of the machine, with the first action to take if there is one.

        Example:
            >>> diagnosis = Diagnosis(examine(), (Advice("slow", "...", "pip install ninja"),))
            >>> diagnosis.verdict
            'ready, but slower than it could be: pip install ninja'
        """
        first = next((advice for advice in self.advice if advice.level != "note"), None)
        if first is None:
            return "ready"
        state = "not ready" if self.is_broken else "ready, but slower than it could be"
        return f"{state}: {first.remedy}"

    def to_json(self) -> dict[str, object]:
        """The diagnosis as plain values for ``json.dumps``."""
        return {"verdict": self.verdict, **dataclasses.asdict(self)}


def diagnose() -> Diagnosis:
    """Examine this machine and return the diagnosis.

    Example:
        >>> diagnose().is_broken
        False
    """
    facts = examine()
    return Diagnosis(facts, advise(facts))


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Write the facts, the advice and, on the last line, the verdict to stdout."""
    tables.write(tables.of(("what", "found"), _rows(diagnosis.facts)))
    print()
    for advice in diagnosis.advice:
        print(f"{advice.level}: {advice.text}")
    print(diagnosis.verdict)


def _rows(facts: Facts) -> list[tuple[str, str]]:
    cuda, compiler, cache = facts.cuda, facts.compiler, facts.cache
    host = facts.host_library
    return [
        ("ksopt", f"{facts.ksopt}, Python {facts.python}, {facts.system}"),
        *((device.id, _device(device, facts)) for device in facts.devices),
        *((p.name, p.version or f"missing (used for {p.used_for})") for p in facts.packages),
        ("CUDA of torch", cuda.torch_runtime or "none: torch is a build without CUDA"),
        ("NVRTC", cuda.nvrtc or f"none: {cuda.nvrtc_problem}"),
        (
            "C++ compiler",
            f"{compiler.command}: {compiler.version or 'not advice, or does not run'}",
        ),
        ("host library", host.problem or host.path or "builds; the cache cannot keep it"),
        (
            "cache",
            f"{cache.path}: {cache.problem or ('ready' if cache.exists else 'not made yet')}",
        ),
        *((f"{name} is set", value) for name, value in facts.settings.items()),
    ]


def _device(device: Device, facts: Facts) -> str:
    if device.capability is None:
        used = counted(facts.torch_threads, "thread") if facts.torch_threads else ""
        threads = f", torch uses {used}" if used else ""
        return f"{device.name}, {counted(facts.cpus, 'CPU')}{threads}"
    major, minor = device.capability
    return f"{device.name}, compute capability {major}.{minor}, {device.memory_gib} GiB"


def advise(facts: Facts) -> tuple[Advice, ...]:
    """The advice for a machine, the most severe first."""
    advice = [
        *_advise_packages(facts),
        *_advise_gpu(facts),
        *_advise_host(facts),
        *_advise_settings(facts),
    ]
    order = ("broken", "slow", "note")
    return tuple(sorted(advice, key=lambda a: order.index(a.level)))


def _advise_packages(facts: Facts) -> list[Advice]:
    advice = []
    for name in _REQUIRED:
        if facts.version(name) is None:
            remedy = f"pip install {name}"
            advice.append(Advice("broken", f"{name} is not installed: {remedy}.", remedy))
    if facts.torch_problem:
        text = f"torch cannot be imported: {facts.torch_problem}"
        advice.append(Advice("broken", text, "install torch again"))
    torch_version = facts.version("torch")
    if torch_version and _release(torch_version) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        text = f"torch {torch_version} is too old: ksopt needs {oldest} or newer."
        advice.append(Advice("broken", text, f"pip install 'torch>={oldest}'"))
    return advice


def _advise_gpu(facts: Facts) -> list[Advice]:
    if not facts.gpus:
        return [_advise_no_gpu(facts)]
    advice = []
    for gpu in facts.gpus:
        if gpu.capability is not None and gpu.capability < _OLDEST_CAPABILITY:
            major, minor = gpu.capability
            text = (
                f"{gpu.id} ({gpu.name}) has compute capability {major}.{minor}; ksopt's kernels "
                "need 8.0 or newer, so PyTorch's own operators run there instead."
            )
            advice.append(Advice("slow", text, "use a GPU of compute capability 8.0 or newer"))
    if facts.cuda.nvrtc is None:
        text = (
            "GPU kernels cannot be compiled, so PyTorch's own operators run instead. "
            f"{facts.cuda.nvrtc_problem}"
        )
        advice.append(Advice("slow", text, "pip install nvidia-cuda-nvrtc"))
    if facts.version("triton") is None:
        text = "triton is not installed, so torch.compile cannot make GPU code: pip install triton."
        advice.append(Advice("slow", text, "pip install triton"))
    return advice


def _advise_no_gpu(facts: Facts) -> Advice:
    if not facts.cuda.driver_installed:
        text = "No NVIDIA GPU was found: everything runs, and is measured, on the CPU."
        return Advice("note", text)
    if facts.cuda.torch_runtime is None:
        text = (
            f"There is an NVIDIA driver, but torch {facts.version('torch')} is a build without "
            "CUDA, so the GPU is not used: install a CUDA build of torch."
        )
        return Advice("slow", text, "install a CUDA build of torch")
    text = (
        f"There is an NVIDIA driver, but torch (built for CUDA {facts.cuda.torch_runtime}) sees no "
        "GPU: run nvidia-smi, look at CUDA_VISIBLE_DEVICES, and check that the driver is new "
        "enough for that CUDA."
    )
    return Advice("slow", text, "find out with nvidia-smi why torch sees no GPU")


def _advise_host(facts: Facts) -> list[Advice]:
    advice = []
    compiler = facts.compiler
    if compiler.version is None:
        missing = "was not found" if compiler.path is None else "does not run"
        text = (
            f"The C++ compiler {compiler.command!r} {missing}, so torch.compile cannot make CPU "
            "code, and calls into GPU kernels go through Python: install g++ (on Debian and "
            "Ubuntu: apt install g++) or set CXX to a compiler."
        )
        advice.append(Advice("slow", text, "install g++"))
    elif not facts.has_python_headers:
        text = (
            "Python's headers (Python.h) are missing, so what torch.compile generates cannot be "
            "compiled: install them (on Debian and Ubuntu: apt install python3-dev)."
        )
        advice.append(Advice("slow", text, "install Python's headers, python3-dev"))
    elif not facts.gpus:
        pass  # the host library launches GPU kernels
    elif facts.version("ninja") is None:
        text = "ninja is not installed, so the host library cannot be built: pip install ninja."
        advice.append(Advice("slow", text, "pip install ninja"))
    elif facts.host_library.problem and not facts.torch_problem:
        text = (
            "The host library does not build, so calls into GPU kernels go through Python: "
            f"{facts.host_library.problem.rstrip('.')}."
        )
        advice.append(Advice("slow", text, "make the host library build, as said above"))
    if facts.cache.problem:
        text = (
            f"The cache {facts.cache.path} cannot be used ({facts.cache.problem}), so every "
            "process compiles again: set KSOPT_CACHE_DIR to a private, writable folder."
        )
        advice.append(Advice("slow", text, "set KSOPT_CACHE_DIR to a private, writable folder"))
    if facts.torch_threads is not None and facts.torch_threads * 2 < facts.cpus:
        text = (
            f"torch uses {facts.torch_threads} of {facts.cpus} CPUs: unset OMP_NUM_THREADS, or "
            "call torch.set_num_threads, to use more."
        )
        advice.append(Advice("slow", text, "unset OMP_NUM_THREADS"))
    return advice


def _advise_settings(facts: Facts) -> list[Advice]:
    advice = []
    mode = facts.settings.get("KSOPT_TUNE", "measure")
    if mode in ("off", "model"):
        text = (
            f"KSOPT_TUNE is {mode}, so nothing is measured to choose a kernel: unset it, or set it "
            "to measure."
        )
        advice.append(Advice("slow", text, "unset KSOPT_TUNE"))
    elif mode != "measure":
        text = f"KSOPT_TUNE is {mode!r}, so every product fails: set it to measure, model or off."
        advice.append(Advice("broken", text, "unset KSOPT_TUNE"))
    known = ", ".join(name for name in settings.KNOWN if name.startswith("KSOPT_"))
    for name in facts.settings:
        if name not in settings.KNOWN:
            text = f"{name} is set, but ksopt reads no such variable; it reads {known}."
            advice.append(Advice("note", text))
    return advice


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
