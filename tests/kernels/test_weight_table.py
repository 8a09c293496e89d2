"""Notes of prepared weights: there while they are true, void at once when they are not."""

import gc
import shutil
import weakref

import pytest
import torch
from torch import nn

from ksopt import KSLinear
from ksopt.jit import host
from ksopt.kernels import weight_cache, weight_scopes, weight_table

SHAPE = (2, 3, 4, 5)
FORM = weight_table.number_of("adbc", SHAPE, "float32")


def pack(weight):
    return weight.permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="module", autouse=True)
def library():
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler on this machine")
    assert host.load() is None


@pytest.fixture(autouse=True)
def empty_cache():
    weight_cache.refresh()
    yield
    weight_cache.refresh()


def new_weight():
    return nn.Parameter(torch.randn(SHAPE))


def ask(weight, form="adbc", number=FORM):
    return weight_table.prepared(weight, form, number, pack)


def at_once(weight, owner=None):
    """Where what is at hand of a weight is: always what preparing it now would give."""
    actual = weight_table.of(weight, owner)
    for prepared, form in actual:
        assert form == FORM
        torch.testing.assert_close(prepared, pack(weight.detach()), rtol=0, atol=0)
    return [prepared.data_ptr() for prepared, _ in actual]


def test_what_was_prepared_is_at_hand_until_the_weight_changes():
    weight = new_weight()
    assert at_once(weight) == []
    prepared = ask(weight)
    assert at_once(weight) == [prepared.data_ptr()]
    with torch.no_grad():
        weight.add_(1)
    assert at_once(weight) == []
    again = ask(weight)
    assert at_once(weight) == [again.data_ptr()]


def load_other_values(weight):
    holder = nn.Module()
    holder.weight = weight
    holder.load_state_dict({"weight": torch.randn(SHAPE)})


