"""The doctor: the facts are this machine's, and each trouble has its sentence."""

import dataclasses
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ksopt
from ksopt import settings
from ksopt.doctor import machine
from ksopt.doctor.advice import Advice, Diagnosis, advise, diagnose, print_diagnosis
from ksopt.doctor.machine import Cache, Compiler, Cuda, Device, Facts, HostLibrary, Package

HEALTHY = Facts(
    ksopt="0.1.0",
    python="3.12.3",
    has_python_headers=True,
    system="Linux",
    cpus=16,
    torch_threads=16,
    torch_problem=None,
    packages=tuple(Package(name, "3.0", use) for name, use in machine.PACKAGES.items()),
    devices=(Device("cuda:0", "NVIDIA H200", (9, 0), 139.8), Device("cpu", "a CPU")),
    cuda=Cuda("13.0", driver_installed=True, nvrtc="13.0"),
    compiler=Compiler("c++", "/usr/bin/c++", "g++ 14"),
    host_library=HostLibrary("/home/user/.cache/ksopt/library.so", None),
    cache=Cache("/home/user/.cache/ksopt", exists=True, problem=None),
    settings={},
)
NO_GPU = (Device("cpu", "a CPU"),)


def without(package: str) -> tuple[Package, ...]:
    return tuple(
        dataclasses.replace(p, version=None) if p.name == package else p for p in HEALTHY.packages
    )


def test_a_healthy_machine_needs_no_advice() -> None:
    assert advise(HEALTHY) == ()


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"packages": without("torch")}, "broken", "pip install torch"),
        ({"packages": without("optuna")}, "broken", "pip install optuna"),
        ({"torch_problem": "OSError: libgomp.so.1"}, "broken", "OSError: libgomp.so.1"),
        ({"packages": (Package("torch", "2.9.1", "everything"),)}, "broken", "needs 2.11"),
        ({"packages": without("ninja")}, "slow", "pip install ninja"),
        ({"packages": without("triton")}, "slow", "pip install triton"),
        ({"cuda": Cuda("13.0", True, None, "No NVRTC.")}, "slow", "No NVRTC."),
        ({"devices": (Device("cuda:0", "V100", (7, 0), 16.0),)}, "slow", "capability 7.0"),
        ({"compiler": Compiler("icpx", None, None)}, "slow", "'icpx' was not found"),
        ({"compiler": Compiler("c++", "/bin/c++", None)}, "slow", "'c++' does not run"),
        ({"has_python_headers": False}, "slow", "python3-dev"),
        ({"host_library": HostLibrary(None, "error: x")}, "slow", "does not build"),
        ({"cache": Cache("/x", True, "it is not mine")}, "slow", "KSOPT_CACHE_DIR"),
        ({"torch_threads": 1}, "slow", "1 of 16 CPUs"),
        ({"settings": {"KSOPT_TUNE": "off"}}, "slow", "KSOPT_TUNE is off"),
        ({"settings": {"KSOPT_TUNE": "model"}}, "slow", "KSOPT_TUNE is model"),
        ({"settings": {"KSOPT_TUNE": "on"}}, "broken", "every product fails"),
        ({"settings": {"KSOPT_CASHE_DIR": "/x"}}, "note", "reads no such variable"),
        ({"devices": NO_GPU, "cuda": Cuda(None, False, None)}, "note", "No NVIDIA GPU"),
        ({"devices": NO_GPU, "cuda": Cuda(None, True, None)}, "slow", "without CUDA"),
        ({"devices": NO_GPU, "cuda": Cuda("13.0", True, None)}, "slow", "nvidia-smi"),
    ],
)
def test_each_trouble_has_its_sentence(change: dict, level: str, words: str) -> None:
    matching = [a for a in advise(dataclasses.replace(HEALTHY, **change)) if words in a.text]
    assert [a.level for a in matching] == [level]


def test_the_last_line_is_ready_or_the_one_thing_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def last_line(**change: Any) -> str:
        facts = dataclasses.replace(HEALTHY, **change)
        print_diagnosis(Diagnosis(facts, advise(facts)))
        return capsys.readouterr().out.splitlines()[-1]

    assert last_line() == "ready"
    assert last_line(settings={"KSOPT_X": "1"}) == "ready"  # a note is nothing to do
    assert last_line(packages=without("ninja")).endswith("could be: pip install ninja")
    assert last_line(packages=without("optuna"), torch_threads=1) == "not ready: pip install optuna"


