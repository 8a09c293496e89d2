"""Device code compiles for every target, without a GPU."""

import pytest

from ksopt.errors import CompilationError
from ksopt.jit import arch, nvrtc
from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

naive = family_of("naive")

TARGETS = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cubins"))


@pytest.mark.sweep
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", list(naive.dtypes))
@pytest.mark.parametrize("batch_last", [False, True])
def test_the_general_kernel_compiles(target, dtype, batch_last):
    problem = Problem.of_factor(Pattern(3, 48, 33, 6), dtype, batch_last)
    code = nvrtc.cubin(naive.source(problem, naive.default_config(problem)), target).data
    assert code.startswith(b"\x7fELF")
    assert naive.kernel_name(problem).encode() in code


def test_a_new_device_gets_portable_code():
    problem = Problem.of_factor(Pattern(1, 2, 2, 1), "float32", False)
    source = naive.source(problem, naive.default_config(problem))
    assert b".target sm_80" in nvrtc.cubin(source, "compute_80").data


def test_the_log_of_a_failed_compile_reaches_the_user():
    with pytest.raises(CompilationError, match="no_such_name"):
        nvrtc.cubin('extern "C" __global__ void k() { no_such_name(); }', "sm_80")


def test_an_empty_log_leaves_pythons_own_bytes_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path))
    nvrtc.cubin('extern "C" __global__ void k() {}', "sm_80")
    assert [bytes([number]) for number in (0, 32)] == [bytearray([0]), bytearray([32])]
    assert bytes([32])[0] == 32


def test_an_edit_of_a_header_rebuilds_what_includes_it_and_nothing_else():
    reach = nvrtc._reachable_headers
    assert set(reach('#include "naive.cuh"\n')) == {
        "naive.cuh",
        "common/kernel_params.cuh",
        "common/numeric_types.cuh",
    }
    assert set(reach('#include "common/numeric_types.cuh"\n')) == {"common/numeric_types.cuh"}
    assert reach("int x;") == {}


@pytest.mark.parametrize(
    ("major", "minor", "expected"),
    [
        (7, 5, "sm_75"),
        (8, 0, "sm_80"),
        (9, 0, "sm_90a"),
        (12, 0, "sm_120a"),
        (14, 0, "compute_121"),
    ],
)
def test_targets(major, minor, expected):
    assert arch.for_capability(major, minor, (75, 80, 86, 89, 90, 100, 120, 121)) == expected
