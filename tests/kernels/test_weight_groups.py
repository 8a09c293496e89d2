"""Weights that are prepared together are cached as long as all of them are what they were."""

import gc

import pytest
import torch

import ksopt
from ksopt.kernels import weight_cache, weight_scopes
from ksopt.kernels.weight_groups import is_cached, prepared_together


@pytest.fixture(autouse=True)
def empty_cache():
    ksopt.refresh()
    yield
    ksopt.refresh()


class Packing:
    """Packs weights, and counts how often."""

    def __init__(self, *weights):
        self.weights, self.calls = list(weights), 0

    def pack(self, weights):
        self.calls += 1
        return torch.cat([weight.reshape(-1) for weight in weights])

    def __call__(self, form="packed"):
        packed = prepared_together(self.weights, form, self.pack)
        expected = torch.cat([weight.detach().reshape(-1) for weight in self.weights])
        assert torch.equal(packed, expected)
        return self.calls


def weight(number):
    return torch.full((1, 2, 3, 1), float(number))


def test_they_are_packed_once_a_form():
    packing = Packing(weight(1), weight(2), weight(3))
    assert [packing(), packing(), packing("other"), packing(), packing("other")] == [1, 1, 2, 2, 2]
    assert weight_cache.cached_bytes(torch.device("cpu")) == 2 * 3 * 6 * 4


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_change_of_any_of_them_packs_again_and_drops_the_entry(which):
    packing = Packing(weight(1), weight(2), weight(3))
    for step in range(1, 5):
        assert [packing(), packing()] == [step, step]
        packing.weights[which].add_(1)
    packing()
    assert weight_cache.cached_bytes(torch.device("cpu")) == 3 * 6 * 4


@pytest.mark.parametrize("which", [0, 1])
def test_the_same_memory_by_another_name_packs_again(which):
    """It counts versions of its own, from 0."""
    packing = Packing(weight(1), weight(2))
    packing()
    packing.weights[which].data.mul_(3)
    packing.weights[which] = packing.weights[which].data
    assert packing.weights[which]._version == 0
    assert packing() == 2


@pytest.mark.parametrize("which", [0, 1])
def test_another_weight_in_ones_place_packs_again(which):
    packing = Packing(weight(1), weight(2))
    packing()
    for number in range(3, 8):  # its memory is likely to be that of the one before
        packing.weights[which] = None
        gc.collect()
        packing.weights[which] = weight(number)
        packing()


@pytest.mark.parametrize("which", [0, 1])
def test_a_training_step_and_refresh_forget_what_was_packed(which):
    packing = Packing(*(torch.nn.Parameter(weight(number)) for number in (1, 2)))
    packing()
    packing.weights[which].data.fill_(7)  # which torch does not count
    weight_cache.forget(packing.weights[which])  # as the product of a training step does
    assert packing() == 2
    packing.weights[which].data.fill_(9)
    ksopt.refresh()
    assert packing() == 3


def test_views_of_a_weight_are_distinguished_and_follow_it():
    base = torch.arange(24.0).reshape(2, 2, 3, 2)
    packing = Packing(base[:1], base[1:])
    assert [packing(), packing()] == [1, 1]
    packing.weights = [base[1:], base[:1]]
    assert packing() == 2
    base.add_(1)
    assert packing() == 3


def test_groups_that_share_a_weight_are_cached_side_by_side():
    shared, second, third = weight(1), weight(2), weight(3)
    one, other = Packing(shared, second), Packing(shared, third)
    for _ in range(3):
        assert [one(), other()] == [1, 1]
    assert is_cached(one.weights, "packed")
    third.add_(1)
    assert [one(), other()] == [1, 2]
    assert weight_cache.cached_bytes(torch.device("cpu")) == 2 * 2 * 6 * 4
    shared.add_(1)
    assert not is_cached(one.weights, "packed")
    assert [one(), other()] == [2, 3]
    assert weight_cache.cached_bytes(torch.device("cpu")) == 2 * 2 * 6 * 4
    other.weights[1] = third = None  # nobody can ask for what was made of it
    gc.collect()
    one.weights[1] = weight(5)
    one()
    assert weight_cache.cached_bytes(torch.device("cpu")) <= 2 * 2 * 6 * 4


def test_slices_of_one_parameter_are_cached_side_by_side():
    left, right = (torch.nn.Parameter(torch.randn(3, 1, 2, 3, 1)) for _ in range(2))
    layers = [Packing(left[at].detach(), right[at].detach()) for at in range(3)]
    assert [layer() for _ in range(2) for layer in layers] == [1] * 6


def test_nothing_is_cached_of_weights_that_change():
    packing = Packing(weight(1), weight(2))
    with weight_scopes.repacked():
        assert [packing(), packing()] == [1, 2]
    assert weight_cache.cached_bytes(torch.device("cpu")) == 0
