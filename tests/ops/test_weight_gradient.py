"""Weight gradients by PyTorch whose rows are divided into parts, as on a GPU with idle blocks."""

from types import SimpleNamespace

import pytest
import torch

from ksopt.ops import weight_gradient
from ksopt.ops.weight_gradient import weight_grad_decomposed


@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("rows", [6, 7, 17])
@pytest.mark.parametrize("sizes", [(2, 3, 4, 1), (1, 3, 4, 2), (3, 2, 5, 4)], ids=str)
def test_parts_of_the_rows_add_up(monkeypatch, sizes, rows, batch_last) -> None:
    a, b, c, d = sizes
    torch.manual_seed(1)
    grad, x = (torch.randn(rows, a * n * d, dtype=torch.float64) for n in (b, c))
    if batch_last:
        grad, x = grad.T.contiguous(), x.T.contiguous()
    whole = weight_grad_decomposed(grad, x, a, d, batch_last)
    monkeypatch.setattr(weight_gradient, "_parts_of_rows", lambda *_: 3)
    torch.testing.assert_close(weight_grad_decomposed(grad, x, a, d, batch_last), whole)


def test_rows_of_several_dims() -> None:
    grad, x = torch.randn(2, 5, 12), torch.randn(2, 5, 8)
    flat = weight_gradient._product_in_parts(grad.view(10, 12), x.view(10, 8), 2, 2, False, 2)
    torch.testing.assert_close(
        weight_gradient._product_in_parts(grad, x, 2, 2, False, 2), flat, rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("rows", "sizes", "dtype", "parts"),
    [
        (25_216, (2, 64, 192), torch.float32, 32),  # divides the rows: 788 each
        (25_216, (2, 64, 192), torch.float64, 32),
        (25_216, (2, 64, 192), torch.bfloat16, 1),  # partial sums would be rounded
        (25_216, (1, 384, 384), torch.float32, 1),  # cuBLAS divides the sums of one product
        (25_216, (64, 128, 128), torch.float32, 2),
        (25_216, (128, 128, 128), torch.float32, 1),  # enough blocks
        (4_099, (2, 64, 64), torch.float32, 16),  # a prime number: 3 rows are left over
        (300, (2, 64, 192), torch.float32, 1),
    ],
)
def test_parts_for_a_gpu(rows, sizes, dtype, parts) -> None:
    groups, b, c = sizes
    x = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    assert weight_gradient._parts_of_rows(x, groups, b, c, rows) == parts
