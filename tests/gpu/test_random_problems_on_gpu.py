"""Random products, drawn anew each day: what is chosen for each, and one other kernel, is right."""

import datetime

import pytest
import random_problems
import torch

CPU = torch.device("cpu")
COUNT = 45  # of a share: 15 problems


@pytest.mark.gpu
@pytest.mark.parametrize("share", range(12))
def test_products_of_the_day(share, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")
    seed = int(datetime.date.today().strftime("%Y%m%d")) + 10_000 * share
    print(f"python tests/gpu/random_problems.py --seed {seed} --count {COUNT}")
    done, wrong = random_problems.run(range(seed, seed + COUNT), torch.device("cuda"), 120)
    assert done >= 5
    assert wrong == 0


def test_what_is_drawn_has_every_kind():
    cases = [random_problems.case_of(seed) for seed in range(300)]
    problems = [case.problem for case in cases]
    assert {case.lies for case in cases} == {"together", "apart", "odd"}
    assert {(p.dtype, p.exact) for p in problems} == {
        ("float32", True), ("float32", False), ("float16", True), ("bfloat16", True)
    }  # fmt: skip
    assert {p.batch_last for p in problems} == {False, True}
    assert {p.siblings for p in problems} == {1, 2, 3, 4}
    assert {p.epilogue.activation for p in problems} >= {"none", "relu", "gelu", "silu"}
    assert any(p.is_factor for p in problems)
    assert any(len(p.chain) == 2 for p in problems)


def small(seed):
    """A case that a CPU computes in no time."""
    case = random_problems.case_of(seed)
    return case if case.rows * case.problem.out_features < 2**20 else None


def test_a_cpus_products_are_right_and_a_wrong_one_is_reported(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")
    cases = list(filter(None, map(small, range(60))))[:12]
    assert [random_problems.faults(case, CPU) for case in cases] == [[]] * len(cases)
    right = random_problems.by_operator

    def wrong(problem, operands, x):
        y = right(problem, operands, x)
        y.view(-1)[0] += 1 + y.abs().max()  # one number
        return y

    monkeypatch.setattr(random_problems, "by_operator", wrong)
    assert all(random_problems.faults(case, CPU) for case in cases)
