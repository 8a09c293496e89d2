"""Layers on a CPU that plays a CUDA device, and what may happen to their weights.

The driver's kernels compute: one packs a factor's weight, one multiplies by that alone, one packs a
layer's weights as a matrix, as Python does here, and one multiplies by that.
"""

import gc
from types import MappingProxyType, SimpleNamespace

import torch
from played_driver import (
    CHAIN,
    MULTIPLY,
    MULTIPLY_AS_IT_IS,
    MULTIPLY_WITHIN,
    PACK,
    PACK_CHAIN,
    chain_of,
    decide,
    multiplies_by,
    variable,
)
from torch import nn

import ksopt
from ksopt import KSLinear, ops
from ksopt.epilogue import with_epilogue
from ksopt.kernels import host_plans, merged, plan_autotuner, weight_groups
from ksopt.kernels.autotuner import Choice, Decision
from ksopt.kernels.by_factors import ByFactors, ByPair
from ksopt.kernels.candidate import FACTORS, MERGED, Candidate, Pair
from ksopt.kernels.labels import PAIR
from ksopt.kernels.launcher import HostLauncher, chain_entry
from ksopt.kernels.merged import merge
from ksopt.kernels.packing_launcher import PackedLauncher, geometry_of
from ksopt.kernels.problem import Epilogue, Geometry, Problem
from ksopt.patterns.chain import Chain, Pattern
from ksopt.reference import chain_reference, chain_to_dense

TEXT = "(2,4,4,4)*(2,4,4,4)"
PLAIN = Chain.parse(TEXT)
ROWS = 200


def of_siblings(weights, siblings):
    """The weights of each of several chains."""
    length = len(weights) // siblings
    return [weights[at : at + length] for at in range(0, len(weights), length)]


def product(x, weights, siblings):
    """The products of siblings, side by side."""
    parts = [chain_reference(x, each) for each in of_siblings(weights, siblings)]
    return torch.cat(parts, dim=-1)


class Launched:
    """(x, weights, ...) -> y as a family's launcher of chains: the kernel that the driver plays."""

    FORM = "as a matrix"
    grid = MappingProxyType({"rows_per_unit": 64, "most_blocks": 2, "cluster": 1})

    def __init__(self, problem):
        self.problem, self.packs, self.calls = problem, 0, 0

    def __call__(self, x, weights, bias=None, residual=None, out=None, /):
        self.calls += 1
        weight_groups.prepared_together(weights, self.FORM, self._pack)
        y = product(x, weights, self.problem.siblings)
        y = with_epilogue(y, bias, self.problem.epilogue.activation, residual)
        return y if out is None else out.copy_(y)

    def _pack(self, weights):
        self.packs += 1
        dense = [chain_to_dense(each).t() for each in of_siblings(weights, self.problem.siblings)]
        return torch.cat(dense, dim=1).view(1, 1, 1, -1)

    def entry(self):
        p = self.problem
        shapes = [one.weight_shape for _ in range(p.siblings) for one in p.chain]
        form = weight_groups.number_of(self.FORM, shapes, p.dtype)
        return chain_entry(
            kernel=CHAIN, out_features=p.out_features, threads=128, shared_bytes=0, form=form,
            pack=PACK_CHAIN, pack_blocks=1, pack_threads=32,
            packed_elements=p.chain.in_features * p.siblings * p.chain.out_features, **self.grid,
        )  # fmt: skip


def packed_launcher(problem, kernel):
    """The launcher of a factor's kernel that the driver plays, and of the one that packs for it."""
    elements = problem.pattern.nnz
    packing = Problem.of_factor(Pattern(1, elements, elements, 1), "float32", False)
    return PackedLauncher(
        "doubled",
        HostLauncher(packing, geometry_of(elements), PACK, None),
        HostLauncher(problem, Geometry(32, 0, 16, 1, 100), kernel, None),
        fallback=None,
    )


class FamilyWithEpilogues:
    """Of kernels that compute an epilogue too; it counts what is built."""

    name, takes_epilogues = "played", True

    def __init__(self):
        self.built = []

    def takes(self, epilogue):
        return not epilogue.in_float32

    def launcher(self, problem, tile, device_index):
        self.built.append(problem.epilogue)
        return packed_launcher(problem, MULTIPLY_WITHIN)


