"""Whole layers by the host library's own kernels, as compiled graphs of inference call them.

The driver is played. Every call is watched: Python of ksopt's is none of a hit's.
"""

import threading

import pytest
import torch
from played_driver import variable
from played_layer import EVENTS, PLAIN, ROWS, Factors, Whole
from seen_products import Python, by_pythons_kernels
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ksopt import ops
from ksopt.errors import InvalidInputError, KsoptError
from ksopt.kernels import plan_autotuner, weight_cache, weight_scopes

view = torch._C._dynamo.guards._reinterpret_tensor  # what Inductor calls


class Graph:
    """A layer on the played device, as a compiled graph calls it.

    Args:
        device: the layer.
        writes: whether the graph has planned the memory of the result.
    """

    def __init__(self, device, writes):
        self.device, self.writes = device, writes

    def __call__(self, x=None, out=None, **changes):
        """y, and whether it took Python."""
        x = self.device.x if x is None else x
        weights, *around = self.device.arguments()
        names = ("bias", "residual", "activation", "batch_last", "siblings")
        arguments = {"weights": weights, **dict(zip(names, around, strict=True)), **changes}
        arguments.setdefault("owners", list(arguments["weights"]))
        if self.writes and out is None:
            out = torch.full((*x.shape[:-1], self.device.features), torch.nan)
        with Python() as python:
            if self.writes:
                assert ops.ks_chain_out(x, **arguments, out=out) is None
                y = out
            else:
                y = ops.ks_chain_inner(x, **arguments)
        return y, bool(python.entered)

    def run(self, **arguments):
        """Checks y; whether it took Python."""
        y, takes_python = self(**arguments)
        self.device.check(y)
        return takes_python

    def warm(self):
        """Until the layer is known: its factors are chosen for when they are first multiplied."""
        for _ in range(2):
            self.run()
        assert not self.run()


KINDS = {
    "one launch": (Whole, {}),
    "one launch per factor": (Factors, {}),
    "siblings in one launch": (Whole, {"siblings": 3, "residual": True}),
    "siblings by factors": (Factors, {"siblings": 2, "residual": True}),
    "a gate in one launch": (Whole, {"siblings": 2, "residual": True, "gated": True}),
    "a gate by factors": (Factors, {"siblings": 2, "residual": True, "gated": True}),
}


@pytest.fixture(params=[False, True], ids=["ks_chain_inner", "ks_chain.out"])
def writes(request):
    return request.param


@pytest.fixture(params=KINDS)
def graph(serving, monkeypatch, request, writes):
    kind, layer = KINDS[request.param]
    return Graph(kind(serving, monkeypatch, **layer), writes)


@pytest.fixture(params=[Whole, Factors])
def plain(serving, monkeypatch, request, writes):
    return Graph(request.param(serving, monkeypatch), writes)


def test_a_known_layer_takes_no_python(graph):
    assert graph.run()
    graph.warm()
    device, launches = graph.device, variable(graph.device.library, "launches")
    decided, packs, before = device.decided, device.packs, launches.value
    for rows in (ROWS, 150):  # of the same range of batches
        device.x = torch.randn(rows, PLAIN.in_features)
        device.residual = None if device.residual is None else torch.randn(rows, device.features)
        assert not graph.run()
    assert (device.decided, device.packs) == (decided, packs)
    assert launches.value == before + 2 * device.launches


def test_results_are_new_memory_and_no_view(plain):
    plain.warm()
    y, _ = plain()
    assert y.is_contiguous()
    assert not y._is_view()
    other, _ = plain()
    assert y.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("event", EVENTS)
def test_a_weight_that_has_changed_is_packed_again_and_known_again(plain, event):
    plain.warm()
    event(plain.device)
    assert plain.run()
    plain.warm()


@pytest.mark.parametrize("which", [-1, -2, 0])
def test_a_change_of_any_of_several_weights_is_noticed(graph, which):
    graph.warm()
    graph.device.weights[which].mul_(-2)
    assert graph.run()
    graph.warm()


