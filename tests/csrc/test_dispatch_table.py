"""Whole calls by prepared weights through the host library, on a CPU: right after whatever changes.

The driver is played, and its two kernels compute: one packs a weight, one multiplies by that alone.
"""

import gc
import random
import threading

import pytest
import torch
from played_driver import (
    MULTIPLY,
    MULTIPLY_AS_IT_IS,
    PACK,
    Product,
    decide,
    multiplies_by,
    packed_from,
    variable,
)
from seen_products import Python
from torch import nn

import ksopt
from ksopt import functional, ops
from ksopt.kernels import dispatch, weight_cache, weight_scopes
from ksopt.kernels.autotuner import Choice, Decision
from ksopt.kernels.backends import cuda
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.families.common.batch_last import PackingLauncher
from ksopt.kernels.launcher import HostLauncher, _Arguments
from ksopt.kernels.packing_launcher import PackedLauncher, geometry_of
from ksopt.kernels.problem import Geometry, Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

PATTERN = Pattern(2, 4, 8, 4)
ROWS = 8


class Device(Product):
    """The CPU as a device on which the product is a kernel with a packed weight."""

    def __init__(self, library):
        self.library = library
        multiplies_by(library, PATTERN)
        self.x = torch.randn(ROWS, PATTERN.in_features)
        self.renew()
        key = cuda.problem_key_of(self.x, self.weight, False)
        packing = Problem.of_factor(
            Pattern(1, PATTERN.nnz, PATTERN.nnz, 1), key.problem.dtype, False
        )
        self.launcher = PackedLauncher(
            "doubled",
            HostLauncher(packing, geometry_of(PATTERN.nnz), PACK, None),
            HostLauncher(key.problem, Geometry(32, 0, 16, 1, 100), MULTIPLY, None),
            fallback=None,
        )
        decide(self.x, self.weight, self.launcher)

    def renew(self, values=None):
        values = torch.randn(PATTERN.weight_shape) if values is None else values
        self.weight = nn.Parameter(values, requires_grad=False)

    @property
    def packs(self):
        """How often a weight was packed until now."""
        return variable(self.library, "packs").value

    def product(self):
        return ops.ks_mm(self.x, self.weight)


class EnteredPython(Exception):
    """A call is not known to the library."""


class Dispatched(Device):
    """The same, called as compiled graphs do: the library's kernel is the operator's own."""

    def product(self):
        if torch.is_grad_enabled():
            return super().product()
        # What compiled graphs hold for such a scope.
        twin = ops.ks_mm_repacked if weight_scopes.thread_state.repacked else ops.ks_mm_frozen
        return twin(self.x, self.weight, False, self.weight)

    def known(self):
        twin = ops.ks_mm_repacked if weight_scopes.thread_state.repacked else ops.ks_mm_inner

        def entered(*_):
            raise EnteredPython

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "run_known", entered)
            patch.setattr(dispatch, "run_known_repacked", entered)
            try:
                return twin(self.x, self.weight, False, self.weight)
            except EnteredPython:
                return None


@pytest.fixture(params=[Device, Dispatched])
def device(request):
    library = request.getfixturevalue("serving" if request.param is Dispatched else "played")
    return request.param(library)


def test_the_first_call_packs_and_the_next_ones_are_known(device):
    assert device.known() is None
    before = device.packs
    for _ in range(3):
        device.check(device.product())
    assert device.packs == before + 1
    device.check(device.known())
    assert device.packs == before + 1


def test_rows_at_an_odd_address_are_known_apart(device):
    device.product()
    memory = torch.randn(ROWS * PATTERN.in_features + 1)
    device.x = memory[1:].view(ROWS, PATTERN.in_features)
    assert device.known() is None
    decide(device.x, device.weight, device.launcher)
    device.check(device.product())
    device.check(device.known())


def in_place(device):
    device.weight.mul_(-1.5)


def an_element(device):
    device.weight.view(-1)[random.randrange(PATTERN.nnz)] = 50.0


def other_data(device):
    device.weight.data = torch.randn(PATTERN.weight_shape)


def written_and_refreshed(device):
    device.weight.data.add_(1)
    ksopt.refresh()


def another_weight(device):
    device.renew()
    gc.collect()


def the_same_memory_by_another_name(device):
    """It counts versions of its own, from 0."""
    device.renew(device.weight.data.mul_(3))


def a_training_step(device):
    device.weight.requires_grad_()
    with torch.enable_grad():
        device.product().square().mean().backward()
    torch.optim.SGD([device.weight], lr=0.1).step()
    device.weight.grad = None
    device.weight.requires_grad_(False)


def a_write_behind_a_training_forward(device):
    """A product under autograd forgets what was cached, whatever is not counted after it."""
    device.weight.requires_grad_()
    with torch.enable_grad():
        device.product()
    device.weight.data.mul_(2)
    device.weight.requires_grad_(False)


