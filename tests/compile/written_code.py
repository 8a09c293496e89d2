"""The code that Inductor writes for a graph."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch._inductor.utils import run_and_get_code

Result = TypeVar("Result")


def result_and_code(compute: Callable[[], Result]) -> tuple[Result, str]:
    """The result of a compiled function, and its newly generated code.

    Only graphs are compiled again: C++ of the same words comes from the cache on disk.
    """
    inductor = torch._inductor.config.patch(fx_graph_cache=False)
    with inductor, torch._functorch.config.patch(enable_autograd_cache=False):
        result, code = run_and_get_code(compute)
    return result, "\n".join(code)
