"""Prepared weights: once a version, gone with the weight, never stale. Preparations are counted."""

import contextlib
import copy
import gc
import os
import signal
import threading
import warnings

import pytest
import torch
from seen_products import SeenProducts, without_library
from torch import nn

import ksopt
from ksopt import KSLinear
from ksopt.kernels import dispatch, weight_cache, weight_scopes
from ksopt.reference import ks_reference


class Counting:
    """A preparation that counts: [a, b, c, d] -> [a, d, b, c]."""

    def __init__(self):
        self.count = 0

    def __call__(self, weight):
        self.count += 1
        assert not weight.requires_grad
        return weight.permute(0, 3, 1, 2).contiguous()


@pytest.fixture
def prepare():
    weight_cache.refresh()
    yield Counting()
    weight_cache.refresh()


def ask(weight, prepare, form="adbc"):
    """What is prepared is always right, whether it was cached or not."""
    actual = weight_cache.prepared(weight, form, prepare)
    torch.testing.assert_close(actual, weight.detach().permute(0, 3, 1, 2), rtol=0, atol=0)
    return actual


def new_weight(dtype=torch.float32):
    return nn.Parameter(torch.randn(2, 3, 4, 5, dtype=dtype))


def test_one_version_is_prepared_once(prepare):
    weight = new_weight()
    first = ask(weight, prepare)
    assert ask(weight, prepare) is first
    assert prepare.count == 1
    ask(weight, prepare, "another form")
    assert prepare.count == 2