def marked_repacked(device):
    with weight_scopes.repacked():
        device.weight.data.mul_(0.5)
        device.check(device.product())
    weight_cache.refresh()


def a_state_dict(device):
    holder = nn.Module()
    holder.weight = device.weight
    holder.load_state_dict({"weight": torch.randn(PATTERN.weight_shape)})


def nothing(device):
    pass


EVENTS = [
    in_place,
    an_element,
    other_data,
    written_and_refreshed,
    another_weight,
    the_same_memory_by_another_name,
    a_training_step,
    a_write_behind_a_training_forward,
    marked_repacked,
    a_state_dict,
]


@pytest.mark.parametrize("event", EVENTS)
def test_what_has_changed_is_packed_again_and_known_again(device, event):
    device.product()
    assert device.known() is not None
    event(device)
    assert device.known() is None
    device.check(device.product())
    device.check(device.known())


def test_any_order_of_changes_and_calls_is_right(device):
    draw = random.Random(0)
    for _ in range(150):
        draw.choice([*EVENTS, nothing, nothing])(device)
        for _ in range(draw.randrange(3)):
            device.check(device.product())


def test_another_stream_is_not_known(device):
    device.product()
    stream = variable(device.library, "stream")
    stream.value = 5  # the note says 0
    assert device.known() is None
    stream.value = 0
    assert device.known() is not None


def test_a_deterministic_product_is_not_known(device, deterministic):
    device.product()
    with deterministic():
        assert device.known() is None


def test_where_the_changing_weight_takes_another_way_the_cached_one_is_known(device):
    key = cuda.problem_key_of(device.x, device.weight, False)
    decision = cuda.known(key, device.x.get_device())
    other = Choice(Candidate("other", key.problem, 1.0), lambda x, w: ks_reference(x, w), "model")
    cuda.remember(key, device.x.get_device(), Decision(decision.cached, other))
    device.check(device.product())
    before = device.packs
    device.check(device.known())
    with weight_scopes.repacked():
        assert device.known() is None
        device.check(device.product())
    assert device.packs == before


def test_a_weight_that_changes_is_packed_by_a_launch(device):
    device.check(device.product())
    packs, launches = device.packs, variable(device.library, "launches").value
    memory = torch.zeros(PATTERN.nnz + 1)
    shifted = memory[1:].view(PATTERN.weight_shape).copy_(device.weight)
    in_another_order = device.weight.detach().transpose(1, 3).contiguous().transpose(1, 3)
    transposed = device.weight.detach().transpose(1, 2).contiguous().transpose(1, 2)
    part = torch.zeros([size + 1 for size in PATTERN.weight_shape])[1:, :-1, 1:, 1:]
    part.copy_(device.weight)
    weights = (device.weight, shifted, in_another_order, transposed, part)
    with weight_scopes.repacked():
        for weight in weights:
            weight.data.mul_(-3)
            y = cuda.run_known(device.x, weight, False)
            torch.testing.assert_close(y, ks_reference(device.x, weight.detach()))
            assert packed_from(device.library) == weight.data_ptr()  # no copy of it
        assert device.packs == packs + len(weights)
        assert variable(device.library, "launches").value == launches + 2 * len(weights)


def test_python_packs_a_weight_by_the_same_launch(device):
    weight = device.weight.detach().transpose(1, 2).contiguous().transpose(1, 2)
    packed = device.launcher.pack(weight)
    torch.testing.assert_close(packed.flatten(), -2 * weight.flatten())
    assert packed.shape == (1, 1, 1, PATTERN.nnz)
    assert packed_from(device.library) == weight.data_ptr()


def test_a_weight_that_changes_is_put_into_the_order_of_groups(played):
    """The driver's kernel takes what it reads for [a, b, c, d], so the result shows the order."""
    multiplies_by(played, PATTERN)
    x, weight = torch.randn(ROWS, PATTERN.in_features), torch.randn(PATTERN.weight_shape)
    problem = Problem.of_factor(PATTERN, "float32", False)
    kernel = HostLauncher(problem, Geometry(32, 0, 16, 1, 100), MULTIPLY_AS_IT_IS, None)
    decide(x, weight, PackingLauncher(kernel))
    read = weight.permute(0, 3, 1, 2).contiguous().view(PATTERN.weight_shape)
    torch.testing.assert_close(ops.ks_mm(x, weight), ks_reference(x, read))
    with weight_scopes.repacked():
        for _ in range(2):
            weight.data.mul_(-2)
            y = cuda.run_known(x, weight, False)
            torch.testing.assert_close(y, ks_reference(x, -2 * read))
            read = -2 * read


