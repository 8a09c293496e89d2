"""The structures whose kernels are PyTorch's, on a CUDA device: products, gradients, a search."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ksopt.operators.registry import operator_of, parse
from ksopt.search import SearchRequest, run_search

pytestmark = pytest.mark.gpu

TEXTS = (
    "two-four(256x128)",
    "fp8-dense(256x128)",
    "low-rank(256x128,24)",
    "block-diagonal(256x128,4)",
    "strassen-tile(256x128,4,12)",
)


def error(one: Tensor, exact: Tensor) -> float:
    return float((one.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("rows", [1, 63, 1000])
@pytest.mark.parametrize("text", TEXTS)
def test_products_and_gradients_are_the_references(text: str, rows: int, layout: str) -> None:
    operator = operator_of(parse(text))
    refusal = operator.refusal("cuda:0", "bfloat16")
    if refusal is not None:
        pytest.skip(refusal)
    torch.manual_seed(0)
    weights = [
        (torch.randn(shape, device="cuda") * terms**-0.5).bfloat16()
        for shape, terms in zip(operator.parameter_shapes(), operator.terms(), strict=True)
    ]
    x = torch.randn(rows, 256, device="cuda").bfloat16()
    last = layout == "batch_last"
    with torch.no_grad():
        y = operator.bind(weights, layout)(x.T.contiguous() if last else x)
    leaves = [one.detach().requires_grad_() for one in (x.T.contiguous() if last else x, *weights)]
    trained = operator.bind(leaves[1:], layout)(leaves[0])
    exact = [one.double().requires_grad_() for one in (x, *weights)]
    expected = operator.reference(exact[0], exact[1:])
    # Three roundings to bf16 at most on the way, of 2^-9 each, and the tensor cores' own sums.
    for result in (y, trained.detach()):
        assert error(result.T if last else result, expected.detach()) < 2**-7
    towards = torch.randn_like(expected)
    ours = torch.autograd.grad(trained, leaves, (towards.T if last else towards).bfloat16())
    theirs = torch.autograd.grad(expected, exact, towards.bfloat16().double())
    for place, (one, right) in enumerate(zip(ours, theirs, strict=True)):
        assert error(one.T if last and place == 0 else one, right) < 2**-6


def test_a_search_ranks_all_of_them(tmp_path: Path) -> None:
    names = "ks,low-rank,block-diagonal,two-four,strassen-tile,fp8-dense"
    request = SearchRequest(
        "1024x1024",
        structures=names,
        budgets=("57%",),
        dtype="bfloat16",
        batch=4096,
        device="cuda",
        trials=30,
        out=tmp_path / "report",
    )
    (layer,) = run_search(request).layers
    left = set(layer.space.left_out)
    assert {trial.reason for trial in layer.trials if trial.state == "failed"} == set()
    of_trials = {str(trial.facts.chain).partition("(")[0] or "ks" for trial in layer.trials}
    assert of_trials == set(names.split(",")) - left
