"""PyTorch's ways to multiply through the host library, on a CPU, beside float64: every layout of
operands that they take, and what is left to Python.

The driver that is played has no transposing kernels: those are tested on a GPU.
"""

import pytest
import torch
from played_driver import MULTIPLY_AS_IT_IS, known, multiplies_by, note, variable
from torch import nn

from ksopt import ops
from ksopt.batched import Matrices
from ksopt.kernels import weight_cache, weight_scopes, weight_table
from ksopt.kernels.autotuner import Choice, Decision, _preparing
from ksopt.kernels.backends import cuda
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.families.common.pytorch_ops import FILLED, entry, multiplier
from ksopt.kernels.families.expanded_bmm import Config, ExpandedProduct
from ksopt.kernels.launcher import HostLauncher
from ksopt.kernels.problem import Geometry, Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

PATTERNS = [
    Pattern(1, 6, 5, 1),
    Pattern(4, 3, 5, 1),
    Pattern(1, 3, 5, 4),
    Pattern(2, 3, 5, 4),
    Pattern(2, 1, 5, 4),
    Pattern(3, 4, 2, 8),
    Pattern(1, 5, 2, 8),
    Pattern(2, 3, 1, 4),
    Pattern(1, 3, 1, 4),
    Pattern(3, 3, 1, 1),
]
WAYS = (
    *("bmm", "bmm_paper", "bmm_loop", "einsum", "einsum_weight_first", "bmm_weight_first", "conv"),
    *("expand", "dense"),
)
ROWS = 8  # a multiple of 16 bytes: batch last, rows of features begin aligned


def x_of(pattern, last, dims=2):
    features = 4 * pattern.in_features  # a multiple of 16 bytes, whatever the pattern
    pattern = Pattern(4 * pattern.a, pattern.b, pattern.c, pattern.d)
    assert features == pattern.in_features
    batch = (ROWS,) if dims == 2 else (2, ROWS // 2)
    shape = (features, *batch) if last else (*batch, features)
    return torch.randn(shape), pattern


def as_it_is(values):
    return values


def transposed(values):
    """As in a backward pass: the columns lie side by side where d = 1."""
    return values.transpose(1, 2).contiguous().transpose(1, 2)


def by_groups(values):
    """Stored as [a, d, b, c]: what authors keep."""
    return values.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)


def padded(values):
    a, b, c, d = values.shape
    memory = torch.zeros(a, b + 1, c + 2, d + 1)
    memory[:, :b, :c, :d] = values
    return memory[:, :b, :c, :d]


STORED = [as_it_is, transposed, by_groups, padded]


def check(y, x, weight, last):
    layout = "batch_last" if last else "batch_first"
    expected = ks_reference(x.double(), weight.detach().double(), layout)
    assert y.is_contiguous()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def results(x, pattern, last):
    """Poisoned memory for y."""
    shape = list(x.shape)
    shape[0 if last else -1] = pattern.out_features
    return torch.full(shape, torch.nan)


def is_offered(way, p, last):
    """Whether it is another way than one of the others, and multiplies in this layout."""
    if way == "bmm_loop":
        return last and p.a > 1 and p.d > 1
    if way == "bmm_weight_first":
        return not last and p.d > 1
    if way == "conv":
        return p.d == 1
    return way not in ("expand", "dense") or p.d > 1


OFFERED = [
    (way, p, last)
    for way in WAYS
    for p in PATTERNS
    for last in (False, True)
    if is_offered(way, Pattern(4 * p.a, p.b, p.c, p.d), last)
]


def know(played, x, weight, last, table_entry, repacked=True, any_rows=False):
    """Let the table know of an entry; weights are prepared again where they change."""
    rest = (table_entry.plan, table_entry.form, table_entry.kind, repacked, any_rows)
    played.ops.know(x, weight, last, True, repacked, *rest)


@pytest.mark.sweep
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("by_groups", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("way", "small", "last"), OFFERED, ids=str)
def test_products_of_weights_that_are_prepared_where_they_have_to_be(
    played, way, small, stored, last, dims, by_groups
):
    x, pattern = x_of(small, last, dims)
    weight = stored(torch.randn(pattern.weight_shape))
    know(played, x, weight, last, entry(way, pattern, last, 5, by_groups))
    check(known(played, x, weight, last, repacked=True), x, weight, last)
    out = results(x, pattern, last)
    y = known(played, x, weight, last, repacked=True, out=out)
    assert y.data_ptr() == out.data_ptr()
    check(out, x, weight, last)
    assert known(played, x, weight, last) is None  # that of cached weights