def by_inner_out(x, weight):
    y = torch.full((len(x), PATTERN.out_features), torch.nan)
    ops.ks_mm_inner_out(x, weight, weight, out=y)
    return y


def by_inner(x, weight):
    return ops.ks_mm_inner(x, weight, False, weight)


def by_frozen(x, weight):
    return ops.ks_mm_frozen(x, weight, False, weight)


@pytest.mark.parametrize("multiply", [by_inner, by_frozen, by_inner_out])
def test_graphs_products_see_the_scopes_of_their_weights(serving, multiply):
    """Nothing is taken that was cached of them, for torch may not have counted the change."""
    device = Dispatched(serving)
    for _ in range(2):
        device.check(multiply(device.x, device.weight))
    packs = device.packs
    with weight_scopes.repacked():
        device.weight.data.mul_(0.5)
        device.check(multiply(device.x, device.weight))
        assert device.packs == packs + 1
        with weight_scopes.repacked(False):
            device.weight.data.mul_(2)
            device.check(device.known())
        device.weight.data.mul_(0.5)
        device.check(multiply(device.x, device.weight))
        assert device.packs == packs + 2
    device.weight.data.mul_(2)
    device.check(device.known())
    assert device.packs == packs + 2


@pytest.mark.parametrize("multiply", [ops.ks_mm_inner, ops.ks_mm_frozen])
def test_nothing_is_cached_of_a_weight_that_a_graph_computes(serving, multiply):
    """Inductor may write the next one into its memory, and counts no version."""
    device = Dispatched(serving)
    device.check(device.product())
    for _ in range(3):
        packs = device.packs
        device.check(multiply(device.x, device.weight))
        assert device.packs == packs + 1


def test_python_sets_the_state_of_a_thread_once(serving):
    device = Dispatched(serving)
    device.check(device.product())
    took_python = []

    def multiply():
        for _ in range(3):
            with Python() as python:
                device.product()
            took_python.append(bool(python.entered))

    thread = threading.Thread(target=torch.no_grad()(multiply))
    thread.start()
    thread.join()
    assert took_python == [True, False, False]


def test_what_a_thread_says_is_no_other_threads(serving):
    device = Dispatched(serving)
    device.check(device.product())
    known = []

    def look():
        device.check(device.product())
        known.append(device.known() is not None)

    with weight_scopes.repacked():
        thread = threading.Thread(target=torch.no_grad()(look))
        thread.start()
        thread.join()
    assert known == [True]


def test_a_layer_past_the_dispatcher_is_right_too(device):
    device.check(functional.ks_linear(device.x, [device.weight]))
    before = device.packs
    device.check(functional.ks_linear(device.x, [device.weight]))
    assert device.packs == before


def test_what_is_decided_under_determinism_is_known_to_nobody(device, monkeypatch, deterministic):
    decided, cuda._decisions = cuda._decisions, {}
    try:
        with monkeypatch.context() as patch, deterministic():
            patch.setattr(cuda, "_predicted", decided)
            device.check(device.product())
        assert device.known() is None
    finally:
        cuda._decisions = decided
    device.product()
    assert device.known() is not None


def test_forgotten_choices_are_not_known(device):
    device.product()
    assert device.known() is not None
    cuda.forget()
    assert device.known() is None


def test_products_are_written_into_passed_memory_by_the_kernel_itself(device):
    out = torch.full((ROWS, PATTERN.out_features), torch.nan)
    arguments = _Arguments.in_dll(device.library.driver, "arguments")
    launches = variable(device.library, "launches")
    for _ in range(2):  # decided and packed, then known
        ops.ks_mm_inner_out(device.x, device.weight, device.weight, out=out.fill_(torch.nan))
        device.check(out)
        assert arguments.y == out.data_ptr()
    before, packs = launches.value, device.packs
    ops.ks_mm_inner_out(device.x, device.weight, device.weight, out=out.fill_(torch.nan))
    assert (launches.value, device.packs) == (before + 1, packs)
    an_element(device)
    ops.ks_mm_inner_out(device.x, device.weight, device.weight, out=out)
    device.check(out)
    transposed = torch.full((PATTERN.out_features, ROWS), torch.nan).T
    ops.ks_mm_inner_out(device.x, device.weight, device.weight, out=transposed)
    device.check(transposed)


@pytest.mark.parametrize("multiply", [ops.ks_mm, ops.multiply])
def test_lazily_negated_operands_have_the_memory_of_others(device, multiply):
    weight, x = device.weight, device.x
    expected = multiply(x, weight)
    assert device.known() is not None
    for _ in range(2):
        torch.testing.assert_close(multiply(x, torch._neg_view(weight)), -expected)
        torch.testing.assert_close(multiply(torch._neg_view(x), weight), -expected)
