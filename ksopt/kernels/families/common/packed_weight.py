"""Families whose kernel reads a weight that another kernel of theirs has packed."""

from __future__ import annotations

import abc
from typing import ClassVar

from ksopt.kernels import codegen
from ksopt.kernels.families.base import ConfigT, TemplateFamily
from ksopt.kernels.launcher import prepare
from ksopt.kernels.packing_launcher import PackedLauncher
from ksopt.kernels.problem import Geometry, Problem
from ksopt.patterns.chain import Pattern


class PackedFamily(TemplateFamily[ConfigT]):
    """A family of two kernels: one packs the weight once a version, one multiplies by it.

    Attributes:
        launcher_class: which x the kernel takes.
    """

    launcher_class: ClassVar[type[PackedLauncher]] = PackedLauncher

    @abc.abstractmethod
    def packed_elements(self, problem: Problem, config: ConfigT) -> int:
        """Elements of the packed weight."""

    @abc.abstractmethod
    def packed_form(self, problem: Problem, config: ConfigT) -> str:
        """The name of the packed weight's order: tiles with the same order share the weight."""

    @abc.abstractmethod
    def pack_geometry(self, problem: Problem, config: ConfigT) -> Geometry:
        """The launch geometry of the packing kernel."""

    @abc.abstractmethod
    def pack_source(self, problem: Problem, config: ConfigT) -> str:
        """The generated file of the kernel that packs weights, of any strides, for the tile."""

    def pack_problem(self, problem: Problem, config: ConfigT) -> Problem:
        """Packing as a launcher sees it: the packed weight is y's only row."""
        elements = self.packed_elements(problem, config)
        return Problem.of_factor(Pattern(1, elements, problem.pattern.nnz, 1), problem.dtype, False)

    def pack_name(self, problem: Problem) -> str:
        """The name of the kernel that packs weights, as profilers show it."""
        return codegen.kernel_name(f"{self.name}_pack", self.arithmetic(problem), problem.pattern)

    def sources(self, problem: Problem, config: ConfigT) -> list[str]:
        return [self.pack_source(problem, config), self.source(problem, config)]

    def launcher(self, problem: Problem, config: ConfigT, device_index: int) -> PackedLauncher:
        return self.launcher_class(
            self.packed_form(problem, config),
            prepare(
                self.pack_problem(problem, config),
                self.pack_name(problem),
                self.pack_source(problem, config),
                self.pack_geometry(problem, config),
                device_index,
            ),
            prepare(
                problem,
                self.kernel_name(problem),
                self.source(problem, config),
                self.geometry(problem, config),
                device_index,
            ),
            self.fallback(problem, config, device_index),
        )
