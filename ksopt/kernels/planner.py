"""Which plan a problem takes: a kernel for all of it, where one is the fastest, or its parts.

Families that take chains are asked, and whether one product may be as fast (merged.py). Where
neither is, a launch a factor computes a problem, and nothing is measured for it as a whole.
Otherwise they race with the launches of the factors, on the operands at hand, by the rules that one
factor's kernels race by (autotuner.py). The choice is kept beside theirs, under the key of the
chain, its epilogue and its siblings. Of two layers the parts are the layers, each by its own plan
(mlp_plans.py).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ksopt import precision, settings
from ksopt.errors import KsoptError, UnavailableError
from ksopt.kernels import host_plans, merged, registry, tuning_cache, weight_cache
from ksopt.kernels.autotuner import Choice, Decision, Operands, Source, measured, rebuilt
from ksopt.kernels.backends.base import BACKENDS, backend_of
from ksopt.kernels.explain import ChoiceReport, choice_report, from_record
from ksopt.kernels.families.base import CHAIN_FAMILIES
from ksopt.kernels.plan import ExecutionPlan, Launch
from ksopt.kernels.problem import (
    DeviceSpec,
    Epilogue,
    Problem,
    ProblemKey,
    bits_of,
    is_exact,
    rows_of,
)
from ksopt.kernels.registry import APART, FACTORS, ChainCall
from ksopt.kernels.tuning_cache import Fingerprint, Record
from ksopt.measure.accuracy import Ahead, Around, checking_chain
from ksopt.measure.interleaved import BUDGET_S
from ksopt.patterns.chain import Chain, Pattern

_decisions: dict[tuple[ProblemKey, torch.device], Decision] = {}
_by_call: dict[tuple[Any, ...], Decision] = {}
"""The same decisions, by what a call can tell in a microsecond."""
_has_spec: dict[torch.device, bool] = {}
_timing = threading.RLock()  # the plans of two layers are chosen before these race with a kernel


def plan_of(
    problem: Problem,
    batch: int,
    *,
    device: torch.device | str = "cuda",
    changing: bool = False,
    spec: DeviceSpec | None = None,
) -> ExecutionPlan:
    """The plan of a problem with contiguous operands, as far as it can be told without computing.

    Args:
        problem: what is computed.
        batch: rows of x.
        device: where.
        changing: whether the weights change from call to call, as in training.
        spec: predict for this device, which need not be here, and look up nothing.

    Example:
        >>> h200 = DeviceSpec((9, 0), 132, 228 * 1024)
        >>> chain = Chain.parse("(1,192,48,2)*(2,48,192,1)")
        >>> problem = Problem(chain, "float16", False, epilogue=Epilogue(bias=True))
        >>> plan = plan_of(problem, 8192, spec=h200)
        >>> plan.ways, plan.behind.names
        (('chain_wgmma16',), ())
        >>> plan = plan_of(Problem(chain, "float32", False), 8192, spec=h200)
        >>> [str(launch.problem.chain) for launch in plan.launches]
        ['(2,48,192,1)', '(1,192,48,2)']
    """
    place = torch.device(device)
    whole = whole_choice(problem, batch, place, changing, spec)
    if whole is not None and whole.way not in APART:
        return ExecutionPlan(problem, batch, (Launch(problem, whole),))
    if problem.second is not None:
        one, two = (
            plan_of(layer, batch, device=device, changing=changing, spec=spec)
            for layer in problem.layers()
        )
        together = (*one.launches, *two.launches)
        return ExecutionPlan(problem, batch, together, two.behind, one.behind)
    launches = [
        Launch(
            factor,
            choice_report(
                factor.pattern,
                problem.dtype,
                batch,
                batch_last=problem.batch_last,
                device=place,
                changing=changing,
                exact=problem.exact,
                spec=spec,
            ),
        )
        for factor in reversed(problem.factors())
    ]
    return ExecutionPlan(problem, batch, tuple(launches * problem.siblings), problem.epilogue)


def whole_call(
    operands: Operands,
    activation: str,
    batch_last: bool,
    siblings: int,
    check: Callable[[], object] | None = None,
) -> ChainCall | None:
    """The kernel that computes all of a layer in one launch; None for a launch a factor.

    Args:
        operands: of the layer.
        activation: one of `ksopt.epilogue.ACTIVATIONS`; of two siblings, or of ``GATES``.
        batch_last: the layout.
        siblings: how many chains the weights are of.
        check: raises where the operands do not fit together; None where they are known to. It is
            asked once for operands of such shapes, dtypes and devices.
    """
    layer = (operands, activation, batch_last, siblings)
    decision, is_final = _decision_of_call(*layer, check)
    if is_final:
        host_plans.know(*layer, decision)
    call: ChainCall | None = None if decision is None else call_of(decision, operands)
    return call


def is_whole(
    operands: Operands,
    activation: str,
    batch_last: bool,
    siblings: int,
    check: Callable[[], object] | None = None,
    changing: bool = False,
) -> bool:
    """Whether a plan of one launch takes operands, which may be fake: then it is predicted.

    Args:
        operands, activation, batch_last, siblings, check: as for `whole_call`.
        changing: of fake ones, whether weights will be prepared at each call.
    """
    x = operands.x
    if is_real(x):
        decision, _ = _decision_of_call(operands, activation, batch_last, siblings, check)
        return decision is not None and call_of(decision, operands) is not None
    plan = plan_of_fakes(operands, activation, batch_last, siblings, changing)
    return plan is not None and plan.is_whole


def plan_of_fakes(
    operands: Operands,
    activation: str = "none",
    batch_last: bool = False,
    siblings: int = 1,
    changing: bool = False,
) -> ExecutionPlan | None:
    """`plan_of` what operands compute, which may be fake; None where there is none to tell."""
    if not has_known_weights(operands):
        return None
    return plan_at_hand(
        problem_of(operands, activation, batch_last, siblings), operands.x, changing
    )


def has_known_weights(operands: Operands) -> bool:
    """Whether no size of a weight is symbolic."""
    return all(isinstance(size, int) for weight in operands.weights for size in weight.shape)


def plan_at_hand(problem: Problem, x: Tensor, changing: bool = False) -> ExecutionPlan | None:
    """`plan_of` a problem for as many rows as x, which may be fake, has at hand; or None."""
    batch = _hint(x.numel()) // problem.chain.in_features
    if problem.is_factor or batch == 0 or x.device.type not in BACKENDS:
        return None
    return plan_of(problem, batch, device=x.device, changing=changing)


def chosen_for_changing(operands: Operands) -> tuple[registry.Candidate | None, bool]:
    """The kernel that computes all of a layer whose weights change; None for a launch a factor.

    Args:
        operands: of a chain, and a bias or none.

    Returns:
        It, and whether later calls may take it unasked.
    """
    decision, is_final = _decision_of_call(operands, "none", False, 1)
    if decision is None or decision.repacked.name == FACTORS:
        return None, is_final
    return decision.repacked.candidate, is_final


def _decision_of_call(
    operands: Operands,
    activation: str,
    batch_last: bool,
    siblings: int,
    check: Callable[[], object] | None = None,
) -> tuple[Decision | None, bool]:
    """What is decided of a layer, None for a launch a factor; whether later calls may take it."""
    what = (batch_last, activation, siblings)
    make = functools.partial(problem_of, operands, activation, batch_last, siblings)
    return decision_of(operands, what, make, check)


def decision_of(
    operands: Operands,
    what: tuple[Any, ...],
    make: Callable[[], Problem],
    check: Callable[[], object] | None = None,
) -> tuple[Decision | None, bool]:
    """What is decided of operands; whether later calls may take it.

    Args:
        operands: of a problem.
        what: all that tells one problem of such operands from another one.
        make: gives the problem.
        check: as for `whole_call`.

    Returns:
        The decision, None where there is nothing to decide, as for one factor; and that.
    """
    x = operands.x
    tensors = (x, *operands.weights, operands.bias, operands.residual, operands.hidden_bias)
    if x.numel() == 0 or not all(map(_is_array, tensors)):  # what multiplies refuses the latter
        return None, False
    if not CHAIN_FAMILIES or not _runs_kernels(x.device):
        return None, True
    place = (
        *map(_kind, tensors),
        *(x.stride(), x.data_ptr() % 16, *what),
        *(precision.is_exact(), torch.are_deterministic_algorithms_enabled()),
    )
    decision = _by_call.get(place)
    if decision is None:
        if check is not None:
            check()
        problem = make()
        if problem.is_factor:
            return None, True  # the factor's own choice
        decision, is_final = _decision(problem, operands)
        if is_final:
            _by_call[place] = decision
    is_known = _by_call.get(place) is decision
    return decision, is_known and not torch.are_deterministic_algorithms_enabled()


def call_of(decision: Decision, operands: Operands) -> Any:
    """What is launched for weights as they are now, a `ChainCall`; None for several launches."""
    x = operands.x
    changing = weight_cache.are_said_to_change() or (
        x.is_cuda and weight_cache.are_changing(x.get_device())
    )
    choice = decision.repacked if changing else decision.cached
    if decision.stored is not None and not changing:
        problem = decision.stored.candidate.problem
        choice = decision.stored if merged.may_keep(problem, operands.weights) else choice
    return None if choice.name in APART else choice.call


def _is_array(tensor: Tensor | None) -> bool:
    """Whether a tensor's numbers lie in memory at strides: not of sparse or nested ones."""
    return tensor is None or (tensor.layout is torch.strided and not tensor.is_nested)


