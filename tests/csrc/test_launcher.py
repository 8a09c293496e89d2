"""The launches of csrc/host, on a CPU: the library itself, with a driver simulated in C."""

import contextlib
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from played_driver import known, note, variable

from ksopt.errors import CompilationError
from ksopt.jit import driver
from ksopt.kernels.launcher import HostLauncher, _Arguments, _PythonLauncher
from ksopt.kernels.problem import Geometry, Problem
from ksopt.patterns.chain import Pattern


def plan(library, out_features=8, *, last=False, fallback=-1, kernel=1):
    return library.ops.add_plan(kernel, out_features, last, 32, 0, 16, 2, 1000, False, fallback)


def launched(library) -> _Arguments:
    return _Arguments.in_dll(library.driver, "arguments")


WEIGHT = torch.zeros(1, 8, 16, 1)


def strided(shape, stride):
    """Values that tell where they are in memory."""
    return torch.as_strided(torch.arange(4096.0), shape, stride)


# Of rows of 16 values: name -> shape, strides.
BATCH_FIRST = {
    "one batch dim": ((5, 16), (16, 1)),
    "padded rows": ((5, 16), (24, 1)),
    "a token of each sequence, sequences first": ((5, 1, 16), (16, 80, 1)),
    "two odd dims of size 1": ((5, 1, 1, 16), (16, 7, 3, 1)),
    "size 1 in the middle": ((3, 1, 5, 16), (80, 11, 16, 1)),
    "size 1 first": ((1, 5, 16), (3, 16, 1)),
    "the same row": ((5, 16), (0, 1)),
    "no batch dim": ((16,), (1,)),
    "dims that need a copy": ((3, 5, 16), (16, 48, 1)),
}


@pytest.mark.parametrize("case", BATCH_FIRST)
def test_the_rows_of_x_are_computed(library, case):
    shape, stride = BATCH_FIRST[case]
    x = strided(shape, stride)
    y = library.ops.launch(x, WEIGHT, plan(library))
    assert y.shape == (*shape[:-1], 8)
    assert y.is_contiguous()
    actual = launched(library)
    flat = x.reshape(-1, 16)
    assert actual.batch == len(flat)
    assert actual.y == y.data_ptr()
    if case == "dims that need a copy":
        assert actual.x != x.data_ptr()
        assert actual.x_batch_stride == 16
    else:
        firsts = [x.data_ptr() + 4 * row * actual.x_batch_stride for row in range(len(flat))]
        assert [ctypes.c_float.from_address(at).value for at in firsts] == flat[:, 0].tolist()


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((16, 1), (9, 3)),
        ((16, 5), (5, 1)),
        ((16, 5, 1), (5, 1, 9)),
        ((16, 1, 5), (5, 77, 1)),
        ((16, 5), (8, 1)),
    ],
)
def test_the_rows_of_x_are_computed_batch_last(library, shape, stride):
    x = strided(shape, stride)
    library.ops.launch(x, WEIGHT, plan(library, last=True))
    actual = launched(library)
    assert (actual.x_batch_stride, actual.x_feature_stride) == (1, stride[0])


def test_an_empty_batch_launches_nothing(library):
    before = variable(library, "launches").value
    assert library.ops.launch(torch.zeros(0, 16), WEIGHT, plan(library)).shape == (0, 8)
    assert library.ops.launch(torch.zeros(3, 0, 16), WEIGHT, plan(library)).shape == (3, 0, 8)
    assert variable(library, "launches").value == before


def test_blocks_are_as_many_as_there_are_tiles_up_to_the_most(library):
    for rows, blocks in {1: 2, 16: 2, 17: 4, 100_000: 1000}.items():
        library.ops.launch(torch.zeros(rows, 16), WEIGHT, plan(library))
        assert variable(library, "blocks").value == blocks


@pytest.fixture
def tf32():
    """A function that lets products of float32 be of TF32's accuracy, or no longer."""
    before = torch.get_float32_matmul_precision()
    yield lambda on: torch.set_float32_matmul_precision("high" if on else "highest")
    torch.set_float32_matmul_precision(before)