class Device:
    """A layer, and its plan on the device that is played.

    Args:
        library, monkeypatch: the fixtures.
        siblings: chains that read x; the layer is the first.
        residual: whether something is added to the result.
        gated: whether the products of two siblings are multiplied.
    """

    family = None
    """Of the kernels that multiply by one factor."""

    def __init__(self, library, monkeypatch, siblings=1, residual=False, gated=False):
        self.library, self.siblings = library, siblings
        self.activation = "relu_gate" if gated else "relu"
        self.parts = 1 if gated else siblings
        self.x = torch.randn(ROWS, PLAIN.in_features)
        self.layer = KSLinear(PLAIN.in_features, PLAIN.out_features, PLAIN, activation="relu")
        self.layer.requires_grad_(False)
        drawn = (torch.randn(p.weight_shape) for _ in range(siblings - 1) for p in PLAIN)
        self.others = [nn.Parameter(one, requires_grad=False) for one in drawn]
        self.features = self.parts * PLAIN.out_features
        bias = torch.randn(siblings * PLAIN.out_features)
        self.layer.bias = nn.Parameter(bias, requires_grad=False)
        self.residual = torch.randn(ROWS, self.features) if residual else None
        epilogue = Epilogue(True, self.activation, residual)
        self.problem = Problem(PLAIN, "float32", False, epilogue=epilogue, siblings=siblings)
        spec = SimpleNamespace(spec=lambda _: object(), device_type="cpu")
        monkeypatch.setattr(plan_autotuner, "backend_of", lambda _: spec)
        monkeypatch.setattr(plan_autotuner, "_decision", self._decision)
        self.decided = 0
        self._decide_factors()

    def _decide_factors(self):
        """Each factor's product is by a packed weight."""
        (pattern, _) = PLAIN
        multiplies_by(self.library, pattern)
        factor = Problem.of_factor(pattern, "float32", False)
        decide(self.x, self.weights[0], packed_launcher(factor, MULTIPLY), self.family)

    def _decision(self, problem, operands):
        self.decided += 1
        return self.decision, True

    @property
    def weights(self):
        return [*self.layer.weights, *self.others]

    def arguments(self):
        around = (self.layer.bias, self.residual, self.activation, False, self.siblings)
        return self.weights, *around

    def known(self, x=None, out=None):
        """y, if it takes no Python beyond the look at what is prepared."""
        return host_plans.run(self.x if x is None else x, *self.arguments(), out=out)

    def check(self, y, x=None):
        x = self.x if x is None else x
        sums = product(x, self.weights, self.siblings) + self.layer.bias
        first, others = sums[..., : self.features], sums[..., self.features :]
        expected = torch.relu(first) * others if others.numel() else torch.relu(first)
        if self.residual is not None:
            expected = expected + self.residual
        size = 1e-4 * max([1.0, *expected.abs().flatten().tolist()])
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=size)

    def run(self):
        y = ops.chain(self.x, *self.arguments())
        self.check(y)
        return y


class Whole(Device):
    """One launch."""

    launches = 1

    def __init__(self, library, monkeypatch, **layer):
        super().__init__(library, monkeypatch, **layer)
        chain_of(library, PLAIN, self.siblings, self.parts)
        self.call = Launched(self.problem)
        choice = Choice(Candidate("played", self.problem, 1.0), self.call, "model")
        self.decision = Decision(choice, choice)

    @property
    def packs(self):
        """By Python, and by the driver's kernel."""
        return self.call.packs + variable(self.library, "packs").value


class Factors(Device):
    """A launch a factor, by packed weights."""

    def __init__(self, library, monkeypatch, **layer):
        super().__init__(library, monkeypatch, **layer)
        self.launches = len(self.weights)
        choice = Choice(Candidate(FACTORS, self.problem, 1.0), ByFactors(self.problem), "model")
        self.decision = Decision(choice, choice)

    @property
    def packs(self):
        return variable(self.library, "packs").value