@pytest.mark.parametrize("stored", [as_it_is, padded])
def test_a_cached_weight_that_no_product_can_read_has_to_be_at_hand(played, stored):
    x, pattern = x_of(Pattern(2, 3, 5, 4), last=False)
    weight = stored(torch.randn(pattern.weight_shape))
    know(played, x, weight, False, entry("bmm", pattern, False, 5), repacked=False)
    assert known(played, x, weight) is None
    prepared = Matrices.of(pattern).prepare(weight)
    note(played, weight, prepared, form=6)
    assert known(played, x, weight) is None
    note(played, weight, prepared, form=5)
    check(known(played, x, weight), x, weight, False)


@pytest.mark.parametrize("way", ["bmm", "einsum", "expand", "dense"])
@pytest.mark.parametrize("by_groups", [False, True])
@pytest.mark.parametrize("small", PATTERNS, ids=str)
def test_one_row(played, small, by_groups, way):
    pattern = Pattern(4 * small.a, small.b, small.c, small.d)
    weight = torch.randn(pattern.weight_shape)
    for x in (torch.randn(1, pattern.in_features), torch.randn(pattern.in_features)):
        know(played, x, weight, False, entry(way, pattern, False, 5, by_groups))
        check(known(played, x, weight, repacked=True), x, weight, False)
        out = results(x, pattern, False)
        check(known(played, x, weight, repacked=True, out=out), x, weight, False)


@pytest.mark.parametrize("way", ["expand", "dense"])
def test_zeros_times_infinity_are_left_to_python(played, way):
    x, pattern = x_of(Pattern(2, 3, 5, 4), last=False)
    weight = torch.randn(pattern.weight_shape)
    know(played, x, weight, False, entry(way, pattern, False, 5))
    assert known(played, x, weight, repacked=True) is not None
    x[3, 5] = torch.inf
    assert known(played, x, weight, repacked=True) is None


@pytest.mark.parametrize("by", ["blocks", "matrix"])
def test_a_kernel_mends_what_zeros_spoil(played, by):
    x, pattern = x_of(Pattern(2, 3, 5, 4), last=False)
    weight = torch.randn(pattern.weight_shape)
    multiplies_by(played, pattern)
    problem = Problem.of_factor(pattern, "float32", False)
    # The kernel that is played computes all of y once more.
    kernel = HostLauncher(problem, Geometry(32, 0, 16, 1, 100), MULTIPLY_AS_IT_IS, None)
    product = ExpandedProduct(problem, Config(by), kernel)
    x[3, 5] = torch.inf
    expected = ks_reference(x, weight)
    torch.testing.assert_close(product(x, weight), expected, equal_nan=True)
    know(played, x, weight, False, product.entry())
    launches = variable(played, "launches").value
    y = known(played, x, weight, repacked=True)
    assert variable(played, "launches").value == launches + 1
    torch.testing.assert_close(y, expected, equal_nan=True)
    out = results(x, pattern, False)
    known(played, x, weight, repacked=True, out=out)
    torch.testing.assert_close(out, expected, equal_nan=True)


def test_rows_at_any_address_are_taken_where_they_are_known(played):
    weight = torch.randn(2, 3, 5, 3)
    x = torch.randn(8, 30)
    odd = torch.randn(8 * 30 + 1)[1:].view(8, 30)
    table_entry = entry("bmm", Pattern(2, 3, 5, 3), False, 0)
    know(played, x, weight, False, table_entry)
    assert known(played, x, weight, repacked=True) is None
    know(played, x, weight, False, table_entry, any_rows=True)
    for rows in (x, odd):
        check(known(played, rows, weight, repacked=True), rows, weight, False)


def test_aligned_and_other_rows_have_entries_of_their_own(played):
    """Batch last their numbers may share a key, and they are decided apart."""
    pattern = Pattern(2, 3, 5, 3)
    weight = torch.randn(pattern.weight_shape)
    x, odd = torch.randn(30, 100), torch.randn(30, 99)
    for rows, other, any_rows in ((x, odd, False), (odd, x, True)):
        played.ops.forget()
        know(played, rows, weight, True, entry("bmm", pattern, True, 0), any_rows=any_rows)
        check(known(played, rows, weight, repacked=True, last=True), rows, weight, True)
        assert known(played, other, weight, repacked=True, last=True) is None


@pytest.mark.parametrize("way", ["bmm", "einsum", "dense"])
def test_products_by_torch_take_rows_at_any_address(played, way):
    assert entry(way, Pattern(2, 3, 5, 3), False, 5).any_rows


