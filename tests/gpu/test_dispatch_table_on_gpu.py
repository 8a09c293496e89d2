"""Eager calls by what the host library knows: right, and with a prepared weight never a stale one.

The way with a prepared weight is set here, not measured, so that what is tested does not depend on
which way is the fastest on this device.
"""

import gc
import threading

import pytest
import torch
from torch import nn

import ksopt
from ksopt import functional, ops
from ksopt.kernels import dispatch, registry, weight_cache, weight_scopes
from ksopt.kernels.autotuner import Choice, Decision
from ksopt.kernels.backends import cuda
from ksopt.kernels.families.base import family_of
from ksopt.nn import KSLinear
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

pytestmark = pytest.mark.gpu

ROWS = 64
PATTERN = Pattern(4, 64, 64, 4)
# Families that prepare the weight and launch one kernel -> dtype, batch_last
CASES = {
    "wgmma_tf32x3": (torch.float32, False),
    "batch_last_mma_tf32x3": (torch.float32, True),
    "batch_last_wgmma_tf32x3": (torch.float32, True),
    "batch_last_mma16": (torch.float16, True),
    "batch_last_wgmma16": (torch.bfloat16, True),
}
ALLOWED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def forget():
    cuda.forget()
    weight_cache.refresh()
    yield
    cuda.forget()
    weight_cache.refresh()


def new_weight(dtype, device="cuda"):
    return (torch.randn(PATTERN.weight_shape, device=device) / PATTERN.c**0.5).to(dtype)


class Case:
    """Operands whose product is decided to be a family's kernel with a prepared weight."""

    def __init__(self, name, rows=ROWS, device=0):
        self.dtype, self.last = CASES[name]
        features = PATTERN.in_features
        shape = (features, rows) if self.last else (rows, features)
        where = torch.device("cuda", device)
        self.x = torch.randn(shape, device=where).to(self.dtype)
        self.weight = nn.Parameter(new_weight(self.dtype, where), requires_grad=False)
        problem_key = cuda.problem_key_of(self.x, self.weight, self.last)
        family = family_of(name)
        spec = cuda.spec_of(device)
        reason = family.unsupported_reason(problem_key.problem, spec)
        if reason is not None:
            pytest.skip(f"{name}: {reason}")
        way = registry.ranked(family, problem_key.problem, rows, spec)[0]
        choice = Choice(way, way.build(device), "model")
        entry = choice.call.entry()
        if entry is None:
            pytest.skip("there is no host library on this spec")
        assert entry.form != 0
        cuda.remember(problem_key, device, Decision(choice, choice))

    def known(self, weight=None):
        """y, if it takes no decision and no preparation."""
        return cuda.run_known(self.x, self.weight if weight is None else weight, self.last)

    def check(self, weight=None, y=None):
        """The product is that of the weight's present values."""
        weight = self.weight if weight is None else weight
        y = ops.ks_mm(self.x, weight, self.last) if y is None else y
        layout = "batch_last" if self.last else "batch_first"
        truth = ks_reference(self.x.double(), weight.detach().double(), layout)
        error = float((y.double() - truth).norm() / truth.norm())
        assert error <= ALLOWED[self.dtype], error

    def check_known(self, weight=None):
        """The call is known, and right."""
        y = self.known(weight)
        assert y is not None
        self.check(weight, y)

    def warm(self):
        """From here on the call is known."""
        assert self.known() is None
        self.check()
        self.check_known()


@pytest.fixture(params=CASES)
def case(request):
    with torch.no_grad():
        yield Case(request.param)