CHANGES = {
    "in place": lambda w: w.add_(1),
    "a copy": lambda w: w.copy_(torch.randn_like(w)),
    "an element": lambda w: w.view(-1).__setitem__(3, 7.0),
    "through a view": lambda w: w[1].mul_(2),
    "other data": lambda w: setattr(w, "data", torch.randn_like(w)),
    "another dtype": lambda w: setattr(w, "data", w.data.double()),
    "another shape": lambda w: setattr(w, "data", torch.randn(3, 3, 3, 3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_at_once(prepare, change):
    weight = new_weight()
    ask(weight, prepare)
    with torch.no_grad():
        CHANGES[change](weight)
    ask(weight, prepare)
    ask(weight, prepare)
    assert prepare.count == 2


def test_memory_that_is_reused_by_another_weight_is_not_mistaken(prepare):
    """The same address, shape and version, as an allocator may give them: another storage."""
    memory = bytearray(4 * 2 * 3 * 4 * 5)

    def at_the_same_address(value):
        values = torch.frombuffer(memory, dtype=torch.float32).view(2, 3, 4, 5)
        return values.fill_(value).detach()

    weight = nn.Parameter(at_the_same_address(0.0))
    ask(weight, prepare)
    seen = {(weight.data_ptr(), weight._version)}
    for count in range(2, 6):
        weight.data = torch.empty(0)
        gc.collect()
        weight.data = at_the_same_address(float(count))
        seen.add((weight.data_ptr(), weight._version))
        ask(weight, prepare)
        assert prepare.count == count
    assert len(seen) == 1


def test_modules_move_load_and_train(prepare):
    layer = KSLinear(12, 12, "(2,3,3,2)*(2,3,3,2)")
    weight = layer.weights[0]
    ask(weight, prepare)
    layer.to(torch.float64)
    ask(layer.weights[0], prepare)
    assert prepare.count == 2
    layer.load_state_dict({key: torch.randn_like(t) for key, t in layer.state_dict().items()})
    ask(layer.weights[0], prepare)
    assert prepare.count == 3
    for optimizer in (torch.optim.SGD, torch.optim.Adam):
        step = optimizer(layer.parameters(), lr=0.1)
        layer(torch.randn(3, 12, dtype=torch.float64)).sum().backward()
        step.step()
        before = prepare.count
        ask(layer.weights[0], prepare)
        assert prepare.count == before + 1


def test_copies_have_their_own(prepare):
    layer = KSLinear(12, 12, "(2,3,3,2)*(2,3,3,2)")
    ask(layer.weights[0], prepare)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weights[0].mul_(2)
    ask(twin.weights[0], prepare)
    ask(layer.weights[0], prepare)
    assert prepare.count == 2
    assert set(layer.state_dict()) == {"weights.0", "weights.1", "bias"}


def test_views_are_cached_with_what_they_view(prepare):
    weight = new_weight()
    for _ in range(3):
        ask(weight.transpose(1, 2), prepare)
    assert prepare.count == 1
    ask(weight, prepare)
    assert prepare.count == 2
    with torch.no_grad():
        weight.neg_()
    ask(weight.transpose(1, 2), prepare)
    assert prepare.count == 3


def unknown_view(weight):
    """What Inductor gives an operator: the memory, without what torch knows of it."""
    if torch.is_inference_mode_enabled():
        weight = weight.detach()
    sizes, strides = weight.shape, weight.stride()
    return torch._C._dynamo.guards._reinterpret_tensor(weight, sizes, strides, 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_views_that_torch_does_not_know_are_cached_with_their_owner(prepare, mode):
    weight = new_weight()
    for count in (1, 2):
        for _ in range(3):
            with mode():
                view = unknown_view(weight)
                assert view._base is None
                with weight_scopes.owned_by(weight):
                    ask(view, prepare)
        assert prepare.count == count
        with torch.no_grad():
            weight.add_(1)
    assert list(weight_cache._by_weight) == [id(weight)]
    weight_cache.forget(weight)
    assert not weight_cache._by_weight


def test_an_owner_may_be_a_view_itself(prepare):
    base = torch.randn(2, 2, 3, 4, 5)
    owner = base[1]
    for count in (1, 2):
        for _ in range(3):
            with weight_scopes.owned_by(owner):
                ask(unknown_view(owner), prepare)
        assert prepare.count == count
        base.mul_(2)
    assert list(weight_cache._by_weight) == [id(base)]


def test_other_memory_has_another_owner(prepare):
    weight, other = new_weight(), new_weight()
    with weight_scopes.owned_by(other):
        first = ask(weight, prepare)
        with torch.no_grad():
            other.add_(1)
        assert ask(weight, prepare) is first
        assert list(weight_cache._by_weight) == [id(weight)]
    assert weight_scopes.thread_state.owner is None


def test_a_cast_is_cached_and_its_prepared_forms_are_dropped_with_it(prepare):
    weight = new_weight()
    for count in (1, 2):
        for _ in range(3):
            cast = weight_cache.cast(weight, torch.bfloat16)
            assert torch.equal(cast, weight.detach().bfloat16())
            assert not cast.requires_grad
            ask(cast, prepare)
        assert prepare.count == count
        with torch.no_grad():
            weight.mul_(2)
    # The cast, and what is prepared of it: two bytes an element each.
    assert weight_cache.cached_bytes(weight.device) == 4 * weight.numel()
    del cast
    weight_cache.forget(weight)
    gc.collect()
    assert not weight_cache._by_weight


def test_autocast_keeps_casts_of_what_is_not_trained(prepare):
    layer = KSLinear(12, 12, "(2,3,3,2)*(2,3,3,2)", bias=False)
    x = torch.randn(3, 12)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(x)
        assert len(weight_cache._by_weight) == 2
        first = weight_cache.cast(layer.weights[0], torch.bfloat16)
        with torch.no_grad():
            layer(x)
        assert weight_cache.cast(layer.weights[0], torch.bfloat16) is first
        layer(x).float().sum().backward()
        assert not weight_cache._by_weight
    assert layer.weights[0].grad.dtype == torch.float32
    layer.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x.requires_grad_()).float().sum().backward()  # frozen: cached, there and back
    assert len(weight_cache._by_weight) == 2
    assert all(len(forms.cached) == 2 for forms in weight_cache._by_weight.values())


def test_a_frozen_weight_is_cached_where_gradients_pass_through(prepare, monkeypatch):
    def run(x, weight, batch_last, out):
        return ks_reference(x, ask(weight, prepare).permute(0, 2, 3, 1))

    without_library(monkeypatch)
    monkeypatch.setattr(dispatch, "run", run)
    weight = torch.randn(2, 3, 4, 5)
    x = torch.randn(5, 40, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1)
    for count in (2, 4):
        for _ in range(3):
            ksopt.ops.ks_mm(x, weight).sum().backward()
            optimizer.step()
        assert prepare.count == count
        weight.mul_(2)


def test_it_is_gone_with_the_weight(prepare):
    weight = new_weight()
    size = 4 * weight.numel()
    ask(weight, prepare)
    ask(weight.transpose(1, 2), prepare)
    assert weight_cache.cached_bytes(weight.device) == 2 * size
    del weight
    gc.collect()
    assert weight_cache.cached_bytes(torch.device("cpu")) == 0
    assert not weight_cache._by_weight


def test_old_versions_do_not_pile_up(prepare):
    weight = new_weight()
    for _ in range(5):
        ask(weight, prepare)
        ask(weight.transpose(1, 2), prepare)
        with torch.no_grad():
            weight.add_(1)
    assert weight_cache.cached_bytes(weight.device) <= 2 * 4 * weight.numel()


def test_a_view_is_not_cached_for_it_would_keep_the_weight_alive(prepare):
    weight = torch.randn(2, 3, 4, 1)
    actual = weight_cache.prepared(weight, "view", lambda w: w.squeeze(3))
    assert actual.data_ptr() == weight.data_ptr()
    assert weight_cache.cached_bytes(weight.device) == 0


def test_memory_is_bounded(prepare, monkeypatch):
    weights = [new_weight() for _ in range(4)]
    size = 4 * weights[0].numel()
    monkeypatch.setattr(weight_cache, "limit_bytes", lambda _: 2 * size + size // 2)
    for _ in range(3):
        for weight in weights:
            ask(weight, prepare)
    assert weight_cache.cached_bytes(torch.device("cpu")) == 2 * size
    assert prepare.count == 2 + 2 * 3  # two are cached, two are prepared at every turn
    del weights[0], weight
    gc.collect()
    ask(weights[-1], prepare)
    before = prepare.count
    ask(weights[-1], prepare)
    assert prepare.count == before


def test_inference_tensors_are_prepared_every_time(prepare):
    with torch.inference_mode():
        weight = torch.randn(2, 3, 4, 5)
        ask(weight, prepare)
        weight.add_(1)
        ask(weight, prepare)
    assert prepare.count == 2
    assert not weight_cache._by_weight


def test_what_is_prepared_in_inference_mode_serves_outside(prepare):
    weight = new_weight()
    with torch.inference_mode():
        first = ask(weight, prepare)
    assert not first.is_inference()
    assert ask(weight, prepare) is first
    assert not first.requires_grad


def test_weights_that_are_about_to_change_are_prepared_every_time(prepare):
    weight = new_weight()
    with weight_scopes.repacked():
        with weight_scopes.repacked():
            ask(weight, prepare)
        ask(weight, prepare)
        other = threading.Thread(target=ask, args=(weight, prepare))
        other.start()
        other.join()  # another thread's weights are its own affair: this one was cached
    ask(weight, prepare)
    assert prepare.count == 3
    assert weight_cache.cached_bytes(weight.device) > 0


def test_what_does_not_change_inside_is_cached(prepare):
    weight = new_weight()
    with weight_scopes.repacked(), weight_scopes.repacked(False):
        first = ask(weight, prepare)
    assert ask(weight, prepare) is first
    assert weight_scopes.thread_state.repacked is False


@pytest.mark.parametrize("by_library", [False, True])
def test_autograd_marks_weights_as_changing(by_library, prepare, monkeypatch):
    """Forward under autograd and backward prepare again; without gradients nothing does."""
    seen = SeenProducts(monkeypatch, by_library)
    layer = KSLinear(12, 12, "(2,3,3,2)*(2,3,3,2)", bias=False)
    x = torch.randn(3, 12, requires_grad=True)
    for _ in range(2):  # the library serves what it knows: the second call's products
        seen.clear()
        ask(layer.weights[0], prepare)
        layer(x).sum().backward()
        assert seen.repacked == [True] * 4
        assert not weight_cache._by_weight
    assert seen.by_python == (0 if by_library else 4)
    layer.requires_grad_(False)
    for _ in range(2):
        seen.clear()
        ask(layer.weights[0], prepare)
        with torch.no_grad():
            layer(x)
        layer(x.detach())
        assert seen.repacked == [False] * 4
        assert len(weight_cache._by_weight) == 1
    assert seen.by_python == (0 if by_library else 4)
    assert weight_scopes.thread_state.repacked is False


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}])
def test_every_step_of_an_optimizer_is_noticed(optimizer, kind, prepare):
    """Of fused ones torch counts no versions."""
    weight = nn.Parameter(torch.randn(2, 3, 4, 2))
    weight.grad = torch.ones_like(weight)
    steps = optimizer([weight], lr=0.5, **kind)
    for count in (1, 2, 3):
        ask(weight, prepare)
        ask(weight.transpose(1, 2), Counting())
        assert prepare.count == count
        steps.step()


def test_a_teacher_that_follows_its_student_is_noticed_however_it_is_written_to(prepare):
    """As DINO's does: through .data, after each step."""
    student, teacher = new_weight(), new_weight()
    student.grad = torch.ones_like(student)
    optimizer = torch.optim.SGD([student], lr=0.5)
    for count in (1, 2, 3):
        with torch.no_grad():
            for _ in range(2):
                ask(teacher, prepare)
                weight_cache.cast(teacher, torch.bfloat16)
        assert prepare.count == count
        optimizer.step()
        assert not weight_cache._by_weight
        teacher.data.mul_(0.9).add_(0.1 * student.detach())


def test_what_is_trained_around_stays_cached_over_steps(prepare):
    adapter, base = new_weight(), new_weight()
    adapter.grad = torch.ones_like(adapter)
    optimizer = torch.optim.SGD([adapter], lr=0.5)
    ask(base, prepare)  # before the training, and so not for long
    for _ in range(3):
        optimizer.step()
        with weight_scopes.frozen():
            ask(base, prepare)
            ask(weight_cache.cast(base, torch.bfloat16), prepare)
    assert prepare.count == 1 + 2
    with torch.no_grad():
        base.add_(1)
    ask(base, prepare)
    assert prepare.count == 4


@pytest.mark.parametrize("kind", [{}, {"fused": True}])
def test_a_compiled_step_of_an_optimizer_is_noticed(kind, prepare):
    torch._dynamo.reset()
    weight = nn.Parameter(torch.randn(2, 3, 4, 2))
    weight.grad = torch.ones_like(weight)
    step = torch.compile(torch.optim.SGD([weight], lr=0.5, **kind).step, backend="aot_eager")
    for count in (1, 2, 3):
        ask(weight, prepare)
        assert prepare.count == count
        step()


def test_a_compiled_training_step_forgets_too(prepare):
    """Compiled graphs call the twin, not what autograd runs."""
    weight = torch.randn(2, 3, 4, 2)
    ask(weight, prepare)
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(2)
    ksopt.ops.ks_mm_repacked(torch.randn(5, 16), weight)
    ask(weight, prepare)
    assert prepare.count == 2


def test_an_evaluation_after_training_prepares_again_whatever_the_step_did(prepare):
    layer = KSLinear(12, 12, "(2,3,3,2)*(2,3,3,2)")
    weight = layer.weights[0]
    ask(weight, prepare)
    layer(torch.randn(3, 12)).sum().backward()
    weight.data.sub_(0.1 * weight.grad)  # as old optimizers do, which torch does not count
    ask(weight, prepare)
    assert prepare.count == 2


def test_a_subclass_is_prepared_every_time(prepare):
    class Other(torch.Tensor):
        pass

    weight = torch.randn(2, 3, 4, 5).as_subclass(Other)
    for _ in range(2):
        weight_cache.prepared(weight, "adbc", prepare)
    assert prepare.count == 2
    assert not weight_cache._by_weight


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True


def test_a_captured_graph_prepares_for_itself(prepare, monkeypatch):
    """Its weight may change between replays: what was cached, even if right now, must not go in."""
    weight = torch.randn(2, 3, 4, 5)
    stored = ask(weight, prepare)
    monkeypatch.setattr(weight_cache, "is_capturing", lambda _: True)
    monkeypatch.setattr(weight_cache, "type", lambda _: torch.Tensor, raising=False)
    actual = weight_cache.prepared(weight.as_subclass(OnGpu), "adbc", prepare)
    assert prepare.count == 2
    assert actual is not stored
    assert weight_cache.cached_bytes(torch.device("cpu")) == stored.untyped_storage().nbytes()


def test_cached_forms_of_a_gpus_weight_take_no_memory_of_this_threads_pool(prepare, monkeypatch):
    """As in the first run of what mode="reduce-overhead" captures: nothing may stay in its pool."""
    streams = []
    monkeypatch.setattr(weight_cache, "is_capturing", lambda _: False)
    monkeypatch.setattr(weight_cache, "type", lambda _: torch.Tensor, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: contextlib.nullcontext(streams.append(stream))
    )
    threads = []

    def prepared_here(weight):
        threads.append(threading.get_ident())
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
        return prepare(weight.as_subclass(torch.Tensor))

    weight = torch.randn(2, 3, 4, 5).as_subclass(OnGpu)
    with torch.inference_mode():
        actual = weight_cache.prepared(weight, "adbc", prepared_here)
    assert weight_cache.prepared(weight, "adbc", prepared_here) is actual
    assert streams == ["of cpu"]
    assert threads[0] != threading.get_ident()

    def fails(_):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        weight_cache.prepared(weight, "another form", fails)


def test_a_lazily_negated_view_is_another_weight(prepare):
    weight = torch.randn(2, 3, 4, 5)
    ask(weight, prepare)
    ask(torch._neg_view(weight), prepare)
    assert prepare.count == 2


def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have(prepare):
    weight = new_weight()
    weight_cache.prepared(weight, "adbc", prepare)
    held, done = threading.Event(), threading.Event()

    def hold():
        with weight_cache._lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        child = os.fork()
    if child == 0:
        signal.alarm(10)
        weight_cache.forget(weight)
        os._exit(0)
    done.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0


def test_writes_that_torch_does_not_count_need_a_refresh(prepare):
    weight = new_weight()
    weight_cache.prepared(weight, "adbc", prepare)
    weight.data.mul_(2)
    ksopt.refresh()
    ask(weight, prepare)
    assert prepare.count == 2


def test_many_threads_prepare_and_change_weights_at_once(prepare):
    weights = [new_weight() for _ in range(4)]
    failures = []

    def work(seed):
        try:
            for step in range(60):
                weight = weights[(seed + step) % len(weights)]
                actual = weight_cache.prepared(weight, "adbc", prepare)
                assert actual.shape == (2, 5, 3, 4)
                if step % 7 == 0:
                    weights[seed % len(weights)] = new_weight()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for weight in weights:
        ask(weight, prepare)
