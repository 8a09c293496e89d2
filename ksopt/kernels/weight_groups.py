"""Several weights prepared as one tensor, as a kernel of a whole chain reads them.

What was prepared is kept with the first of them, by the rules of weight_cache.py, for as long as
all of them are what they were: the same memory in the same version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ksopt.kernels import weight_cache


def prepared_together(
    weights: Sequence[Tensor], form: str, prepare: Callable[[Sequence[Tensor]], Tensor]
) -> Tensor:
    """``prepare(weights)``, or what an earlier call with this form of the same weights returned.

    Args:
        weights: of a chain's factors, of all siblings; on any device, any strides.
        form: names what ``prepare`` does; equal names must mean equal results.
        prepare: computes a new tensor from detached weights.

    Returns:
        The prepared weights, which nobody may write to.

    Example:
        >>> import torch
        >>> weights = [torch.ones(1, 2, 2, 1), torch.ones(1, 2, 2, 1)]
        >>> def side_by_side(weights):
        ...     return torch.cat([weight.flatten() for weight in weights])
        >>> first = prepared_together(weights, "side by side", side_by_side)
        >>> prepared_together(weights, "side by side", side_by_side) is first
        True
        >>> _ = weights[1].add_(1)
        >>> prepared_together(weights, "side by side", side_by_side)[-1]
        tensor(2.)
    """
    owners = [weight_cache.owner_of(weight) for weight in weights]
    detached = [weight.detach() for weight in weights]
    if not all(map(weight_cache.is_keepable, weights, owners)):
        return prepare(detached)
    first, *others = weights
    states = [_state(weight, owner) for weight, owner in zip(others, owners[1:], strict=True)]
    whole_form = f"{form} {states}"
    kept = weight_cache.kept_of(first, owners[0], whole_form)
    if weight_cache.is_recorded(first):
        return weight_cache.recorded(weights, owners, kept, prepare)
    if kept is not None:
        return kept.on_current_stream()
    weight_cache.drop(first, f"{form} [")
    for owner in owners[1:]:
        weight_cache.partners.setdefault(id(owner), set()).add(id(owners[0]))

    def prepared(_: Tensor) -> Tensor:
        result = prepare(detached)
        # While these live, no other storage gets the address of one of theirs.
        result.storages_of_weights = [  # type: ignore[attr-defined]
            StorageWeakRef(weight.untyped_storage()) for weight in others
        ]
        return result

    return weight_cache.prepared(first, whole_form, prepared)


def _state(weight: Tensor, owner: Tensor) -> tuple[object, ...]:
    """What tells that a weight is what it was."""
    storage = weight.untyped_storage()._cdata
    place = (storage, weight.data_ptr(), tuple(weight.shape), weight.stride(), str(weight.dtype))
    return (*place, owner._version)
