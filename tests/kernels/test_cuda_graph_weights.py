"""Weights that recorded CUDA graphs read, with a graph simulated on a CPU.

A played graph reads, at each replay, the tensors that it saw while it was recorded.
"""

import gc

import pytest
import torch

import ksopt
from ksopt.kernels import cuda_graph_weights, weight_cache, weight_groups
from ksopt.kernels.cuda_graph_weights import RecordedWeights


class Played:
    """A function of a weight and an input that records a graph at its second call."""

    def __init__(self, monkeypatch, prepare):
        self.prepare, self.calls, self.graph = prepare, 0, None
        self.capturing = False
        monkeypatch.setattr(
            weight_cache,
            "is_recorded",
            lambda weight: self.capturing and weight_cache.thread_state.recorder is not None,
        )

    def __call__(self, *arguments):
        self.calls += 1
        if self.calls == 1:
            return self.prepare(*arguments).clone()
        if self.graph is None or self.graph[0] != [one.data_ptr() for one in arguments]:
            self.capturing = True
            read = self.prepare(*arguments)
            self.capturing = False
            self.graph = [one.data_ptr() for one in arguments], read
        return self.graph[1].clone()


def doubled(weight):
    return weight_cache.prepared(weight.T, "double", lambda one: (2 * one).contiguous())


def side_by_side(one, other):
    return weight_groups.prepared_together(
        [one, other.T], "together", lambda both: torch.cat([one.flatten() for one in both])
    )


def cast_and_doubled(weight):
    half = weight_cache.cast(weight, torch.bfloat16)
    return weight_cache.prepared(half, "double", lambda one: 2 * one)


PREPARED = {
    "one": (doubled, lambda one, other: 2 * one.T, 1),
    "two": (side_by_side, lambda one, other: torch.cat([one.flatten(), other.T.flatten()]), 2),
    "cast": (cast_and_doubled, lambda one, other: 2 * one.bfloat16(), 1),
}


@pytest.fixture(params=PREPARED)
def played(request, monkeypatch):
    """A recorded function, its weights, what it must return, and the function that plays."""
    prepare, expected, count = PREPARED[request.param]
    weights = [torch.nn.Parameter(torch.randn(3, 3)) for _ in range(count)]
    player = Played(monkeypatch, prepare)
    function = RecordedWeights(player)
    with torch.no_grad():
        for _ in range(2):
            function(*weights)
        yield function, weights, lambda: expected(weights[0], weights[-1]), player


def test_a_graph_reads_what_was_prepared_before(played):
    function, weights, expected, player = played
    read = player.graph[1]
    assert torch.equal(function(*weights), expected())
    assert player.graph[1] is read


def test_a_weight_that_was_written_is_prepared_again_in_place(played):
    function, weights, expected, player = played
    place = player.graph[1].data_ptr()
    for weight in weights:
        weight.add_(1)
        assert torch.equal(function(*weights), expected())
    assert player.graph[1].data_ptr() == place


def test_nothing_is_prepared_while_weights_stay(played, monkeypatch):
    function, weights, _, _ = played
    function(*weights)
    prepared = []
    for one in function._preparations:
        monkeypatch.setattr(type(one), "refresh", lambda *_: prepared.append(1))
    function(*weights)
    assert prepared == []


def test_refresh_prepares_again_what_torch_does_not_count(played):
    function, weights, expected, _ = played
    weights[0].data.add_(1)
    ksopt.refresh()
    assert torch.equal(function(*weights), expected())


def test_another_parameter_of_the_same_memory_is_prepared_again(played):
    function, weights, expected, _ = played
    weights[0] = torch.nn.Parameter(weights[0].data)
    weights[0].data.add_(1)
    gc.collect()
    assert torch.equal(function(*weights), expected())
    weights[0].add_(1)
    assert torch.equal(function(*weights), expected())


@pytest.mark.parametrize("offset", [0, 4])
def test_a_second_models_weight_at_the_address_of_a_deleted_one(monkeypatch, offset):
    """The trees of CUDA graphs compare addresses, and replay the first model's graph."""
    memory = torch.randn(16)

    def at_the_same_address(start):
        storage = torch.from_numpy(memory.numpy()[4 - start :])
        return torch.nn.Parameter(storage.as_strided((3, 3), (3, 1), start))

    player = Played(monkeypatch, doubled)
    function = RecordedWeights(player)
    weight = at_the_same_address(0)
    with torch.no_grad():
        for _ in range(2):
            function(weight)
        read = player.graph[1]
        del weight
        gc.collect()
        memory.mul_(-3)
        weight = at_the_same_address(offset)
        assert torch.equal(function(weight), 2 * weight.T)
        weight.add_(1)
        assert torch.equal(function(weight), 2 * weight.T)
        assert player.graph[1] is read