def test_weights_in_another_order_are_others(serving, monkeypatch, writes):
    graph = Graph(Whole(serving, monkeypatch, siblings=3), writes)
    graph.warm()
    others = graph.device.others
    others[:2], others[2:] = others[2:], others[:2]
    assert graph.run()
    graph.warm()


def test_views_are_known_by_their_owners(graph):
    """Inductor gives a new tensor at each call, and the parameter that it is a view of."""
    device = graph.device

    def run(owners):
        weights = [view(one, one.shape, one.stride(), 0) for one in device.weights]
        return graph.run(weights=weights, owners=owners)

    for _ in range(2):
        run(device.weights)
    packs = device.packs
    assert not run(device.weights)
    assert device.packs == packs
    device.weights[1].mul_(2)
    assert run(device.weights)
    assert not run(device.weights)
    packs = device.packs
    assert not run(None)  # whose views? They are packed for this call
    assert device.packs > packs


def test_weights_that_are_marked_as_changing(plain):
    """Nothing is taken that was cached of them, for torch may not have counted the change."""
    plain.warm()
    packs = plain.device.packs
    with weight_scopes.repacked():
        plain.device.weights[0].data.mul_(3)
        plain.run()
        with weight_scopes.repacked(False):
            plain.device.weights[0].data.div_(3)
            assert not plain.run()
        plain.device.weights[1].data.mul_(3)
        plain.run()
    assert plain.device.packs > packs
    plain.device.weights[1].data.div_(3)
    assert not plain.run()


@pytest.mark.parametrize("has_owners", [True, False])
def test_weights_that_change_are_packed_by_a_launch(graph, has_owners):
    """Those of a scope that says so, and those that a graph computes, which have no owner."""
    graph.warm()
    device = graph.device
    owners = {} if has_owners else {"owners": None}
    for _ in range(2):
        with weight_scopes.repacked(has_owners):
            graph.run(**owners)
    is_whole = isinstance(device, Whole)
    packs, launches = (variable(device.library, name) for name in ("packs", "launches"))
    before = packs.value, launches.value
    packed_by_python = device.call.packs if is_whole else 0
    with weight_scopes.repacked(has_owners):
        for factor in (3, -0.5):
            device.weights[0].data.mul_(factor)
            device.weights[-1].data.add_(factor)
            others = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in device.weights]
            assert not graph.run(weights=others, **owners)
    each = 1 if is_whole else len(device.weights)
    assert (packs.value, launches.value) == (before[0] + 2 * each, before[1] + 4 * each)
    if is_whole:
        assert device.call.packs == packed_by_python


def test_python_sets_the_state_of_a_thread_once(plain):
    plain.warm()
    took_python = []

    def multiply():
        took_python.extend(plain()[1] for _ in range(3))

    thread = threading.Thread(target=torch.no_grad()(multiply))
    thread.start()
    thread.join()
    assert took_python == [True, False, False]


def test_what_is_known_is_for_such_operands(serving, monkeypatch, writes, deterministic):
    graph = Graph(Whole(serving, monkeypatch), writes)
    graph.warm()
    device = graph.device
    x = device.x
    for other in (x[:100], x[:0], x.t().contiguous().t(), torch.randn(6401)[1:].view(ROWS, 32)):
        device.x = other
        assert graph.run()
    device.x = x
    with deterministic():
        assert graph.run()
    device.residual = torch.randn(ROWS, PLAIN.out_features)
    assert graph.run()  # another epilogue
    device.residual = None
    assert not graph.run()


def test_what_is_forgotten_is_not_known(plain):
    plain.warm()
    plan_autotuner.forget()
    assert plain.run()
    assert not plain.run()