def _runs_kernels(device: torch.device) -> bool:
    known = _has_spec.get(device)
    if known is None:
        known = _has_spec[device] = backend_of(device.type).spec(device) is not None
    return known


def is_real(x: Tensor) -> bool:
    """Whether a tensor has memory: none that a compiler traces with has any."""
    is_plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta"
    return is_plain and not torch._is_functional_tensor(x)


def _hint(size: Any) -> int:
    """The number that a symbolic size has at hand; 0 for none."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def _kind(tensor: Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def problem_of(operands: Operands, activation: str, batch_last: bool, siblings: int) -> Problem:
    """What is computed of operands, at torch's present precision."""
    length = len(operands.weights) // siblings
    chain = Chain(tuple(Pattern(*weight.shape) for weight in operands.weights[:length]))
    bias, residual = operands.bias is not None, operands.residual is not None
    epilogue = Epilogue(bias, activation, residual)  # type: ignore[arg-type]
    dtype = str(operands.x.dtype).removeprefix("torch.")
    return Problem(chain, dtype, batch_last, is_exact(dtype), epilogue, siblings)


def tune(operands: Operands, problem: Problem, budget_s: float) -> Record | None:
    """Measure for these operands even if a choice exists; keep it here and on disk.

    Args:
        operands: of the problem.
        problem: of more than a factor.
        budget_s: seconds for the timing; compilation comes on top.

    Returns:
        What was measured; None where nothing computes the whole problem, so that its factors are
        all there is to tune.
    """
    x = operands.x
    backend = backend_of(x.device.type)
    key = _key(problem, x, x.numel() // problem.chain.in_features)
    if not _has_rivals(key, backend.spec(x.device)):
        return None
    identity = backend.fingerprint(x.device)
    with _timing, tuning_cache.alone(identity, key), _on(x.device):
        decision = _measured(key, operands, tuning_cache.load(identity, key), budget_s)
        record = decision.cached.record
        assert record is not None
        tuning_cache.save(identity, record)
    _decisions[key, x.device] = decision
    _by_call.clear()
    host_plans.forget()
    return record


def tuned(problem: Problem, batch: int, device: torch.device) -> Record | None:
    """What is recorded of a problem; else it is measured now, on random operands.

    Returns:
        None where nothing computes the whole problem.
    """
    backend = backend_of(device.type)
    known = _known(backend.key(problem, batch), device, backend.spec(device))
    if known is not None:
        return known[0]
    operands = random_operands(problem, batch, device)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return tune(operands, problem, BUDGET_S)


def random_operands(problem: Problem, batch: int, device: torch.device) -> Operands:
    """Random operands of a problem, of so many rows, the same each time."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, problem.dtype)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    def rows(features: int) -> Tensor:
        return draw(features, batch) if problem.batch_last else draw(batch, features)

    x = rows(problem.chain.in_features)
    patterns = [p for chain in problem.chains for p in chain] * problem.siblings
    weights = tuple(draw(*p.weight_shape) / p.c**0.5 for p in patterns)
    last = problem.layers()[-1].epilogue
    bias = draw(problem.product_features) if last.bias else None
    residual = rows(problem.out_features) if last.residual else None
    has_hidden = problem.second is not None and problem.epilogue.bias
    hidden = draw(problem.chain.out_features) if has_hidden else None
    return Operands(x, weights, bias, residual, hidden)


def forget() -> None:
    """Forget this process's choices (not those on disk), so that they are made or read anew."""
    _decisions.clear()
    _by_call.clear()
    _has_spec.clear()
    _predicted.cache_clear()
    host_plans.forget()


def _decision(problem: Problem, operands: Operands) -> tuple[Decision, bool]:
    """What is decided, and whether that holds for later calls too."""
    x = operands.x
    key = _key(problem, x, x.numel() // problem.chain.in_features)
    spec, mode = backend_of(x.device.type).spec(x.device), settings.tuning()
    index, deterministic = x.get_device(), torch.are_deterministic_algorithms_enabled()
    known = None if deterministic else _decisions.get((key, x.device))
    if known is not None:
        return known, True
    if mode == "off" or not _has_rivals(key, spec):
        return _by_rule(key, index), True
    if mode == "model" or deterministic:
        return _predicted(key, index, spec), True
    if _is_capturing(x) or not _timing.acquire(blocking=False):
        return _recorded(key, x, spec) or _predicted(key, index, spec), False
    try:
        with _on(x.device):
            decision = _first(key, operands, spec)
    except torch.OutOfMemoryError:  # comparing and timing take more than the product itself
        decision = _predicted(key, index, spec)
    finally:
        _timing.release()
    return _decisions.setdefault((key, x.device), decision), True


def _first(key: ProblemKey, operands: Operands, spec: DeviceSpec | None) -> Decision:
    """What is recorded; else measure, if no other process does so while this one waits."""
    x = operands.x
    identity = _identity(x.device)
    if identity is None:
        return _measured(key, operands)
    decision = _recorded(key, x, spec)
    if decision is not None:
        return decision
    with tuning_cache.alone(identity, key):
        decision = _recorded(key, x, spec)
        if decision is None:
            decision = _measured(key, operands)
            assert decision.cached.record is not None
            tuning_cache.save(identity, decision.cached.record)
    return decision


def _measured(
    key: ProblemKey,
    operands: Operands,
    previous: Record | None = None,
    budget_s: float = BUDGET_S,
) -> Decision:
    problem, device = key.problem, operands.x.device
    ahead = None
    if problem.second is not None:
        hidden = _detached(operands.hidden_bias)
        ahead = Ahead(len(problem.chain), hidden, problem.epilogue.activation)
    around = Around(
        _detached(operands.bias),
        problem.layers()[-1].epilogue.activation,
        _detached(operands.residual),
        problem.siblings,
        ahead,
    )
    with torch.no_grad():
        check, x, weights, around = checking_chain(
            operands.x.detach(),
            [weight.detach() for weight in operands.weights],
            problem.batch_last,
            around,
        )
        hidden = None if around.ahead is None else around.ahead.bias
        own = Operands(x, weights, around.bias, around.residual, hidden)
        # The factors, or the layers' plans, are chosen before they race.
        registry.rule(problem).build(x.get_device())(*own.arguments(problem))
        spec = backend_of(device.type).spec(device)
        return measured(key, own, device, spec, budget_s, check.judge, previous)


def _recorded(key: ProblemKey, x: Tensor, spec: DeviceSpec | None) -> Decision | None:
    """What is on disk, built again without timing; None if it is missing or no longer possible."""
    identity = _identity(x.device)
    record = None if identity is None else tuning_cache.load(identity, key)
    return None if record is None else rebuilt(record, x.get_device(), spec)


@functools.lru_cache(maxsize=4096)
def _predicted(key: ProblemKey, index: int, spec: DeviceSpec | None) -> Decision:
    """The best predicted candidate that can be built, for the key's largest batch."""
    stored: Choice | None = None
    several = registry.best_predicted(key.problem, key.largest_batch, spec, is_judged=False)
    for candidate in several:
        try:
            choice = Choice(candidate, candidate.build(index, key.rows), "model")
        except KsoptError as error:
            registry.warn_once(str(error))
            continue
        if not candidate.takes_parameters:
            return Decision(choice, choice, stored)
        stored = choice
    by_rule = _by_rule(key, index)
    return Decision(by_rule.cached, by_rule.repacked, stored)


def _by_rule(key: ProblemKey, index: int) -> Decision:
    candidate = registry.rule(key.problem)
    choice = Choice(candidate, candidate.build(index), "rule")
    return Decision(choice, choice)


def whole_choice(
    problem: Problem,
    batch: int,
    device: torch.device,
    changing: bool = False,
    spec: DeviceSpec | None = None,
) -> ChoiceReport | None:
    """What is known or predicted of a problem as a whole, be it that its factors are taken.

    Args:
        problem, batch, device, changing, spec: as for `plan_of`.

    Returns:
        None where nothing computes all of it, and for one factor's product alone.
    """
    mode = settings.tuning()
    if mode == "measure" and torch.are_deterministic_algorithms_enabled():
        mode = "model"
    if mode == "off" or not CHAIN_FAMILIES or problem.is_factor:
        return None
    backend = backend_of(device.type if spec is None else "cuda")
    key = backend.key(problem, batch)
    own_spec = backend.spec(device) if spec is None else spec
    if not _has_rivals(key, own_spec):
        return None
    known = None if spec is not None or mode != "measure" else _known(key, device, own_spec)
    if known is not None:
        return from_record(*known, changing)
    several = registry.best_predicted(problem, batch, own_spec)
    best = next(one for one in several if not (changing and one.takes_parameters))
    reason = f"predicted to take {best.predicted_us:.1f} us"
    return ChoiceReport(
        key, batch, best.name, best.config, best.predicted_us, None, (), "model", reason
    )


def _known(
    key: ProblemKey, device: torch.device, spec: DeviceSpec | None
) -> tuple[Record, Source] | None:
    decision = _decisions.get((key, _with_index(device)))
    if decision is not None and decision.cached.record is not None:
        return decision.cached.record, decision.cached.source
    identity = _identity(device)
    record = None if identity is None else tuning_cache.load(identity, key)
    if record is None:
        return None
    for index in record.indices:
        one = record.timed[index]
        if registry.restored(key.problem, one.way, one.config, record.batch, spec) is None:
            return None
    return record, "recorded"


def _with_index(device: torch.device) -> torch.device:
    """The device as its tensors name it."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _key(problem: Problem, x: Tensor, batch: int) -> ProblemKey:
    return ProblemKey(problem, rows_of(x, problem.batch_last, batch), bits_of(batch))


def _has_rivals(key: ProblemKey, spec: DeviceSpec | None) -> bool:
    """Whether anything computes the whole problem on a device, so that there is a choice."""
    return spec is not None and registry.are_rivals(key.problem, key.largest_batch, spec)


def _identity(device: torch.device) -> Fingerprint | None:
    try:
        return backend_of(device.type).fingerprint(device)
    except UnavailableError:  # without its driver nothing is kept
        return None


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The device is the current one inside the block."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and weight_cache.is_capturing(x.get_device())


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