def test_other_memory_and_back(played):
    function, weights, expected, _ = played
    first, second = weights[0].data, torch.randn(3, 3)
    for data in (second, first, second):
        weights[0].data = data
        weights[0].add_(1)
        assert torch.equal(function(*weights), expected())


def test_what_no_argument_owns_is_prepared_by_the_graph(monkeypatch):
    weight = torch.randn(3, 3)
    player = Played(monkeypatch, lambda _: doubled(weight))
    function = RecordedWeights(player)
    x = torch.randn(2)
    for _ in range(2):
        function(x)
    assert function._preparations == []
    assert not any(
        player.graph[1].data_ptr() == stored.prepared.data_ptr()
        for forms in weight_cache._by_weight.values()
        for stored in forms.cached.values()
    )


def test_arguments_do_not_stay_alive(monkeypatch):
    weight, x = torch.nn.Parameter(torch.randn(3, 3)), torch.randn(2)
    function = RecordedWeights(Played(monkeypatch, lambda weight, x: doubled(weight)))
    with torch.no_grad():
        for _ in range(3):
            function(weight, x)
    alive = torch.multiprocessing.reductions.StorageWeakRef(weight.untyped_storage())
    del weight
    gc.collect()
    assert alive.expired()


@pytest.fixture(params=PREPARED)
def captured(request, monkeypatch):
    """What a graph of the user's reads, its weights, and what it must read."""
    prepare, expected, count = PREPARED[request.param]
    weights = [torch.nn.Parameter(torch.randn(3, 3)) for _ in range(count)]
    player = Played(monkeypatch, prepare)
    with torch.no_grad(), ksopt.prepared_weights():
        for _ in range(2):
            player(*weights)
        yield player, weights, lambda: expected(weights[0], weights[-1])


def test_a_graph_of_ones_own_reads_what_was_prepared_before(captured):
    player, _, expected = captured
    read = player.graph[1]
    assert torch.equal(read, expected())
    assert any(one.prepared is read for one in cuda_graph_weights._captured._preparations)


def test_refresh_prepares_again_what_a_graph_of_ones_own_reads(captured):
    player, weights, expected = captured
    read, place = player.graph[1], player.graph[1].data_ptr()
    for weight in weights:
        weight.add_(1)
    ksopt.refresh()
    assert torch.equal(read, expected())
    assert read.data_ptr() == place
    weights[0].data.mul_(3)
    ksopt.refresh()
    assert torch.equal(read, expected())


def test_a_second_graph_reads_the_same_preparation(captured):
    player, weights, _ = captured
    count = len(cuda_graph_weights._captured._preparations)
    read, player.graph = player.graph[1], None
    player(*weights)
    assert player.graph[1] is read
    assert len(cuda_graph_weights._captured._preparations) == count


def test_what_a_graph_of_ones_own_reads_lives_as_long_as_its_weights(monkeypatch):
    weight = torch.nn.Parameter(torch.randn(3, 3))
    player = Played(monkeypatch, cast_and_doubled)
    with torch.no_grad(), ksopt.prepared_weights():
        for _ in range(2):
            player(weight)
    ksopt.refresh()
    read = torch.multiprocessing.reductions.StorageWeakRef(player.graph[1].untyped_storage())
    player.graph = None
    gc.collect()
    assert not read.expired()
    del weight
    gc.collect()
    assert read.expired()
    assert cuda_graph_weights._captured._preparations == []


def test_what_was_not_prepared_before_is_prepared_by_the_graph(monkeypatch):
    weight = torch.nn.Parameter(torch.randn(3, 3))
    player = Played(monkeypatch, doubled)
    player.calls = 1
    with torch.no_grad(), ksopt.prepared_weights():
        player(weight)
    assert torch.equal(player.graph[1], 2 * weight.T)
    assert cuda_graph_weights._captured._preparations == []


def test_a_compiled_function_inside_the_scope_updates_its_own_graphs(monkeypatch):
    weight = torch.nn.Parameter(torch.randn(3, 3))
    function = RecordedWeights(Played(monkeypatch, doubled))
    with torch.no_grad(), ksopt.prepared_weights():
        for _ in range(2):
            function(weight)
        weight.add_(1)
        assert torch.equal(function(weight), 2 * weight.T)
    assert cuda_graph_weights._captured._preparations == []