def test_whatever_is_wrong_can_be_mended() -> None:
    facts = dataclasses.replace(
        HEALTHY,
        packages=(),
        compiler=Compiler("c++", None, None),
        torch_threads=1,
        cuda=Cuda("13.0", True, None, "No NVRTC."),
        settings={"KSOPT_TUNE": "on"},
    )
    assert all(one.remedy and not one.remedy.endswith(".") for one in advise(facts))


def test_a_missing_nvrtc_does_not_matter_without_a_gpu() -> None:
    facts = dataclasses.replace(HEALTHY, devices=NO_GPU, cuda=Cuda(None, False, None, "No NVRTC."))
    assert not any("No NVRTC." in a.text for a in advise(facts))


def test_the_gravest_comes_first() -> None:
    facts = dataclasses.replace(
        HEALTHY, packages=without("torch"), torch_threads=1, settings={"KSOPT_X": "1"}
    )
    assert [a.level for a in advise(facts)] == ["broken", "slow", "note"]


def test_every_advice_is_a_sentence() -> None:
    facts = dataclasses.replace(
        HEALTHY, packages=(), compiler=Compiler("c++", None, None), settings={"KSOPT_X": "1"}
    )
    advice = advise(facts)
    assert len(advice) >= 6
    assert all(a.text.endswith(".") for a in advice)


def test_facts_are_this_machines() -> None:
    facts = machine.examine()
    assert facts.ksopt == ksopt.__version__
    assert facts.version("torch") == torch.__version__
    assert facts.torch_threads == torch.get_num_threads()
    assert facts.devices[-1].id == "cpu"
    assert len(facts.devices) == 1 + torch.cuda.device_count()
    assert facts.compiler.version is not None
    assert facts.has_python_headers  # torch.compile has compiled code in other tests
    assert facts.host_library.problem is None
    assert facts.host_library.path is not None
    assert Path(facts.host_library.path).is_relative_to(settings.cache_dir())
    assert facts.cuda.nvrtc is not None


def test_diagnosis_is_json_and_says_when_something_is_broken() -> None:
    diagnosis = diagnose()
    again = json.loads(json.dumps(diagnosis.to_json()))
    assert again["facts"]["ksopt"] == ksopt.__version__
    assert not diagnosis.is_broken
    worse = dataclasses.replace(diagnosis, advice=(Advice("broken", "It is."),))
    assert worse.is_broken


def test_a_compiler_that_fails_is_reported(tmp_path: Path) -> None:
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    assert machine._compiler(str(fake)) == Compiler(str(fake), str(fake), None)
    assert machine._compiler("no-such-compiler").path is None


def test_a_host_library_that_does_not_build_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "c++"
    fake.write_text('#!/bin/sh\ntest "$1" = --version || { echo "no such header"; exit 3; }\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    facts = machine.examine()
    assert facts.host_library.path is None
    assert "no such header" in (facts.host_library.problem or "")


def test_settings_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    # With another compiler the host library would be built again.
    monkeypatch.setattr(machine, "_host_library", lambda: None)
    monkeypatch.setenv("KSOPT_NO_SUCH_THING", "1")
    monkeypatch.setenv("CXX", "g++")
    facts = machine.examine()
    assert facts.settings["KSOPT_NO_SUCH_THING"] == "1"
    assert facts.settings["CXX"] == "g++"
    assert facts.settings["KSOPT_CACHE_DIR"] == str(settings.cache_dir())


def test_a_cache_that_does_not_exist_yet_is_fine_and_is_not_created(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert machine._cache(folder) == Cache(str(folder), exists=False, problem=None)
    assert not (tmp_path / "a").exists()


def test_a_cache_under_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    problem = machine._cache(tmp_path / "file" / "cache").problem
    assert problem is not None
    assert "is not a folder" in problem


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_a_cache_that_others_may_write_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRWXU | stat.S_IWOTH)
    assert machine._cache(tmp_path).problem == f"{tmp_path} is writable by other users"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX owners")
def test_a_cache_of_another_user_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    problem = machine._cache(tmp_path).problem
    # root, which is trusted, owns these folders.
    assert (problem is None) == (tmp_path.stat().st_uid == 0)
    assert problem is None or problem.endswith("belongs to another user")
