"""The interface of a kernel family, and the registry of all families."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from torch import Tensor

from ksopt.errors import InvalidInputError
from ksopt.kernels import codegen
from ksopt.kernels.launcher import Launcher, MakeLauncher, prepare
from ksopt.kernels.problem import RESERVED_SHARED, DeviceSpec, Epilogue, Geometry, Problem
from ksopt.patterns.chain import Pattern

HALF: Mapping[str, str] = MappingProxyType({"float16": "Float16", "bfloat16": "BFloat16"})
SINGLE: Mapping[str, str] = MappingProxyType({"float32": "float"})
ANY_TYPE: Mapping[str, str] = MappingProxyType({**SINGLE, **HALF})
"""Element types that kernels take, and what device code calls them."""

_SHORTEST_EXACT_SUM = 32


class KernelConfig(Protocol):
    """The tile of a kernel: a frozen dataclass of plain values."""

    @property
    def blocks(self) -> int:
        """Blocks that run on a multiprocessor at a time."""

    def shared_bytes(self, p: Any, /) -> int:
        """Dynamic shared memory of a block in bytes, for a pattern or the family's own argument."""


ConfigT = TypeVar("ConfigT", bound=KernelConfig)


class KernelFamily(abc.ABC, Generic[ConfigT]):
    """Kernels that compute one factor's product, or a whole chain's, with a choice of tiles.

    Attributes:
        name: of the family, which records on disk and reports show.
        dtypes: the element types of x, weight and y, and what device code calls them.
        layout: of x and y; None for both.
        capability: the least compute capability that has the family's instructions.
        capability_only: whether no later capability has them: sm_90a code runs on 9.0 alone.
        splits: whether exact fp32 products are three TF32 ones: short sums are then less exact.
        packs_from_d: the least d of patterns whose weight is prepared before the kernel is launched
            (through weight_cache.py); None if no weight is.
        max_batch: the most rows that it is for; None without a limit.
        takes_chains: whether it computes chains of several factors, or epilogues, or siblings, each
            as far as `unsupported_shape` allows; its launchers are `candidate.ChainCall`s.
            Others compute one factor's product alone, and are called with (x, weight, out=None).
        takes_epilogues: whether its kernels of one factor may have an epilogue, but for gates: of a
            problem with one, its launcher is called by `Launcher.with_epilogue`. Such a kernel is
            no candidate: it takes the place of the one that is chosen for the product alone.
        takes_float32_results: whether a chain's result, or one with an epilogue, may be written in
            float32 where the operands are of 16 bit.
        takes_mlps: whether it computes two layers, one behind the other, as far as
            `unsupported_shape` allows; its launchers then are `candidate.MlpCall`s.
        by_pytorch: whether PyTorch multiplies, which may round 16-bit sums more than once: a result
            that fails the check is then no fault of a kernel.
        is_judged_first: whether cuBLAS may add partial sums of its products in 16 bit, where it
            rounds those of the author's shapes only once. In 16 bit such a family is chosen only
            after its result was compared, never by its predicted time alone.
        is_fallback: whether it computes every problem, on operands of any strides and alignment. It
            is not ranked with the others: it is for problems that they do not support, or are slow
            on.
    """

    name: ClassVar[str]
    dtypes: ClassVar[Mapping[str, str]]
    layout: ClassVar[Literal["batch_first", "batch_last"] | None] = None
    capability: ClassVar[tuple[int, int]] = (8, 0)
    capability_only: ClassVar[bool] = False
    splits: ClassVar[bool] = False
    packs_from_d: ClassVar[int | None] = None
    max_batch: ClassVar[int | None] = None
    takes_chains: ClassVar[bool] = False
    takes_epilogues: ClassVar[bool] = False
    takes_float32_results: ClassVar[bool] = False
    takes_mlps: ClassVar[bool] = False
    by_pytorch: ClassVar[bool] = False
    is_judged_first: ClassVar[bool] = False
    is_fallback: ClassVar[bool] = False

    @abc.abstractmethod
    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[ConfigT]:
        """All tiles worth considering, in no order.

        Args:
            problem: one that the family supports.
            device: what the tiles run on. Tiles that do not fit into it are left out later.
        """

    @abc.abstractmethod
    def predicted_us(
        self, problem: Problem, config: ConfigT, batch: int, device: DeviceSpec
    ) -> float:
        """Predicted time of a tile, so that only the best few are compiled and measured.

        Args:
            problem: what is computed.
            config: the tile.
            batch: rows of x.
            device: what it runs on.

        Returns:
            Microseconds.
        """

    def with_epilogue_us(
        self, problem: Problem, config: ConfigT, batch: int, device: DeviceSpec
    ) -> float:
        """`predicted_us` plus the time of the epilogue, for families that leave it out.

        The epilogue takes the same time with all tiles of a family. It matters where the launches
        of layers are compared with a launch that computes several of them.
        """
        return self.predicted_us(problem, config, batch, device)

    @abc.abstractmethod
    def sources(self, problem: Problem, config: ConfigT) -> list[str]:
        """The generated files that `launcher` compiles at once."""

    @abc.abstractmethod
    def launcher(
        self, problem: Problem, config: ConfigT, device_index: int
    ) -> Callable[..., Tensor]:
        """Compile and load the kernels on a CUDA device.

        Returns:
            (x, weight, out=None) -> y, with out as for `cuda.run`.

        Raises:
            UnavailableError, CompilationError: see :mod:`ksopt.jit`.
        """

    def stores_intermediate(self, problem: Problem) -> bool:
        """Whether `storing_launcher` has a kernel of a problem that the family supports."""
        return False

    def storing_launcher(
        self, problem: Problem, config: ConfigT, device_index: int, of_grad: Any = None
    ) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        """The `launcher` of chains of two factors whose weights change with every call.

        Args:
            problem, config, device_index: as for `launcher`.
            of_grad: the tile of `input_grad_tile` that computes the gradient of x; or None.

        Returns:
            (x, weights, bias) -> y, and for the backward pass what is between the factors, and the
            weights as ``of_grad`` reads them, or nothing, [0], if that is None.
        """
        raise NotImplementedError

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        """Why the family does not compute the problem's shape, or None if it does.

        Its patterns, and of a family that takes chains also their number, epilogue and siblings.

        Args:
            problem: of one of the family's dtypes, in its layout.
            device: one that has the family's instructions.
        """
        return None

    def unsupported_reason(self, problem: Problem, device: DeviceSpec) -> str | None:
        """Why the family does not compute ``problem`` on ``device``, or None if it does."""
        least = ".".join(map(str, self.capability))
        here = ".".join(map(str, device.capability))
        if self.capability_only and device.capability != self.capability:
            return f"it needs compute capability {least}, and the device has {here}"
        if device.capability < self.capability:
            return f"it needs compute capability {least} or newer, and the device has {here}"
        if problem.second is not None and not self.takes_mlps:
            return "it computes one layer at most"
        if not problem.is_factor and not self.takes_chains:
            return "it computes one factor's product alone"
        if problem.layers()[-1].epilogue.in_float32 and not self.takes_float32_results:
            return "its results have the type of its operands"
        c = min(pattern.c for chain in problem.chains for pattern in chain)
        if self.splits and problem.exact and c < _SHORTEST_EXACT_SUM:
            # Three TF32 products are then further from float64 than cuBLAS (docs/development).
            return f"sums of c = {c} < {_SHORTEST_EXACT_SUM} values are less exact than cuBLAS's"
        if problem.dtype not in self.dtypes:
            return f"{problem.dtype} is not one of {', '.join(self.dtypes)}"
        if self.layout is not None and problem.layout != self.layout:
            return f"{problem.layout} has its own kernels"
        return self.unsupported_shape(problem, device)

    def takes(self, epilogue: Epilogue) -> bool:
        """Whether a kernel of one factor may have an epilogue: see `takes_epilogues`."""
        return self.takes_epilogues and (self.takes_float32_results or not epilogue.in_float32)

    def shared_bytes(self, problem: Problem, config: ConfigT) -> int:
        """Dynamic shared memory of a tile's block, in bytes; families of chains override it."""
        return config.shared_bytes(problem.pattern)

    def fits(self, problem: Problem, config: ConfigT, device: DeviceSpec) -> bool:
        """Whether a tile's blocks fit on a multiprocessor of ``device``."""
        shared = self.shared_bytes(problem, config) + RESERVED_SHARED
        return shared * config.blocks <= device.shared_bytes

    def prepares_weight(self, p: Pattern) -> bool:
        """Whether the weight of pattern ``p`` is prepared before the kernel is launched."""
        return self.packs_from_d is not None and p.d >= self.packs_from_d