CHANGES = {
    "in place": lambda w: w.mul_(2),
    "an element": lambda w: w.view(-1).__setitem__(5, 100.0),
    "a copy": lambda w: w.copy_(torch.randn_like(w)),
    "other data": lambda w: setattr(w, "data", torch.randn_like(w)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_has_changed_is_prepared_again(case, change):
    case.warm()
    CHANGES[change](case.weight)
    assert case.known() is None
    case.check()
    case.check_known()


def test_a_loaded_state_dict_is_seen(case):
    layout = "batch_last" if case.last else "batch_first"
    sizes = (PATTERN.in_features, PATTERN.out_features)
    layer = KSLinear(
        *sizes, str(PATTERN), bias=False, layout=layout, device="cuda", dtype=case.dtype
    )
    weight = layer.weights[0]
    for _ in range(2):
        case.check(weight, layer(case.x))
        case.check_known(weight)
        layer.load_state_dict({"weights.0": new_weight(case.dtype)})
        assert case.known(weight) is None
    case.check(weight, layer(case.x))


def test_what_torch_does_not_count_is_seen_after_a_refresh(case):
    case.warm()
    case.weight.data.mul_(3)
    ksopt.refresh()
    assert case.known() is None
    case.check()


def placed_at(address, values):
    """A copy of ``values`` at an address that was freed; nothing in it counts as a change."""
    held = []
    while len(held) < 1000:
        memory = torch.empty_like(values)
        place = memory.data_ptr()
        if place == address:
            memory.data.copy_(values)
            return memory
        if place < address < place + memory.nbytes:  # freed memory before it has been joined to it
            del memory
            memory = torch.empty(address - place, dtype=torch.uint8, device=values.device)
        held.append(memory)
    raise AssertionError("the allocator does not give that memory back")


def test_a_weight_at_the_address_of_one_that_is_gone(case):
    case.warm()
    values = new_weight(case.dtype)
    address, version = case.weight.data_ptr(), case.weight._version
    case.weight = None
    gc.collect()
    other = nn.Parameter(placed_at(address, values), requires_grad=False)
    assert (other.data_ptr(), other._version) == (address, version)
    assert case.known(other) is None
    case.check(other)
    case.check_known(other)


def test_other_values_at_the_same_address_of_the_same_weight(case):
    case.warm()
    values = new_weight(case.dtype)
    address, version = case.weight.data_ptr(), case.weight._version
    case.weight.data = values.new_empty(0)
    case.weight.data = placed_at(address, values)
    assert (case.weight.data_ptr(), case.weight._version) == (address, version)
    assert case.known() is None
    case.check()
    case.check_known()


def test_each_stream_waits_for_the_preparation_once(case):
    case.warm()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert case.known() is None
        case.check()
        case.check_known()
    case.check_known()
    torch.cuda.synchronize()


def test_a_captured_graph_prepares_its_weight_at_every_replay(case):
    case.warm()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.check()  # the stream of the capture knows it too
        assert case.known() is not None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        known = case.known()
        y = ops.ks_mm(case.x, case.weight, case.last)
    assert known is None
    for factor in (1, 2):
        case.weight.mul_(factor)
        y.fill_(torch.nan)
        graph.replay()
        case.check(y=y)
    case.check()


@pytest.mark.parametrize("fused", [False, True])
def test_evaluations_between_training_steps(case, fused):
    case.warm()
    case.weight.requires_grad_()
    optimizer = torch.optim.SGD([case.weight], lr=0.01, fused=fused)
    for _ in range(3):
        with torch.enable_grad():
            ops.ks_mm(case.x, case.weight, case.last).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert case.known() is None
        case.check()
        case.check_known()


def test_the_librarys_own_kernels_know_it_without_python(case, monkeypatch):
    case.warm()
    operands = (case.x, case.weight, case.last)
    with monkeypatch.context() as patch:  # Python's kernels fail
        patch.setattr(dispatch, "run_known", None)
        patch.setattr(dispatch, "run_known_repacked", None)
        for _ in range(2):
            case.check(y=ops.ks_mm_inner(*operands, case.weight))
            case.check(y=ops.ks_mm_frozen(*operands, case.weight))
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(TypeError):
            ops.ks_mm_inner(*operands, case.weight)
        case.check(y=ops.ks_mm_inner(*operands))  # a weight that a graph computes is packed
        with pytest.raises(TypeError):  # Python drops what is cached
            ops.ks_mm_repacked(*operands)
        with pytest.raises(TypeError):  # what was cached is forgotten now
            ops.ks_mm_inner(*operands, case.weight)
    for _ in range(2):
        case.weight.mul_(2)
        case.check(y=ops.ks_mm_inner(*operands))
        case.check(y=ops.ks_mm_inner(*operands, case.weight))
        case.check(y=ops.ks_mm_repacked(*operands))


def test_weights_that_change_are_packed_at_each_call(case):
    case.warm()
    in_another_order = case.weight.transpose(1, 3).contiguous().transpose(1, 3)
    memory = torch.zeros(case.weight.numel() + 1).to(case.weight)
    shifted = memory[1:].view(case.weight.shape).copy_(case.weight)
    with weight_scopes.repacked():
        for weight in (case.weight, in_another_order, shifted):
            for factor in (-2, 0.5):
                weight.data.mul_(factor)
                case.check_known(weight)
    ksopt.refresh()
    case.check()
    case.check_known()


def test_nothing_is_known_where_nothing_may_be_cached(case, monkeypatch):
    monkeypatch.setattr(weight_cache, "limit_bytes", lambda _: 0)
    for _ in range(2):
        case.check()
        assert case.known() is None


def test_operands_out_of_the_ordinary_are_not_known(case):
    case.warm()
    x, weight, last = case.x, case.weight, case.last
    rows_dim = 1 if last else 0
    strange = {
        "more rows than the problem's": (torch.cat([x, x], rows_dim), weight, last),
        "no rows": (x.narrow(rows_dim, 0, 0), weight, last),
        "the other layout": (x.T.contiguous(), weight, not last),
        "rows apart": (x.T.contiguous().T, weight, last),
        "not aligned": (torch.zeros(x.numel() + 1).to(x)[1:].view_as(x), weight, last),
        "a strided weight": (x, weight.transpose(1, 2).contiguous().transpose(1, 2), last),
        "a weight on the CPU": (x, weight.cpu(), last),
        "two dtypes": (x, weight.double(), last),
    }
    for what, operands in strange.items():
        assert cuda.run_known(*operands) is None, what
    case.check_known()
    if case.dtype == torch.float32:
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        try:
            assert case.known() is None
        finally:
            torch.backends.cuda.matmul.fp32_precision = before


def test_threads_share_what_is_prepared(case):
    case.warm()
    wrong = []

    def evaluate():
        with torch.no_grad():
            for _ in range(50):
                try:
                    case.check()
                except Exception as error:  # whatever it is: a thread's own would be lost
                    wrong.append(error)

    threads = [threading.Thread(target=evaluate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", CASES)
def test_two_devices_have_their_own(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs in one process")
    with torch.no_grad():
        cases = [Case(name, device=device) for device in range(2)]
        for case in cases:
            case.warm()
        cases[1].weight.mul_(2)
        assert cases[1].known() is None
        for case in cases:  # the current device stays 0
            case.check()
            case.check_known()


@pytest.mark.parametrize("name", CASES)
def test_two_batch_sizes_and_two_tiles_of_one_weight(name):
    """Each has its own form of the weight, and calls alternate."""
    with torch.no_grad():
        small, large = Case(name, rows=16), Case(name, rows=1024)
        large.weight = small.weight
        for _ in range(3):
            small.check()
            large.check()
        small.check_known()
        large.check_known()


def test_a_call_past_the_dispatcher_is_the_operators(case):
    case.warm()
    layout = "batch_last" if case.last else "batch_first"
    past = functional.ks_linear(case.x, [case.weight], layout=layout)
    assert torch.equal(past, ops.ks_mm(case.x, case.weight, case.last))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert functional.ks_linear(case.x, [case.weight], layout=layout).dtype == torch.bfloat16
    with torch.inference_mode():
        actual = functional.ks_linear(case.x, [case.weight], layout=layout)
        assert actual.is_inference()
        case.check(y=actual)
    with torch.enable_grad():
        weight = case.weight.clone().requires_grad_()
        assert functional.ks_linear(case.x, [weight], layout=layout).requires_grad
    many = torch.stack([case.x, 2 * case.x])
    mapped = torch.vmap(lambda x: functional.ks_linear(x, [case.weight], layout=layout))(many)
    torch.testing.assert_close(mapped[0], past, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(mapped[1], 2 * past, rtol=1e-2, atol=1e-2)
