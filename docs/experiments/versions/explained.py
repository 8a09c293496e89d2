"""The explanations of one version: `ksopt.explain` of every module of a folder, as JSON.

python -m versions.explained FOLDER [FOLDER ...]

A module has ``build()``, which returns a model, and its input: ``INPUT``, a shape, or
``example()``. Modules of tests/fuzz have ``M``, ``inputs(B)`` and ``DYNAMIC`` instead.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ksopt.compile.explain import explain

_ROWS = 5


def main() -> int:
    """Explain, and print one JSON document."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    document: dict[str, Any] = {}
    for folder in map(Path, sys.argv[1:]):
        for path in sorted(folder.glob("*.py")):
            document[path.stem] = {name: of_call(call) for name, call in calls(loaded(path))}
    json.dump(document, sys.stdout)
    return 0


def loaded(path: Path) -> ModuleType:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(f"layer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calls(layer: ModuleType) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls of a layer: a name, and the arguments of `explain` and of the call."""
    if hasattr(layer, "M"):
        grad = layer.CALLS[0]["mode"] == "grad"
        dynamic = True if layer.DYNAMIC else None
        yield "as written", {"layer": layer, "grad": grad, "dynamic": dynamic}
        return
    yield "training", {"layer": layer, "grad": True}
    yield "training, any batch", {"layer": layer, "grad": True, "dynamic": True}
    yield "no gradients", {"layer": layer, "grad": False}
    yield "training, judged by played times", {"layer": layer, "grad": True, "tune": "measure"}
    yield "no gradients, judged by played times", {"layer": layer, "grad": False, "tune": "measure"}


def of_call(call: dict[str, Any]) -> dict[str, Any]:
    """The explanation of one call, or the error's type."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, grad = call.pop("layer"), call.pop("grad")
    try:
        model, inputs = built(layer)
        with torch.set_grad_enabled(grad):
            explanation = explain(model.train(grad), *inputs, **call)
    except Exception as error:
        return {"error": type(error).__name__}
    answer: dict[str, Any] = explanation.to_json()
    return answer


def built(layer: ModuleType) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The model and its input."""
    if hasattr(layer, "M"):
        return layer.M(), layer.inputs(_ROWS)
    if hasattr(layer, "example"):
        return layer.build(), [layer.example()]
    return layer.build(), [torch.randn(layer.INPUT)]


if __name__ == "__main__":
    sys.exit(main())