def test_a_known_plan_is_taken_for_such_operands_until_it_is_not(library, tf32):
    x = strided((5, 1, 16), (16, 80, 1))
    assert known(library, x, WEIGHT) is None
    library.ops.know(x, WEIGHT, False, True, False, plan(library), 0)
    assert known(library, x, WEIGHT).shape == (5, 1, 8)
    assert launched(library).x_batch_stride == 16
    tf32(True)
    assert known(library, x, WEIGHT) is None
    tf32(False)
    assert known(library, x, WEIGHT, last=True) is None
    assert known(library, x, WEIGHT, repacked=True) is None
    assert known(library, torch.zeros(9, 16), WEIGHT) is None  # another problem
    assert known(library, torch.zeros(8, 16), WEIGHT) is not None
    library.ops.know(torch.zeros(6, 16), WEIGHT, False, True, False, -1, 0)
    assert known(library, x, WEIGHT) is None
    library.ops.know(x, WEIGHT, False, True, False, plan(library), 0)
    library.ops.forget()
    assert known(library, x, WEIGHT) is None


def test_a_prepared_weight_is_launched_while_it_is_the_one_to_launch(library):
    x, packed = torch.zeros(5, 16), torch.zeros(1, 1, 1, 256)
    weight, form = WEIGHT.clone(), 7
    library.ops.know(x, weight, False, True, False, plan(library), form)
    assert known(library, x, weight) is None
    variable(library, "stream").value = 3
    note(library, weight, torch.zeros(1, 1, 1, 256), form, stream=3)  # nobody keeps it
    assert known(library, x, weight) is None
    note(library, weight, packed, form + 1, stream=3)
    assert known(library, x, weight) is None
    note(library, weight, packed, form, stream=0)
    assert known(library, x, weight) is None
    note(library, weight, packed, form, stream=3)
    assert known(library, x, weight).shape == (5, 8)
    assert launched(library).weight == packed.data_ptr()
    # What was prepared is launched, however the weight that it was prepared of lies.
    other = weight.clone().as_strided(weight.shape, (128, 1, 8, 1))
    assert known(library, x, other) is None
    note(library, other, packed, form, stream=3)
    assert known(library, x, other).shape == (5, 8)
    wide = torch.zeros(1, 16, 16, 1)
    note(library, wide, packed, form, stream=3)
    assert known(library, x, wide) is None  # another problem
    variable(library, "capturing").value = 1
    assert known(library, x, weight) is None
    variable(library, "capturing").value = 0
    weight.add_(1)
    assert known(library, x, weight) is None
    # The kernel that takes the weight as it is needs no note of what was prepared.
    library.ops.know(x, weight, False, True, False, plan(library), 0)
    assert known(library, x, weight) is not None
    assert launched(library).weight == weight.data_ptr()
    variable(library, "stream").value = 0
    library.ops.forget()
    assert known(library, x, weight) is None


def results(*shape):
    """Poisoned memory for y."""
    return torch.full(shape, torch.nan)


def test_y_is_written_into_out(library):
    out = results(5, 8)
    y = library.ops.launch(torch.zeros(5, 16), WEIGHT, plan(library), out)
    assert launched(library).y == y.data_ptr() == out.data_ptr()
    out = results(0, 8)
    assert library.ops.launch(torch.zeros(0, 16), WEIGHT, plan(library), out).shape == (0, 8)


UNFIT = {
    "x": (torch.zeros(81)[1:].view(5, 16), WEIGHT),
    "rows of x": (torch.zeros(5, 17)[:, :16], WEIGHT),
    "the weight": (torch.zeros(5, 16), torch.zeros(129)[1:].view(1, 8, 16, 1)),
}


@pytest.mark.parametrize("what", UNFIT)
def test_the_kernel_of_unfit_operands_is_compiled_when_they_come(library, what):
    """Two kernels, distinguished by how many blocks they are launched with."""
    later = plan(library, fallback=-2)
    fit, unfit = torch.zeros(5, 16), UNFIT[what]
    assert library.ops.launch(fit, WEIGHT, later).shape == (5, 8)
    before = variable(library, "launches").value
    assert library.ops.launch(*unfit, later) is None
    library.ops.know(fit, WEIGHT, False, True, False, later, 0)
    assert known(library, *unfit) is None
    assert variable(library, "launches").value == before
    other = library.ops.add_plan(1, 8, False, 32, 0, 16, 7, 1000, False, -1)
    library.ops.set_fallback(later, other)
    assert library.ops.launch(*unfit, later).shape == (5, 8)
    assert variable(library, "blocks").value == 7
    y = known(library, *unfit)
    assert (y is not None) == (what == "the weight")  # an unfit x is another problem
    assert library.ops.launch(fit, WEIGHT, later).shape == (5, 8)
    assert variable(library, "blocks").value == 2
    library.ops.forget()


