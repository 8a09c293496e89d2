"""Distillation: a converted model is trained on the outputs of the dense one, without labels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ksopt.errors import InvalidInputError
from ksopt.patterns.validate import checked_int


def distil(
    student: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int = 300,
    lr: float = 1e-3,
    match: str | Iterable[str] = (),
    progress: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train a model to reproduce the outputs of another one; no labels are needed.

    Each step minimises ||s - t||² / ||t||², s and t being the outputs of the two for a batch: the
    sum over all floating-point tensors in them, and over the outputs of the modules that ``match``
    names. AdamW, its rate falling to 0 along a cosine.

    Args:
        student: The model to train, such as that of a `Conversion`; changed in place.
        teacher: The dense model; it is unchanged, but in evaluation mode during the call.
        batches: Typical inputs of the model: each a tensor, a tuple of arguments, or a mapping of
            keyword arguments. They are repeated from the start until all steps are done.
        steps: Number of steps.
        lr: The learning rate at the beginning.
        match: Names of modules that both models have, or patterns for them with ``*``: the outputs
            of a model's blocks give each block a target of its own, which helps deep models.
        progress: Called after each step with its number, from 1, and its loss.

    Returns:
        The loss of each step.

    Raises:
        InvalidInputError: There are no batches, no module has such a name, nothing in the student
            is trained, or the outputs of the two differ in shape.

    Source: Hinton, Vinyals, Dean, "Distilling the knowledge in a neural network", 2015; matching
    inner outputs: Romero et al., "FitNets", 2015.

    Example:
        >>> teacher = nn.Linear(8, 8)
        >>> losses = distil(nn.Linear(8, 8), teacher, [torch.randn(64, 8)], steps=50, lr=0.1)
        >>> losses[-1] < 0.1 * losses[0]
        True
    """
    checked_int(steps, "steps", "distil")
    patterns = [match] if isinstance(match, str) else list(match)
    trained = [one for one in student.parameters() if one.requires_grad]
    if not trained:
        raise InvalidInputError("distil: no parameter of the student requires a gradient")
    optimizer = torch.optim.AdamW(trained, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    modes = {module: module.training for one in (student, teacher) for module in one.modules()}
    try:
        student.train()
        teacher.eval()
        with _outputs(teacher, patterns) as inside_teacher, _outputs(student, patterns) as inside:
            for at, batch in zip(range(1, steps + 1), _repeated(batches), strict=False):
                with torch.no_grad():
                    targets = [_called(teacher, batch), *inside_teacher.values()]
                loss = _distance([_called(student, batch), *inside.values()], targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                if progress is not None:
                    progress(at, losses[-1])
        optimizer.zero_grad()
    finally:
        for module, mode in modes.items():
            module.training = mode
    return losses


def _repeated(batches: Iterable[Any]) -> Iterator[Any]:
    for turn in itertools.count():
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        if is_empty:
            what = "there are none" if turn == 0 else "they end before all steps are done"
            raise InvalidInputError(f"distil: batches: {what}; give a list, or a loader")


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _distance(outputs: list[Any], targets: list[Any]) -> Tensor:
    pairs = list(zip(_tensors(outputs), _tensors(targets), strict=True))
    if not pairs or any(one.shape != other.shape for one, other in pairs):
        raise InvalidInputError(
            "distil: student and teacher must return floating-point tensors of the same shapes"
        )
    return torch.stack(
        [
            (one.float() - other.float()).square().sum()
            / other.float().square().sum().clamp_min(1e-30)
            for one, other in pairs
        ]
    ).sum()


def _tensors(values: list[Any]) -> list[Tensor]:
    """The floating-point tensors in the outputs of models, transformers outputs included."""
    plain = [dict(one) if isinstance(one, Mapping) else one for one in values]
    leaves = tree_leaves(plain)
    return [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point()]


@contextmanager
def _outputs(model: nn.Module, patterns: list[str]) -> Iterator[dict[str, Any]]:
    """Outputs of the modules with matching names in the last call, by name."""
    outputs: dict[str, Any] = {}
    handles = []
    for pattern in patterns:
        names = [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]
        if not names:
            raise InvalidInputError(f"distil: match={pattern!r}: no module has such a name")
        for name in names:
            keep = _keeper(outputs, name)
            handles.append(model.get_submodule(name).register_forward_hook(keep))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _keeper(outputs: dict[str, Any], name: str) -> Callable[..., None]:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[name] = output

    return keep
