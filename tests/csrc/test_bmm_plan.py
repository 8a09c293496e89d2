"""PyTorch's batched products through the host library, on a CPU, beside float64: every layout of
operands that it takes, and what it leaves to Python.

The driver that is played has no transposing kernels: those are tested on a GPU.
"""

import pytest
import torch
from played_driver import known, note
from torch import nn

from ksopt import ops
from ksopt.kernels import weight_cache, weight_scopes, weight_table
from ksopt.kernels.autotuner import Choice, Decision, _preparing
from ksopt.kernels.backends import cuda
from ksopt.kernels.families.pytorch_ops import multiplier
from ksopt.kernels.launcher import batched_entry
from ksopt.kernels.registry import Candidate
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
]
# bmm has no product for c = 1, expand is bmm for d = 1: the library leaves both to others.
WAYS = [(way, pattern) for way in ("bmm", "bmm_paper") for pattern in PATTERNS]
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


@pytest.mark.sweep
@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("small", PATTERNS, ids=str)
@pytest.mark.parametrize("dims", [2, 3])
def test_products_of_weights_that_are_prepared_where_they_have_to_be(
    played, small, stored, last, dims
):
    x, pattern = x_of(small, last, dims)
    weight = stored(torch.randn(pattern.weight_shape))
    entry = batched_entry(pattern, last, form=5)
    played.ops.know(x, weight, last, True, True, entry.plan, entry.form, True, True)
    check(known(played, x, weight, last, changing=True), x, weight, last)
    out = results(x, pattern, last)
    y = known(played, x, weight, last, changing=True, out=out)
    assert y.data_ptr() == out.data_ptr()
    check(out, x, weight, last)
    assert known(played, x, weight, last) is None  # that of kept weights


@pytest.mark.parametrize("stored", [as_it_is, padded])
def test_a_kept_weight_that_no_product_can_read_has_to_be_at_hand(played, stored):
    x, pattern = x_of(Pattern(2, 3, 5, 4), last=False)
    weight = stored(torch.randn(pattern.weight_shape))
    entry = batched_entry(pattern, False, form=5)
    played.ops.know(x, weight, False, True, False, entry.plan, entry.form, True)
    assert known(played, x, weight) is None
    prepared = weight.permute(0, 3, 1, 2).contiguous()
    note(played, weight, prepared, form=6)
    assert known(played, x, weight) is None
    note(played, weight, prepared, form=5)
    check(known(played, x, weight), x, weight, False)


def test_one_row_is_left_to_the_way_that_makes_a_column_of_it(played):
    pattern = Pattern(8, 3, 5, 4)
    x, weight = torch.randn(1, pattern.in_features), torch.randn(pattern.weight_shape)
    entry = batched_entry(pattern, False, form=5)
    played.ops.know(x, weight, False, True, True, entry.plan, entry.form, True, True)
    assert known(played, x, weight, changing=True) is None


def decide(pattern, x, weight, last, changing_name="bmm", kept_anew=False, kept_name="bmm"):
    """A way for kept weights and another for those that change, decided for these operands."""
    found = cuda.problem_key_of(x, weight, last)

    def choice(name, weight_is):
        call = _preparing(multiplier(name, found.problem), weight_is)
        return Choice(Candidate(name, found.problem, 1.0), call, "model")

    kept = choice(kept_name, "repacked" if kept_anew else "cached")
    decision = Decision(kept, choice(changing_name, "repacked"))
    cuda.remember(found, x.get_device(), decision)


@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("way", "small"), WAYS, ids=str)
def test_the_operator_prepares_once_and_is_right_after_a_change(played, way, small, stored, last):
    x, pattern = x_of(small, last)
    weight = nn.Parameter(stored(torch.randn(pattern.weight_shape)), requires_grad=False)
    decide(pattern, x, weight, last, changing_name=way, kept_name=way)
    check(ops.ks_mm(x, weight, last), x, weight, last)
    check(cuda.run_known(x, weight, last), x, weight, last)
    weight.mul_(-3)
    check(ops.ks_mm(x, weight, last), x, weight, last)
    check(cuda.run_known(x, weight, last), x, weight, last)
    with weight_scopes.changing():
        check(cuda.run_known(x, weight, last), x, weight, last)


def test_a_changing_weight_takes_the_way_that_was_chosen_for_it(played):
    x, pattern = x_of(Pattern(2, 3, 5, 4), last=False)
    weight = nn.Parameter(torch.randn(pattern.weight_shape), requires_grad=False)
    decide(pattern, x, weight, False, changing_name="einsum")
    ops.ks_mm(x, weight)
    assert cuda.run_known(x, weight, False) is not None
    with weight_scopes.changing():
        assert cuda.run_known(x, weight, False) is None  # einsum, which the library cannot do
        check(ops.ks_mm(x, weight), x, weight, False)


def test_a_weight_that_is_better_prepared_anew_leaves_nothing(played):
    x, pattern = x_of(Pattern(2, 3, 5, 4), last=False)
    weight = nn.Parameter(torch.randn(pattern.weight_shape), requires_grad=False)
    decide(pattern, x, weight, False, kept_anew=True)
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
