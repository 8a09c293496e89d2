"""Random modules from a fresh seed: see `tests.fuzz.capture`."""

import multiprocessing
import subprocess
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from .comparison import Outcome
from .records import Record, Tolerance, differences, not_torchs
from .worker import compared


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_random_modules_do_compiled_what_they_do_in_eager_mode():
    # A number of modules, not a time: slow machines import torch for a quarter of a minute.
    options = ["--count", "20", "--minutes", "4", "--workers", "2", "--shrink-seconds", "30"]
    command = [sys.executable, "-m", "tests.fuzz.capture", *options]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=390)
    print(ended.stdout, ended.stderr)  # the seed first
    assert ended.returncode == 0, ended.stdout


def compared_afresh(source: str, name: str) -> Outcome:
    """`compared`, by a process that has run nothing else.

    It forks. Where an earlier test has started autograd's threads no fork may run a backward pass.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(compared, source, name).result()


def record(**facts: torch.Tensor | None) -> Record:
    return Record(facts=facts)


def test_a_fact_in_which_torch_compile_differs_from_eager_mode_says_nothing():
    one, two, three = (torch.full((2,), float(n)) for n in (1, 2, 3))
    eager = [record(value=one, grad=None), record(value=one, grad=one)]
    plain = [record(value=one, grad=one), record(value=two, grad=one)]
    for actual, expected in (
        ([record(value=one, grad=None), record(value=one, grad=one)], []),
        ([record(value=one, grad=one), record(value=two, grad=one)], []),
        ([record(value=one, grad=one), record(value=two, grad=three)], ["call 1: grad: "]),
        ([record(value=three, grad=None), record(value=one, grad=one)], ["call 0: value: "]),
    ):
        reports = not_torchs(
            differences(eager, actual, Tolerance()), differences(eager, plain, Tolerance()), plain
        )
        assert [text.startswith(start) for text, start in zip(reports, expected, strict=True)] == [
            True
        ] * len(expected)


def test_a_call_that_torch_compile_does_not_reach_is_compared_with_eager_mode():
    one, two = torch.ones(2), torch.full((2,), 2.0)
    eager = [record(value=one), record(value=one)]
    plain = [Record(error=("forward", "RuntimeError: torch's own")), record(value=one)]
    actual = [record(value=one), record(value=two)]
    reports = not_torchs(
        differences(eager, actual, Tolerance()), differences(eager, plain, Tolerance()), plain
    )
    assert len(reports) == 1
    assert reports[0].startswith("call 1: value: ")


def test_a_fact_that_torch_compile_reached_before_its_error_counts():
    eager = [record(requires_grad=False, value=torch.ones(2))]
    plain = [Record(error=("backward", "RuntimeError: torch's own"), facts={"requires_grad": True})]
    actual = [record(requires_grad=True, value=torch.zeros(2))]
    reports = not_torchs(
        differences(eager, actual, Tolerance()), differences(eager, plain, Tolerance()), plain
    )
    assert len(reports) == 1
    assert reports[0].startswith("call 0: value: ")


def test_zeros_that_are_not_multiplied_by_give_no_nan_and_other_elements_count():
    nan = float("nan")
    eager = [record(value=torch.tensor([nan, nan, 1.0]))]
    skipped = Tolerance(skips_zeros=True)
    assert differences(eager, [record(value=torch.tensor([0.0, nan, 1.0]))], skipped) == []
    assert differences(eager, [record(value=torch.tensor([0.0, nan, 2.0]))], skipped)
    assert differences(eager, [record(value=torch.tensor([nan, nan, nan]))], skipped)
    assert differences(eager, [record(value=torch.tensor([0.0, nan, 1.0]))], Tolerance())


HEADER = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"


@pytest.mark.slow
def test_a_write_that_eager_mode_refuses_is_compared_as_if_it_came_afterwards():
    source = """
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("w", torch.randn(6, 4, 6))
            def forward(self, x):
                y = torch.vmap(F.linear, in_dims=(1, 0), out_dims=1)(x.view(-1, 6, 6), self.w)
                return y, self.w
        def inputs(B):
            return [torch.randn(B, 36, requires_grad=True)]
        LEAVES = [False]
        CALLS = [dict(batch=5, mode="grad", autocast=False, before=[],
                      between=["with torch.no_grad(): m.w.mul_(0.5)"])]
        DYNAMIC = None
        HANDOVER = "eager"
        TRAINING = True
    """
    outcome = compared_afresh(HEADER + textwrap.dedent(source), "written.py")
    assert outcome.failed
    assert outcome.differences == []
    assert outcome.lowered


@pytest.mark.slow
def test_what_only_a_graph_that_runs_as_it_is_refuses_is_no_difference():
    """The author's einsum saves a copy of its operand, which is written between two graphs."""
    source = """
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.randn(2, 5, 3, 4))
            def forward(self, x):
                h = x.sin()
                y = torch.einsum("nacd,abcd->nabd", h.view(-1, 2, 3, 4), self.w)
                torch._dynamo.graph_break()
                torch.tanh(x, out=h)
                return y.reshape(-1, 40), h
        def inputs(B):
            return [torch.randn(B, 24)]
        LEAVES = [False]
        CALLS = [dict(batch=5, mode="grad", autocast=False, before=[], between=[])]
        DYNAMIC = None
        HANDOVER = "eager"
        TRAINING = True
    """
    outcome = compared_afresh(HEADER + textwrap.dedent(source), "written.py")
    assert outcome.quick
    assert outcome.differences == []
    assert outcome.lowered
