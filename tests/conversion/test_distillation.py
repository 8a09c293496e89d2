"""A student learns a teacher's outputs, and both are otherwise unchanged."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ksopt
from ksopt.errors import InvalidInputError


class Two(nn.Module):
    """Takes its inputs by name, and returns a mapping, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"logits": scale * self.head(torch.relu(self.block(x))), "count": len(x)}


def pair() -> tuple[Two, Two]:
    torch.manual_seed(0)
    teacher = Two()
    student = copy.deepcopy(teacher)
    ksopt.convert(student, {"block": "(1,4,4,4)*(4,4,4,1)"})
    return student, teacher


def batches(count: int = 4) -> list[dict[str, Any]]:
    return [{"x": torch.randn(32, 16), "scale": 2.0} for _ in range(count)]


def test_a_student_comes_nearer() -> None:
    student, teacher = pair()
    teacher.train()
    student.head.eval()
    before = copy.deepcopy(teacher.state_dict())
    seen: list[int] = []
    losses = ksopt.distil(
        student, teacher, batches(), steps=60, lr=1e-2, progress=lambda at, _: seen.append(at)
    )
    assert (len(losses), seen) == (60, list(range(1, 61)))
    assert losses[-1] < 0.5 * losses[0]
    # The teacher, and the modes of both, are as they were; nobody listens any more.
    assert all(torch.equal(one, before[name]) for name, one in teacher.state_dict().items())
    assert (teacher.training, student.head.training) == (True, False)
    assert all(parameter.grad is None for parameter in student.parameters())
    assert not teacher.block._forward_hooks


def test_what_lies_inside_is_matched_too() -> None:
    student, teacher = pair()
    with torch.no_grad():
        teacher.head.weight.zero_()  # what comes out says nothing of the block
        student.head.weight.zero_()
    x = torch.randn(64, 16)

    def apart() -> float:
        return float((student.block(x) - teacher.block(x)).square().mean())

    before = apart()
    student.head.requires_grad_(False)
    ksopt.distil(student, teacher, [x], steps=60, lr=1e-2, match="blo*")
    assert apart() < 0.95 * before  # without match= there is no gradient at all


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batches": []}, "there are none"),
        ({"batches": iter([torch.randn(3, 16)])}, "end before all steps are done"),
        ({"match": "encoder.*"}, "no module has such a name"),
        ({"student": nn.Linear(16, 4).requires_grad_(False)}, "requires a gradient"),
        ({"student": nn.Linear(16, 5)}, "of the same shapes"),
        ({"steps": 0}, "steps"),
    ],
)
def test_others_are_refused_in_words(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "student": nn.Linear(16, 4),
        "teacher": nn.Linear(16, 4),
        "batches": [torch.randn(3, 16)],
        "steps": 2,
    }
    with pytest.raises(InvalidInputError) as refused:
        ksopt.distil(**{**arguments, **change})
    assert words in str(refused.value)
