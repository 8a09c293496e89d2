"""Kernels that read a weight's elements in order, by weights that are stored in another: on a CPU.

The driver is played, and its kernel multiplies by whatever lies at the weight's address.
"""

import pytest
import torch
from played_driver import MULTIPLY_AS_IT_IS, Product, decide, multiplies_by, variable

import ksopt
from ksopt import ops
from ksopt.kernels import dispatch, weight_cache, weight_scopes
from ksopt.kernels.backends import cuda
from ksopt.kernels.launcher import HostLauncher, _Arguments
from ksopt.kernels.problem import Geometry
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

PATTERN = Pattern(2, 4, 8, 4)
ROWS = 8


def no_fallback():
    raise AssertionError("these operands are fit for the kernel itself")


def take_the_kernel(library, pattern, x, weight):
    multiplies_by(library, pattern)
    problem, shape = cuda.problem_key_of(x, weight, False).problem, Geometry(32, 0, 16, 1, 100)
    decide(x, weight, HostLauncher(problem, shape, MULTIPLY_AS_IT_IS, no_fallback))


class Device(Product):
    """The CPU as a device on which the product is one kernel, its weight stored as [a, d, b, c]."""

    def __init__(self, library):
        self.library = library
        a, b, c, d = PATTERN.weight_shape
        self.x = torch.randn(ROWS, PATTERN.in_features)
        self.stored = torch.randn(a, d, b, c)
        take_the_kernel(library, PATTERN, self.x, self.weight)

    @property
    def weight(self):
        return self.stored.permute(0, 2, 3, 1)

    @property
    def read(self):
        """Where the weight was that the last launch read."""
        return _Arguments.in_dll(self.library.driver, "arguments").weight


@pytest.fixture
def device(played):
    return Device(played)


def test_the_first_call_puts_a_weight_in_order_and_the_next_ones_are_known(device):
    assert device.known() is None
    device.check(ops.ks_mm(device.x, device.weight))
    ordered = device.read
    assert ordered != device.stored.data_ptr()
    for _ in range(3):
        device.check(device.known())
        assert device.read == ordered


def test_a_weight_that_is_in_order_is_taken_as_it_is(device):
    weight = device.weight.contiguous()
    device.check(ops.ks_mm(device.x, weight))
    for _ in range(2):
        device.check(cuda.run_known(device.x, weight, False))
        assert device.read == weight.data_ptr()
    assert weight_cache.cached_bytes(device.x.device) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: stored.mul_(-1.5),
        lambda stored: stored.view(-1)[3:4].fill_(50.0),
        lambda stored: (stored.data.add_(1), ksopt.refresh()),
        lambda stored: stored.set_(torch.randn_like(stored)),
    ],
    ids=["in place", "an element", "written and refreshed", "other memory"],
)
def test_what_has_changed_is_put_in_order_again(device, change):
    ops.ks_mm(device.x, device.weight)
    assert device.known() is not None
    change(device.stored)
    assert device.known() is None
    device.check(ops.ks_mm(device.x, device.weight))
    device.check(device.known())


def test_the_library_puts_weights_that_change_in_order_by_itself(device):
    ops.ks_mm(device.x, device.weight)
    weight_cache.refresh()
    for _ in range(3):
        with weight_scopes.repacked():
            device.check(device.known())
        device.stored.data.mul_(1.5)  # which torch does not count
    assert weight_cache.cached_bytes(device.x.device) == 0


def test_a_view_that_compiled_code_has_created_is_cached_with_its_owner(device):
    ops.ks_mm(device.x, device.weight)
    launches = variable(device.library, "launches")
    reinterpret = torch._C._dynamo.guards._reinterpret_tensor  # what Inductor calls
    for _ in range(3):
        view = reinterpret(device.stored, device.weight.shape, device.weight.stride(), 0)
        out = torch.full((ROWS, PATTERN.out_features), torch.nan)
        before = launches.value
        ops.ks_mm_inner_out(device.x, view, device.stored, out=out)
        device.check(out)
        assert launches.value == before + 1
    assert weight_cache.cached_bytes(device.x.device) == device.stored.nbytes


def test_the_librarys_own_kernels_take_them_without_python(serving, monkeypatch):
    device = Device(serving)
    ops.ks_mm(device.x, device.weight)
    monkeypatch.setattr(dispatch, "run_known", None)
    monkeypatch.setattr(dispatch, "run_known_repacked", None)
    reinterpret = torch._C._dynamo.guards._reinterpret_tensor
    for _ in range(3):  # cached with its owner
        view = reinterpret(device.stored, device.weight.shape, device.weight.stride(), 0)
        device.check(ops.ks_mm_inner(device.x, view, False, device.stored))
        device.check(ops.ks_mm_frozen(device.x, view, False, device.stored))
    with pytest.raises(TypeError):  # Python's to forget
        ops.ks_mm_repacked(device.x, view, False, device.stored)
    assert weight_cache.cached_bytes(device.x.device) == 0
    for _ in range(3):
        device.check(ops.ks_mm_repacked(device.x, view, False, device.stored))
        device.stored.data.mul_(1.5)  # which torch does not count
    with pytest.raises(TypeError):
        ops.ks_mm_inner(device.x, view, False, device.stored)
    with weight_scopes.repacked():
        for _ in range(3):
            device.check(ops.ks_mm_inner(device.x, view, False, device.stored))
            device.stored.data.mul_(1.5)


def test_a_gradient_takes_the_transposed_weight(device):
    other = Pattern(PATTERN.a, PATTERN.c, PATTERN.b, PATTERN.d)
    grad = torch.randn(ROWS, other.in_features)
    weight = device.weight.transpose(1, 2)
    take_the_kernel(device.library, other, grad, weight)
    for _ in range(3):
        actual_grad = ops.ks_mm(grad, weight)
        torch.testing.assert_close(actual_grad, ks_reference(grad, weight), rtol=1e-5, atol=1e-5)
    assert cuda.run_known(grad, weight, False) is not None
