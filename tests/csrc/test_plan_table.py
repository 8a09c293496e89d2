"""Whole layers through the host library's table of plans, on a CPU that plays a CUDA device."""

import gc
import random
import threading

import pytest
import torch
from played_driver import MULTIPLY, variable
from played_layer import (
    EVENTS,
    PLAIN,
    ROWS,
    Factors,
    FactorsWithin,
    Launched,
    Paired,
    Whole,
    packed_launcher,
)
from torch import nn

import ksopt
from ksopt import ops
from ksopt.errors import CompilationError
from ksopt.kernels import host_plans, plan_autotuner, weight_cache, weight_scopes
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.reference import chain_reference


@pytest.fixture(params=[Whole, Factors, FactorsWithin, Paired])
def device(played, monkeypatch, request):
    return request.param(played, monkeypatch)


@pytest.fixture
def whole(played, monkeypatch):
    return Whole(played, monkeypatch)


def warm(device):
    for _ in range(2):
        device.run()
    assert device.known() is not None


def test_a_layer_is_packed_once_and_then_known(device):
    assert device.known() is None
    before = device.packs
    warm(device)
    packs = device.packs - before
    decided = device.decided
    launches = variable(device.library, "launches").value
    for _ in range(3):
        device.check(device.known())
        device.run()
    assert device.packs - before == packs == (1 if isinstance(device, Whole) else 2)
    assert device.decided == decided
    each = 1 if isinstance(device, Whole) else 2
    assert variable(device.library, "launches").value == launches + 6 * each
    if isinstance(device, Whole):
        assert device.call.calls == 1


@pytest.mark.parametrize("kind", [Factors, FactorsWithin, Paired])
@pytest.mark.parametrize("residual", [False, True])
def test_the_last_launch_computes_the_epilogue_where_it_can(played, monkeypatch, residual, kind):
    device = kind(played, monkeypatch, residual=residual)
    warm(device)
    launches = variable(device.library, "launches").value
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        device.known()
    assert variable(device.library, "launches").value == launches + 2
    operations = {event.key for event in seen.key_averages()} & {"aten::add_", "aten::relu_"}
    assert bool(operations) == (kind is Factors)
    out = torch.full((ROWS, device.features), torch.nan)
    assert device.known(out=out).data_ptr() == out.data_ptr()
    device.check(out)
    if kind is not Factors:
        assert device.family.built == [device.problem.epilogue]


def test_a_pair_runs_its_own_kernels(played, monkeypatch):
    """Without a look at what is decided for each factor."""
    device = Paired(played, monkeypatch)
    played.ops.forget()  # the factors' own choices
    warm(device)
    device.check(device.known())
    with weight_scopes.repacked():
        assert device.known() is None
    plan_autotuner.forget()
    assert device.known() is None


def test_a_bias_that_a_kernel_cannot_read_is_added_behind(played, monkeypatch):
    device = FactorsWithin(played, monkeypatch, residual=True)
    warm(device)
    bias = torch.randn(2 * device.features)[::2]
    for other in (bias, torch.randn(device.features + 1)[1:]):
        device.layer.bias = nn.Parameter(other, requires_grad=False)
        device.run()
        device.check(device.known())
    device.residual = torch.randn(device.features, ROWS).T
    device.run()
    device.check(device.known())


def test_a_kernel_that_does_not_compile_with_an_epilogue_leaves_it_to_pytorch(played, monkeypatch):
    device = FactorsWithin(played, monkeypatch)

    def refuse(problem, tile, device_index):
        raise CompilationError("a fault")

    device.family.launcher = refuse
    with pytest.warns(RuntimeWarning, match="does not compile: a fault"):
        warm(device)
    device.check(device.known())


def test_a_kernel_whose_epilogue_is_wrong_is_left_out(played, monkeypatch):
    device = FactorsWithin(played, monkeypatch, residual=True)

    def without_epilogue(problem, *_):
        return packed_launcher(problem, MULTIPLY)

    monkeypatch.setattr(device.family, "launcher", without_epilogue)
    with pytest.warns(RuntimeWarning, match="is left out: its result is wrong"):
        warm(device)
    device.check(device.known())


@pytest.mark.parametrize("event", EVENTS)
def test_a_weight_that_has_changed_is_packed_again_and_known_again(device, event):
    warm(device)
    event(device)
    assert device.known() is None
    warm(device)
    device.check(device.known())


def test_any_order_of_changes_and_calls_is_right(device):
    draw = random.Random(0)
    for _ in range(60):
        draw.choice([*EVENTS, lambda _: None, lambda _: None])(device)
        for _ in range(draw.randrange(4)):
            device.run()


def test_a_weight_in_a_freed_ones_place_is_not_mistaken(device):
    """The same address, shape and version, as an allocator may give them: another storage."""
    weight = device.layer.weights[1]
    shape = weight.shape
    memory = bytearray(4 * weight.numel())

    def at_the_same_address():
        values = torch.frombuffer(memory, dtype=torch.float32).view(shape)
        return values.copy_(torch.randn(values.shape)).detach()

    seen = set()
    weight.data = at_the_same_address()
    for _ in range(4):
        warm(device)
        seen.add((weight.data_ptr(), weight._version))
        weight.data = torch.empty(0)
        gc.collect()
        weight.data = at_the_same_address()
        assert device.known() is None
    assert len(seen) == 1