CHANGES = {
    "in place": lambda w: w.add_(1),
    "an element": lambda w: w.view(-1).__setitem__(3, 7.0),
    "through a view": lambda w: w[1].mul_(2),
    "a state_dict": load_other_values,
    "other data": lambda w: setattr(w, "data", torch.randn(SHAPE)),
    "another dtype": lambda w: setattr(w, "data", w.data.double()),
    "other strides": lambda w: setattr(w, "data", torch.randn(SHAPE[::-1]).permute(3, 2, 1, 0)),
    "elsewhere in its memory": lambda w: setattr(
        w, "data", torch.as_strided(w.data, (1, 3, 4, 5), (60, 20, 5, 1), 60)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_at_once(change):
    weight = new_weight()
    ask(weight)
    with torch.no_grad():
        CHANGES[change](weight)
    assert at_once(weight) == []


def test_what_packed_forgets_is_not_at_hand(monkeypatch):
    weight = new_weight()
    for forgetting in (weight_cache.refresh, lambda: weight_cache.forget(weight)):
        ask(weight)
        assert len(at_once(weight)) == 1
        forgetting()
        assert at_once(weight) == []
    monkeypatch.setattr(weight_cache, "limit_bytes", lambda _: 0)
    ask(weight)
    assert at_once(weight) == []


def test_a_written_weight_is_prepared_again_after_a_refresh():
    """What torch does not count is the user's to tell."""
    layer = KSLinear(12, 12, "(2,3,3,2)*(2,3,3,2)")
    weight = layer.weights[0]
    number = weight_table.number_of("adbc", tuple(weight.shape), "float32")
    before = weight_table.prepared(weight, "adbc", number, pack)
    weight.data.mul_(2)
    weight_cache.refresh()
    assert weight_table.of(weight) == []
    after = weight_table.prepared(weight, "adbc", number, pack)
    torch.testing.assert_close(after, 2 * before)


def test_memory_that_is_reused_by_another_weight_is_not_mistaken():
    """The same address, shape and version, as an allocator may give them: another storage."""
    memory = bytearray(4 * 2 * 3 * 4 * 5)

    def at_the_same_address(value):
        values = torch.frombuffer(memory, dtype=torch.float32).view(SHAPE)
        return values.fill_(value).detach()

    weight = nn.Parameter(at_the_same_address(0.0))
    seen = set()
    for count in range(1, 5):
        ask(weight)
        assert len(at_once(weight)) == 1
        seen.add((weight.data_ptr(), weight._version))
        weight.data = torch.empty(0)
        gc.collect()
        weight.data = at_the_same_address(float(count))
        assert at_once(weight) == []
    assert len(seen) == 1


def test_notes_go_with_the_weight_and_keep_nothing_alive():
    weight = new_weight()
    prepared = weakref.ref(ask(weight))
    assert prepared() is not None
    del weight
    gc.collect()
    assert prepared() is None
    assert weight_cache.cached_bytes(torch.device("cpu")) == 0
    for _ in range(20):  # at addresses that have held others
        assert at_once(new_weight()) == []


def test_what_was_prepared_while_weights_change_is_not_noted():
    weight = new_weight()
    with weight_scopes.repacked():
        held = ask(weight)
    assert at_once(weight) == []
    assert held.shape == (2, 5, 3, 4)


def test_only_ordinary_weights_are_noted():
    weight = torch.randn(SHAPE).as_subclass(type("Other", (torch.Tensor,), {}))
    torch.testing.assert_close(ask(weight), pack(weight))
    assert weight_table.of(weight) == []


def test_weights_at_one_address_are_distinguished_by_their_strides():
    """One matrix as it is and transposed: the same address, shape and version."""
    stored = nn.Parameter(torch.randn(2, 3, 3, 5))
    one, other = stored.view(2, 3, 3, 5), stored.transpose(1, 2)
    number = weight_table.number_of("adbc", one.shape, "float32")
    prepared = [ask(weight, number=number) for weight in (one, other)]
    for weight, expected in zip((one, other), prepared, strict=True):
        ((actual, _),) = weight_table.of(weight)
        assert actual.data_ptr() == expected.data_ptr()
        torch.testing.assert_close(actual, pack(weight.detach()), rtol=0, atol=0)


def test_inference_tensors_are_not_noted():
    with torch.inference_mode():
        weight = torch.randn(SHAPE)
        ask(weight)
        assert weight_table.of(weight) == []


def test_parts_of_a_fused_weight_are_at_hand_by_their_place():
    fused = nn.Parameter(torch.randn(3, *SHAPE))
    with torch.no_grad():
        for index in range(3):
            ask(fused[index])
        for index in range(3):
            assert len(at_once(fused[index])) == 1
        fused[1].mul_(2)  # of the memory that all share
        assert [at_once(fused[index]) for index in range(3)] == [[], [], []]


def test_a_view_that_does_not_know_its_owner_counts_the_owners_versions():
    owner = new_weight()
    view = torch.empty(0).set_(owner.data)  # the same memory, versions of its own
    with weight_scopes.owned_by(owner):
        ask(view)
    assert len(at_once(view, owner)) == 1
    assert at_once(view) == []
    with torch.no_grad():
        owner.mul_(3)
    assert at_once(view, owner) == []
    with weight_scopes.owned_by(owner):
        ask(view)
    assert len(at_once(view, owner)) == 1


def test_forms_are_at_hand_side_by_side():
    weight = new_weight()
    ask(weight)
    other = weight_table.number_of("another", SHAPE, "float32")
    ask(weight, "another", other)
    assert [form for _, form in weight_table.of(weight)] == [other, FORM]
    ask(weight)  # again: it is noted already
    assert [form for _, form in weight_table.of(weight)] == [other, FORM]
    many = [weight_table.number_of(str(i), SHAPE, "float32") for i in range(30)]
    for number in many:
        ask(weight, str(number), number)
    assert [form for _, form in weight_table.of(weight)] == [*reversed(many), other, FORM]
    with torch.no_grad():
        weight.add_(1)
    ask(weight)
    assert [form for _, form in weight_table.of(weight)] == [FORM]


def test_entries_from_before_the_library_was_loaded_are_noted_when_they_serve(monkeypatch):
    weight = new_weight()
    with monkeypatch.context() as patch:
        patch.setattr(weight_table, "_note_in_library", None)
        ask(weight)
    assert at_once(weight) == []
    prepared = ask(weight)
    assert at_once(weight) == [prepared.data_ptr()]


def test_numbers_tell_forms_shapes_and_dtypes_apart():
    numbers = {
        weight_table.number_of(form, shape, dtype)
        for form in ("a", "b")
        for shape in ((1, 2, 3, 4), (1, 2, 4, 3))
        for dtype in ("float32", "float16")
    }
    assert len(numbers) == 8
    assert 0 not in numbers
