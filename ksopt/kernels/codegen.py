"""The generated files of kernels: each instantiates one template of csrc/cuda.

A file is a `tile` and one `kernel` on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ksopt.epilogue import ACTIVATIONS
from ksopt.kernels.problem import EMPTY, Epilogue
from ksopt.patterns.chain import Pattern


def kernel_name(family: str, arithmetic: str, p: Pattern) -> str:
    """A kernel's name, as profilers show it.

    Args:
        family: such as ``mma16``.
        arithmetic: such as ``float16``.
        p: the pattern.

    Example:
        >>> kernel_name("mma16", "float16", Pattern(4, 64, 64, 16))
        'ksopt_mma16_float16_4_64_64_16'
    """
    return f"ksopt_{family}_{arithmetic}_{'_'.join(map(str, p.weight_shape))}"


def tile(template: str, p: Pattern, instance: str, facts: Mapping[str, int], family: str) -> str:
    """The part that defines the pattern and the tile: ``Support`` and ``Tile``.

    Args:
        template: the template's file, such as ``mma16.cuh``.
        p: the pattern.
        instance: of the template, such as ``Mma16Tile<Support, 1, 2>``.
        facts: expressions of the template -> their values by Python; a static_assert compares them.
        family: the module that computed the values, without its ending.
    """
    agree = "".join(
        f'static_assert({fact} == {value}, "csrc and kernels/families/{family}.py disagree");\n'
        for fact, value in facts.items()
    )
    return (
        f'#include "{template}"\n'
        f"using Support = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
        f"using Tile = {instance};\n"
        f"{agree}"
    )


def kernel(
    name: str,
    call: str,
    bounds: str = "Tile::THREADS, Tile::BLOCKS",
    attributes: str = "",
    after: Epilogue = EMPTY,
) -> str:
    """The kernel itself, which calls a function template.

    Args:
        name: its ``extern "C"`` name.
        call: the template's instance, such as ``mma16_kernel<Float16, Support, Tile>``.
        bounds: threads of a block, and least blocks on a multiprocessor.
        attributes: others than the bounds, with a space after each.
        after: the epilogue, for templates whose last argument it is.
    """
    arguments = "Arguments"
    if not after.is_empty:
        arguments = "EpilogueArguments"
        activation = ACTIVATIONS.index(after.activation)
        extras = (activation, int(after.bias), int(after.residual), *(1,) * after.in_float32)
        call = f"{call.removesuffix('>')}, FactorEpilogue<{', '.join(map(str, extras))}>>"
    return (
        f'extern "C" __global__ void {attributes}__launch_bounds__({bounds})\n'
        f"{name}(const __grid_constant__ {arguments} arguments) {{\n"
        f"  {call}(arguments);\n"
        "}\n"
    )