class TemplateFamily(KernelFamily[ConfigT]):
    """A family of one kernel, which is an instance of a template of csrc/cuda.

    Attributes:
        template: the file of csrc/cuda that holds it.
    """

    template: ClassVar[str]

    @abc.abstractmethod
    def geometry(self, problem: Problem, config: ConfigT) -> Geometry:
        """The launch geometry of the kernel."""

    @abc.abstractmethod
    def source(self, problem: Problem, config: ConfigT) -> str:
        """The generated file: one instance of the template."""

    def sources(self, problem: Problem, config: ConfigT) -> list[str]:
        return [self.source(problem, config)]

    def kernel_name(self, problem: Problem) -> str:
        """The kernel's name, as profilers show it."""
        name = codegen.kernel_name(self.name, self.arithmetic(problem), problem.pattern)
        return "_".join((name, *problem.epilogue.names))

    def arithmetic(self, problem: Problem) -> str:
        """The arithmetic in the kernel's name."""
        return "tf32" if self.splits and not problem.exact else problem.dtype

    def launcher(self, problem: Problem, config: ConfigT, device_index: int) -> Launcher:
        return prepare(
            problem,
            self.kernel_name(problem),
            self.source(problem, config),
            self.geometry(problem, config),
            device_index,
            self.fallback(problem, config, device_index),
        )

    def fallback(self, problem: Problem, config: ConfigT, device_index: int) -> MakeLauncher | None:
        """A function that creates the launcher for operands that the kernel does not take.

        They are those whose rows do not begin at multiples of 16 bytes. None if it takes them too.
        """
        from ksopt.kernels.families import naive  # here, for it imports this module

        return functools.partial(naive.launcher, problem, device_index)