class FactorsAsStored(Factors):
    """A launch a factor, by kernels that read weights whose elements are in order."""

    def _decide_factors(self):
        def no_fallback():
            raise AssertionError("all operands are aligned")

        (pattern, _) = PLAIN
        multiplies_by(self.library, pattern)
        factor = Problem.of_factor(pattern, "float32", False)
        shape = Geometry(32, 0, 16, 1, 100)
        kernel = HostLauncher(factor, shape, MULTIPLY_AS_IT_IS, no_fallback)
        decide(self.x, self.weights[0], kernel, self.family)


class FactorsWithin(Factors):
    """A launch a factor, of which the last computes the epilogue."""

    def __init__(self, library, monkeypatch, **layer):
        self.family = FamilyWithEpilogues()
        super().__init__(library, monkeypatch, **layer)


class Paired(FactorsWithin):
    """Two kernels of the plan's own for weights that are cached, each factor's own for others."""

    def __init__(self, library, monkeypatch, **layer):
        super().__init__(library, monkeypatch, **layer)
        two = [self._kernel(factor) for factor in reversed(self.problem.factors())]
        tile = Pair(*(one.candidate for one in two))
        candidate = Candidate(PAIR, self.problem, 2.0, tile=tile)
        pair = Choice(candidate, ByPair(self.problem, *two), "model")
        self.decision = Decision(pair, self.decision.repacked)

    def _kernel(self, factor):
        candidate = Candidate("played", factor, 1.0, self.family)
        return Choice(candidate, packed_launcher(factor, MULTIPLY), "model")


class ByMatrix(Device):
    """One product by the matrix of all weights, which is the host library's own call of torch."""

    launches = 0

    def __init__(self, library, monkeypatch, **layer):
        super().__init__(library, monkeypatch, **layer)
        self.packs = 0
        monkeypatch.setattr(merged, "merge", self._merge)
        self.decision = self.decision_of(self.problem)

    @staticmethod
    def decision_of(problem):
        by_matrix, factors = (
            Choice(Candidate(name, problem, 1.0), call(problem), "model")
            for name, call in ((MERGED, merged.Merged), (FACTORS, ByFactors))
        )
        return Decision(factors, factors, by_matrix)

    def _merge(self, weights, siblings):
        self.packs += 1
        several = of_siblings(weights, siblings)
        return torch.cat([chain_to_dense(each) for each in several])


class ByProduct(ByMatrix):
    """One launch of a factor's kernel, whose weight is packed from the product of all factors.

    That product has the pattern of each of its factors, so what is decided for them serves it.
    """

    launches = 1

    def _merge(self, weights, siblings):
        self.packs += 1
        return merge(weights, siblings)


def in_place(device):
    device.layer.weights[1].mul_(-1.5)


def first_in_place(device):
    device.layer.weights[0].add_(1)


def other_data(device):
    device.layer.weights[1].data = torch.randn_like(device.layer.weights[1])


def written_and_refreshed(device):
    device.layer.weights[1].data.add_(1)
    ksopt.refresh()


def another_weight(device):
    values = torch.randn_like(device.layer.weights[1])
    device.layer.weights[1] = nn.Parameter(values, requires_grad=False)
    gc.collect()


def the_same_memory_by_another_name(device):
    """It counts versions of its own, from 0."""
    values = device.layer.weights[1].data.mul_(3)
    device.layer.weights[1] = nn.Parameter(values, requires_grad=False)


def a_training_step(device):
    device.layer.requires_grad_()
    with torch.enable_grad():
        device.layer(device.x).square().mean().backward()
    torch.optim.SGD(device.layer.parameters(), lr=0.1).step()
    device.layer.zero_grad()
    device.layer.requires_grad_(False)


def a_write_behind_a_training_forward(device):
    device.layer.weights[1].requires_grad_()
    with torch.enable_grad():
        device.layer(device.x)
    device.layer.weights[1].data.mul_(2)
    device.layer.weights[1].requires_grad_(False)


def a_state_dict(device):
    other = KSLinear(PLAIN.in_features, PLAIN.out_features, PLAIN, activation="relu")
    device.layer.load_state_dict(other.state_dict())


EVENTS = [
    *(in_place, first_in_place, other_data, written_and_refreshed, another_weight),
    *(the_same_memory_by_another_name, a_training_step, a_write_behind_a_training_forward),
    a_state_dict,
]