def test_prepared_weights_are_let_go_with_the_weights(device):
    warm(device)
    device.layer = None
    gc.collect()
    assert weight_cache.cached_bytes(torch.device("cpu")) == 0


def test_another_stream_and_a_graph_are_not_known(device):
    warm(device)
    stream, capturing = (variable(device.library, name) for name in ("stream", "capturing"))
    stream.value = 5  # the notes say 0
    assert device.known() is None
    capturing.value = 1
    assert device.known() is None
    capturing.value = stream.value = 0
    assert device.known() is not None


def test_what_is_known_is_for_such_operands(device, deterministic):
    warm(device)
    assert device.known(device.x[:150]) is not None  # of the same range of batches
    assert device.known(device.x[:100]) is None
    assert device.known(device.x.t().contiguous().t()) is None
    assert device.known(device.x[:0]) is None
    odd = torch.randn(ROWS * 32 + 1)[1:].view(ROWS, 32)
    assert device.known(odd) is None  # not aligned
    with weight_scopes.repacked():
        device.run()  # a pair's factors have other choices for weights that change
        packs = device.packs
        device.check(device.known())
        assert device.packs == packs + (1 if isinstance(device, Whole) else 2)
    with deterministic():
        assert device.known() is None
    device.residual = torch.randn(ROWS, PLAIN.out_features)
    assert device.known() is None  # another epilogue
    device.residual = None
    plan_autotuner.forget()
    assert device.known() is None


def test_rows_and_blocks_of_any_batch(whole):
    for rows in (1, 63, 64, 65, 128, 129, 1000):
        whole.x = torch.randn(rows, PLAIN.in_features)
        warm(whole)
        y = whole.known()
        whole.check(y)
        units = -(-rows // 64)
        assert variable(whole.library, "blocks").value == min(units, 2)


def test_clusters_share_their_rows(whole, monkeypatch):
    clusters = {"rows_per_unit": 16, "most_blocks": 2**31, "cluster": 4}
    monkeypatch.setattr(Launched, "grid", clusters)
    for rows in (1, 16, 17, 1000):
        whole.x = torch.randn(rows, PLAIN.in_features)
        warm(whole)
        whole.check(whole.known())
        assert variable(whole.library, "blocks").value == 4 * -(-rows // 16)


def test_a_result_is_written_where_it_may_be(device):
    warm(device)
    out = torch.full((ROWS, PLAIN.out_features), torch.nan)
    y = device.known(out=out)
    assert y.data_ptr() == out.data_ptr()
    device.check(out)
    assert device.known(out=torch.empty(PLAIN.out_features, ROWS).t()) is None
    assert device.known(out=device.x) is None
    assert device.known(out=out.double()) is None
    wide = torch.empty(ROWS * 32 + 1)
    assert device.known(out=wide[1:].view(ROWS, 32)) is None
    ops.ks_chain_out(device.x, *device.arguments(), out=device.x)


def test_a_bias_or_a_residual_that_the_kernel_cannot_read_is_pythons(whole):
    problem = Problem(PLAIN, "float32", False, epilogue=Epilogue(True, "relu", True))
    whole.call.problem = problem
    whole.residual = torch.randn(ROWS, PLAIN.out_features)
    warm(whole)
    whole.check(whole.known())
    whole.residual = torch.randn(PLAIN.out_features, ROWS).t()
    assert whole.known() is None
    whole.run()
    whole.residual = torch.randn(ROWS, PLAIN.out_features)
    bias = torch.randn(PLAIN.out_features + 1)[1:]
    whole.layer.bias = nn.Parameter(bias, requires_grad=False)
    assert whole.known() is None
    whole.run()


def test_a_compiled_graphs_views_are_known_by_their_owners(device):
    """Inductor gives a new tensor at each call, and the parameter that it is a view of."""
    owners = device.weights
    view = torch._C._dynamo.guards._reinterpret_tensor

    def views():
        return [view(one, one.shape, one.stride(), 0) for one in owners]

    def run():
        arguments = (device.layer.bias, None, "relu", False, 1, owners)
        y = ops.ks_chain_inner(device.x, views(), *arguments)
        device.check(y)

    for _ in range(2):
        run()
    decided, packs = device.decided, device.packs
    launches = variable(device.library, "launches").value
    run()
    assert (device.decided, device.packs) == (decided, packs)
    assert variable(device.library, "launches").value > launches
    known = host_plans.run(device.x, views(), *device.arguments()[1:], owners)
    device.check(known)
    assert host_plans.run(device.x, views(), *device.arguments()[1:]) is None  # whose views?
    owners[1].mul_(2)
    assert host_plans.run(device.x, views(), *device.arguments()[1:], owners) is None
    run()


def test_two_threads_while_a_third_writes(device):
    warm(device)
    copies = [weight.clone() for weight in device.weights]
    wrong, stop = [], threading.Event()

    def multiply():
        x = torch.randn(ROWS, PLAIN.in_features)
        expected = torch.relu(chain_reference(x, copies) + device.layer.bias)
        with torch.no_grad():
            while not stop.is_set():
                y = ops.chain(x, *device.arguments())
                if not torch.allclose(y, expected, rtol=1e-4, atol=1e-4):
                    wrong.append(1)

    # The driver has one set of arguments: a launch by one thread at a time.
    thread = threading.Thread(target=multiply)
    thread.start()
    for _ in range(50):
        ksopt.refresh()
        plan_autotuner.forget()
    stop.set()
    thread.join()
    assert not wrong