def test_what_does_not_fit_is_refused_in_the_same_words(plain, monkeypatch):
    plain.warm()
    weights, bias = plain.device.weights, plain.device.layer.bias
    for change in (
        {"x": torch.randn(ROWS, 31)},
        {"x": torch.randn(())},
        {"x": plain.device.x.to_sparse()},
        {"bias": bias[1:]},
        {"bias": bias.double()},
        {"weights": [weights[0].int(), weights[1]]},
        {"weights": [weights[0][0], weights[1]]},
        {"weights": []},
        {"residual": torch.randn(ROWS, 31)},
        {"activation": "tanh"},
        {"siblings": 0},
        {"siblings": 3},
    ):
        out = torch.empty(ROWS, PLAIN.out_features)
        with pytest.raises(KsoptError) as refused:
            plain(out=out, **change)
        with monkeypatch.context() as patch:
            by_pythons_kernels(patch)
            plain.device.library.ops.serve_products(False)
            with pytest.raises(KsoptError) as by_python:
                plain(out=out, **change)
            plain.device.library.ops.serve_products(True)
        assert str(refused.value) == str(by_python.value)


def test_lazily_negated_operands_have_the_memory_of_others(plain):
    plain.warm()
    device = plain.device
    expected, _ = plain(device.x, weights=[-device.weights[0], device.weights[1]])
    for _ in range(2):
        y, _ = plain(weights=[torch._neg_view(device.weights[0]), device.weights[1]])
        torch.testing.assert_close(y, expected)
        y, _ = plain(torch._neg_view(device.x))
        torch.testing.assert_close(y, expected)


def test_a_training_step_drops_the_entries_of_all(serving, monkeypatch, writes):
    """Nothing is read of weights that were written unseen behind it."""
    graph = Graph(Whole(serving, monkeypatch), writes)
    graph.warm()
    second = graph.device.weights[1]
    weight_cache.forget(second)
    second.data.add_(1)
    assert graph.run()
    graph.warm()


class TestWriting:
    """What holds of memory that is given."""

    @pytest.fixture
    def writes(self):
        return True

    def test_it_is_written_straight_and_autograd_notices(self, plain):
        plain.warm()
        out = torch.zeros(ROWS, PLAIN.out_features)
        with torch.enable_grad():
            y = out * torch.ones_like(out, requires_grad=True)
        version = out._version
        assert not plain.run(out=out)
        assert out._version > version
        with (
            torch.enable_grad(),
            pytest.raises(RuntimeError, match="modified by an inplace operation"),
        ):
            y.sum().backward()

    def test_other_memory_is_copied_into_by_python(self, plain):
        plain.warm()
        elements = ROWS * PLAIN.out_features
        for out in (
            torch.empty(PLAIN.out_features, ROWS).t(),
            torch.empty(elements + 1)[1:].view(ROWS, -1),
        ):
            assert plain.run(out=out)
        with pytest.raises(InvalidInputError, match="out has shape"):
            plain(out=torch.empty(ROWS, 31))
        x = plain.device.x.clone()
        y, takes_python = plain(x, out=x)
        assert takes_python
        plain.device.check(y)

    def test_no_gradient_is_lost_without_a_word(self, plain):
        plain.warm()
        plain.device.x.requires_grad_()
        with torch.enable_grad(), pytest.raises(InvalidInputError, match=r"torch\.no_grad"):
            plain()
        assert not plain.run()


def test_fakes_and_traces_hold_it(serving, monkeypatch):
    graph = Graph(Whole(serving, monkeypatch), writes=False)
    graph.warm()
    device = graph.device

    def run(x, *weights):
        return ops.ks_chain_inner(x, list(weights), *device.arguments()[1:], list(weights))

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert run(device.x, *device.weights).shape == (ROWS, PLAIN.out_features)
    traced = make_fx(run)(device.x, *device.weights)
    assert ops.ks_chain_inner in [node.target for node in traced.graph.nodes]
    device.check(traced(device.x, *device.weights))
    with torch.inference_mode():
        y, takes_python = graph()
        assert y.is_inference()
        assert not takes_python
        device.check(y)


def test_nothing_is_cached_of_weights_that_a_graph_computes(serving, monkeypatch):
    """Inductor may write the next ones into their memory, and counts no version."""
    graph = Graph(Whole(serving, monkeypatch), writes=False)
    graph.warm()
    device = graph.device
    for _ in range(3):
        packs = device.packs
        graph.run(owners=None)
        assert device.packs > packs