def test_a_launcher_makes_its_fallback_once_and_for_unfit_operands_only(library, monkeypatch):
    monkeypatch.setattr(torch.ops, "ksopt_host", library.ops, raising=False)
    problem = Problem.of_factor(Pattern(1, 8, 16, 1), "float32", batch_last=False)
    created = []

    def make() -> HostLauncher:
        created.append(HostLauncher(problem, Geometry(32, 0, 16, 7, 100), 1, None))
        return created[0]

    launcher = HostLauncher(problem, Geometry(32, 0, 16, 2, 100), 1, make)
    launcher._launch = library.ops.launch
    assert launcher(torch.zeros(5, 16), WEIGHT).shape == (5, 8)
    assert not created
    for x, weight in UNFIT.values():
        assert launcher(x, weight).shape == (5, 8)
        assert variable(library, "blocks").value == 7
    assert len(created) == 1


def test_a_fallback_that_does_not_compile_says_so_and_is_tried_again(library, monkeypatch):
    monkeypatch.setattr(torch.ops, "ksopt_host", library.ops, raising=False)
    problem = Problem.of_factor(Pattern(1, 8, 16, 1), "float32", batch_last=False)
    left = [CompilationError("line 7")]

    def make() -> HostLauncher:
        if left:
            raise left.pop()
        return HostLauncher(problem, Geometry(32, 0, 16, 7, 100), 1, None)

    launcher = HostLauncher(problem, Geometry(32, 0, 16, 2, 100), 1, make)
    launcher._launch = library.ops.launch
    x, weight = UNFIT["x"]
    with pytest.raises(CompilationError, match="line 7"):
        launcher(x, weight)
    out = results(5, 8)
    assert launcher(x, weight, out).data_ptr() == out.data_ptr() == launched(library).y


def test_threads_that_want_a_fallback_at_once_each_get_one(library, monkeypatch):
    monkeypatch.setattr(torch.ops, "ksopt_host", library.ops, raising=False)
    problem = Problem.of_factor(Pattern(1, 8, 16, 1), "float32", batch_last=False)
    created, together = [], threading.Barrier(4, timeout=10)

    def make() -> HostLauncher:
        together.wait()
        created.append(HostLauncher(problem, Geometry(32, 0, 16, 7, 100), 1, None))
        return created[-1]

    launcher = HostLauncher(problem, Geometry(32, 0, 16, 2, 100), 1, make)
    launcher._launch = library.ops.launch
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(lambda _: launcher(*UNFIT["x"]), range(4)))
    assert [y.shape for y in actual] == [(5, 8)] * 4
    assert len(created) == 4
    assert launcher(*UNFIT["x"]).shape == (5, 8)
    assert launcher.fallback in created


def test_a_known_plan_writes_straight_into_what_takes_it_and_into_nothing_else(library):
    memory = torch.zeros(400)
    x, weight = memory[:80].view(5, 16), torch.zeros(512)[:128].view(1, 8, 16, 1)
    library.ops.know(x, weight, False, True, False, plan(library), 0)

    def written(out):
        before = variable(library, "launches").value
        y = known(library, x, weight, out=out)
        assert variable(library, "launches").value == before + (y is not None)
        return y

    behind = memory[80:120].view(5, 8)
    for out in (results(5, 8), behind, results(64)[16:56].view(5, 8)):
        y = written(out)
        assert y.data_ptr() == launched(library).y == out.data_ptr()
    assert written(None) is not None
    for out in (
        *(results(5, 7), results(4, 8), results(5, 1, 8), results(8)),
        *(results(5, 8).double(), results(5, 8).half()),
        *(results(8, 5).T, results(5, 12)[:, :8], results(41)[1:].view(5, 8)),
        *(memory[:40].view(5, 8), memory[76:116].view(5, 8), weight.view(-1)[88:].view(5, 8)),
        weight.as_strided((5, 8), (8, 1), 124),
    ):
        assert written(out) is None, (out.shape, out.stride(), out.dtype)
    library.ops.forget()