_families: dict[str, KernelFamily[Any]] = {}
CHAIN_FAMILIES: list[str] = []
"""The names of the families that take chains. Where there are none, no chain is planned."""

FamilyClass = TypeVar("FamilyClass", bound=type[KernelFamily[Any]])


def register_family(cls: FamilyClass) -> FamilyClass:
    """Class decorator that adds a family to the candidates of every product it supports.

    Earlier choices, of this process or on disk, stay as they are.

    Raises:
        InvalidInputError: another family has its name.
    """
    family = cls()
    if family.name in _families:
        raise InvalidInputError(f"register_family: there is a family {family.name!r} already")
    _families[family.name] = family
    if family.takes_chains:
        CHAIN_FAMILIES.append(family.name)
    return cls


def unregister_family(name: str) -> None:
    """Take a family out of the registry.

    Raises:
        InvalidInputError: there is no such family.
    """
    family_of(name)
    del _families[name]
    CHAIN_FAMILIES[:] = [one for one in CHAIN_FAMILIES if one != name]


def families() -> tuple[KernelFamily[Any], ...]:
    """All families that are registered."""
    return tuple(_families.values())


def family_of(name: str) -> Any:
    """The family of a name, typed as the caller's class.

    Raises:
        InvalidInputError: there is no such family.
    """
    if name not in _families:
        raise InvalidInputError(
            f"{name!r} is not a kernel family; there are {', '.join(sorted(_families))}"
        )
    return _families[name]