def test_kernels_take_rows_at_any_address_themselves_or_by_their_fallback(played):
    problem = Problem.of_factor(Pattern(1, 6, 8, 1), "float32", batch_last=False)
    for fallback in (None, lambda: None):
        assert HostLauncher(problem, Geometry(128, 0, 64, 1, 4), 0, fallback).entry().any_rows


def test_ways_are_registered_once(played):
    pattern, other = Pattern(2, 3, 5, 4), Pattern(2, 3, 5, 8)
    first = entry("bmm", pattern, False, 5)
    assert entry("bmm", pattern, False, 5) == entry("bmm_paper", pattern, False, 5) == first
    entries = [entry("bmm", other, False, 5), entry("expand", pattern, False, 5)]
    entries += [entry("bmm", pattern, True, 5), entry("bmm", pattern, False, 5, by_groups=True)]
    assert len({one.plan for one in (first, *entries)}) == 5


def decide(pattern, x, weight, last, repacked_name="bmm", cached_repacks=False, cached_name="bmm"):
    """A way for cached weights and another for those that change, decided for these operands."""
    problem_key = cuda.problem_key_of(x, weight, last)

    def choice(name, weight_is):
        call = _preparing(multiplier(name, problem_key.problem), weight_is)
        return Choice(Candidate(name, problem_key.problem, 1.0), call, "model")

    cached_choice = choice(cached_name, "repacked" if cached_repacks else "cached")
    decision = Decision(cached_choice, choice(repacked_name, "repacked"))
    cuda.remember(problem_key, x.get_device(), decision)


@pytest.mark.sweep
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("way", "small", "last"), [one for one in OFFERED if one[0] not in FILLED], ids=str
)
def test_the_operator_prepares_once_and_is_right_after_a_change(played, way, small, stored, last):
    x, pattern = x_of(small, last)
    weight = nn.Parameter(stored(torch.randn(pattern.weight_shape)), requires_grad=False)
    decide(pattern, x, weight, last, repacked_name=way, cached_name=way)
    check(ops.ks_mm(x, weight, last), x, weight, last)
    check(cuda.run_known(x, weight, last), x, weight, last)
    weight.mul_(-3)
    check(ops.ks_mm(x, weight, last), x, weight, last)
    check(cuda.run_known(x, weight, last), x, weight, last)
    with weight_scopes.repacked():
        check(cuda.run_known(x, weight, last), x, weight, last)


def test_a_changing_weight_takes_the_way_that_was_chosen_for_it(played):
    x, pattern = x_of(Pattern(2, 3, 5, 4), last=False)
    weight = nn.Parameter(torch.randn(pattern.weight_shape), requires_grad=False)
    decide(pattern, x, weight, False)
    problem_key = cuda.problem_key_of(x, weight, False)
    own = Choice(Candidate("own", problem_key.problem, 1.0), ks_reference, "model")
    decision = cuda.known(problem_key, x.get_device())
    cuda.remember(problem_key, x.get_device(), Decision(decision.cached, own))
    ops.ks_mm(x, weight)
    assert cuda.run_known(x, weight, False) is not None
    with weight_scopes.repacked():
        assert cuda.run_known(x, weight, False) is None  # which the library cannot do
        check(ops.ks_mm(x, weight), x, weight, False)


def test_a_weight_that_is_better_prepared_per_call_leaves_nothing(played):
    x, pattern = x_of(Pattern(2, 3, 5, 4), last=False)
    weight = nn.Parameter(torch.randn(pattern.weight_shape), requires_grad=False)
    decide(pattern, x, weight, False, cached_repacks=True)
    for _ in range(2):
        check(ops.ks_mm(x, weight), x, weight, False)
        check(cuda.run_known(x, weight, False), x, weight, False)
    assert weight_table.of(weight) == []


def test_what_is_only_a_view_of_the_weight_takes_no_thread(monkeypatch):
    """A thread for each preparation took most of a millisecond of a Llama's every product."""
    weight = nn.Parameter(by_groups(torch.randn(2, 3, 5, 4)))

    def prepare(weight):
        return weight.permute(0, 3, 1, 2).contiguous()

    first = weight_cache.prepared(weight, "adbc", prepare)
    assert first.data_ptr() == weight.data_ptr()
    with monkeypatch.context() as patch:
        patch.setattr(
            weight_cache, "_prepare", lambda *_: pytest.fail("it was prepared to be kept")
        )
        again = weight_cache.prepared(weight, "adbc", prepare)
    assert again.data_ptr() == weight.data_ptr()
    torch.testing.assert_close(again, prepare(weight.detach()), rtol=0, atol=0)