def test_without_the_host_library_y_is_written_into_out_too(monkeypatch):
    passed = []
    monkeypatch.setattr(driver, "launch", lambda *args, **_: passed.append(args[4]))
    problem = Problem.of_factor(Pattern(1, 8, 16, 1), "float32", batch_last=False)
    geometry = Geometry(32, 0, 16, 1, 100)
    general = _PythonLauncher(problem, geometry, 1, None)
    launcher = _PythonLauncher(problem, geometry, 2, lambda: general)
    for x in (torch.zeros(5, 16), torch.zeros(5, 17)[:, 1:]):  # the second goes to the fallback
        out = results(5, 8)
        assert launcher(x, WEIGHT, out).data_ptr() == out.data_ptr() == passed[-1].y
        assert launcher(x, WEIGHT).data_ptr() == passed[-1].y
    assert launcher(torch.zeros(0, 16), WEIGHT, results(0, 8)).shape == (0, 8)
    assert len(passed) == 4


def test_the_default_stream_is_not_queried_for_captures(library):
    """The driver answers with an error while another stream is captured."""
    x, packed = torch.zeros(5, 16), torch.zeros(1, 1, 1, 256)
    library.ops.know(x, WEIGHT, False, True, False, plan(library), 7)
    note(library, WEIGHT, packed, 7)
    variable(library, "capturing").value = 1
    assert known(library, x, WEIGHT) is not None
    variable(library, "capturing").value = 0
    library.ops.forget()


def test_a_thread_without_a_context_gets_the_devices(library):
    variable(library, "has_context").value = 0
    library.ops.launch(torch.zeros(5, 16), WEIGHT, plan(library))
    assert variable(library, "has_context").value == 1
    assert launched(library).batch == 5


def test_what_the_driver_refuses_is_reported_in_its_words(library):
    with pytest.raises(RuntimeError, match="could not be launched: unlucky"):
        library.ops.launch(torch.zeros(5, 16), WEIGHT, plan(library, kernel=13))


class Full(torch.Tensor):
    """On a device that has no memory left."""

    def new_empty(self, *_, **__):
        raise torch.OutOfMemoryError("Tried to allocate 1 GiB")


@pytest.mark.parametrize("kind", [Full, torch.Tensor])
def test_out_of_memory_is_torchs_own_error(kind):
    def fails(*_):
        raise RuntimeError("API call failed")

    launcher = HostLauncher.__new__(HostLauncher)
    launcher.problem = Problem.of_factor(Pattern(1, 8, 16, 1), "float32", batch_last=False)
    launcher.plan, launcher._launch, launcher.make_fallback = 0, fails, None
    x = torch.zeros(5, 16).as_subclass(kind)
    with pytest.raises(torch.OutOfMemoryError if kind is Full else RuntimeError) as caught:
        launcher(x, WEIGHT)
    assert ("1 GiB" in str(caught.value)) == (kind is Full)


class Driver:
    """Refuses the first launch of a thread that has no context, as the real one does."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_INVALID_CONTEXT=201)
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="may start early"
    )
    CUlaunchConfig = SimpleNamespace
    context = None

    def __init__(self):
        self.launches = []

    def CUlaunchAttribute(self):
        return SimpleNamespace(value=SimpleNamespace())

    def CUfunction(self, kernel):
        return kernel

    def cuDevicePrimaryCtxRetain(self, device):
        return 0, f"of device {device}"

    def cuCtxSetCurrent(self, context):
        self.context = context
        return (0,)

    def cuLaunchKernelEx(self, config, *_):
        if self.context != "of device 3":
            return (201,)
        self.launches.append(config)
        return (0,)


def test_a_thread_without_a_context_gets_the_devices_in_python_too(monkeypatch):
    played = Driver()
    monkeypatch.setattr(driver, "_driver", lambda: played)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    for early in (False, True):
        driver.launch(1, 2, 32, 0, _Arguments(), 3, early=early)
    assert [(one.gridDimX, one.blockDimX, one.numAttrs) for one in played.launches] == [
        (2, 32, 0),
        (2, 32, 1),
    ]
    (attribute,) = played.launches[1].attrs
    assert attribute.id == "may start early"
    assert attribute.value.programmaticStreamSerializationAllowed == 1
