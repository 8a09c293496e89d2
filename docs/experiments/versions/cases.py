"""The cases for both versions: command lines, input files and the compared documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from versions import documents
from versions.running import Finished, Version


@dataclass(frozen=True)
class Case:
    """One input of one command.

    Attributes:
        command: of ksopt.
        title: the input, as the table names it.
        lines: arguments of ``ksopt``, run in sequence in one folder.
        document: (the outputs) -> the compared document.
        code: the exit code of each.
        environment: additional variables.
        module: the module to run instead of ``ksopt``.
    """

    command: str
    title: str
    lines: tuple[str, ...]
    document: Callable[[Finished], dict[str, Any]]
    code: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "ksopt"

    def run(self, version: Version, folder: Path) -> dict[str, Any]:
        """The document of one version.

        Args:
            version: a version that is laid out.
            folder: an empty folder.

        Raises:
            RunError: a command ended with another exit code.
        """
        write_files(folder)
        printed = tuple(
            version.run(folder, [self.module, *line.split()], self.code, self.environment)
            for line in self.lines
        )
        return self.document(Finished(folder, printed))


def write_files(folder: Path) -> None:
    """Write the input files of the commands: trained weights, plans, a config."""
    random = np.random.default_rng(0)
    blocks = np.kron(np.eye(4), np.ones((16, 8))) * random.standard_normal((64, 32))
    noisy = blocks + 0.1 * random.standard_normal((64, 32))
    save_file({"layer.weight": noisy.astype(np.float32)}, folder / "trained.safetensors")
    for name, value in {**PLANS, "config": CONFIG}.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
"""The config.json of a transformers model."""

_SQUARE = {"in_features": 32, "out_features": 32}
PLANS = {
    "plan": {
        "schema": "ksopt.plan/1",
        "layers": [
            {"match": "2", "chain": None},
            {"match": "*.up", "chain": "(1,32,8,4)*(4,8,8,1)"},
            {"match": "*", **_SQUARE, "chain": "(1,8,8,4)*(4,8,8,1)"},
            {"match": "*.down", "chain": "(1,8,4,4)*(2,4,8,2)*(4,8,32,1)"},
        ],
    },
    "tied": {
        "schema": "ksopt.plan/1",
        "layers": [
            {"match": "qkv", "chains": ["(1,8,8,4)*(4,8,8,1)"] * 3},
            {"match": "*", **_SQUARE, "chain": "(4,8,8,1)"},
        ],
    },
}

_MODEL = "versions.models:build"
_PATTERNS = "--pattern (4,8,8,4) (1,16,16,3) (6,5,7,1) --chain (1,16,8,4)*(4,8,8,1)"


def _search(title: str, words: str, *again: str) -> Case:
    """A search on the CPU, and others that continue in its folder."""
    lines = tuple(f"search {words} {more} --device cpu --out out" for more in again or ("",))
    return Case("search", title, lines, documents.search)


def _explain(title: str, words: str) -> Case:
    return Case("explain", title, (f"explain {words} --json",), documents.explain)


def _convert(title: str, words: str) -> Case:
    line = f"convert {words} --out out --json"
    return Case("convert", title, (line,), documents.convert)


def _tune(title: str, *lines: str) -> Case:
    lines = tuple(f"tune {line} --device cpu --seconds 0.05 --json" for line in lines)
    return Case("tune", title, lines, documents.tune)


def _bench(title: str, words: str) -> Case:
    line = f"bench kernels {words} --device cpu --out out --json"
    return Case("bench kernels", title, (line,), documents.bench)


def _doctor(title: str, **environment: str) -> Case:
    lines = ("doctor --json", "doctor")
    code = 1 if environment.get("KSOPT_TUNE") == "sometimes" else 0
    return Case("doctor", title, lines, documents.doctor, code, environment)


def _refused(command: str, title: str, line: str) -> Case:
    return Case(command, title, (line,), documents.refusal, code=2)


CASES = (
    _search("32x64", "--dims 32x64 --budget 25% 50% --batch 16 --trials 16"),
    _search("64x96, a ladder", "--dims 64x96 --budget 10% 25% 3k 75% --batch 32 --trials 30"),
    _search("48x80, two factors", "--dims 48x80 --factors 2 --min-use 0.3 --batch 8 --trials 20"),
    _search("four sizes", "--dims 32x32 32x64 64x32 24x60 --batch 16 --budget 25% --trials 28"),
    _search(
        "a model, timed whole",
        f"--model {_MODEL} --measure-model versions.models:inputs --exclude 0.q --batch 16 "
        "--budget 25% 50% --trials 24",
    ),
    _search("a config", "--hf-config config.json --exclude *.k_proj --batch 16 --trials 20"),
    _search("bf16", "--dims 64x64 --dtype bf16 --batch 16 --trials 16"),
    _search("fp16, batch_last", "--dims 64x32 --dtype fp16 --layout batch_last --trials 12"),
    _search("training", "--dims 32x64 --train --batch 16 --trials 12"),
    _search("latency alone", "--dims 64x64 --objective latency --min-rank 16 --trials 16"),
    _search(
        "trained weights",
        "--dims 32x64 --weights trained.safetensors:layer.weight --objective pareto-error "
        "--max-error 0.6 --batch 16 --trials 16",
    ),
    _search("an own objective", "--dims 32x64 --score versions.models:score --trials 12"),
    _search("families", "--dims 64x64 --families monarch,low_rank --min-rank 8 --trials 12"),
    _search(
        "limits",
        "--dims 64x128 --chainable --aligned --block-sizes multiple:4 --min-rank 16 "
        "--max-params 2500 --min-speedup 1.1 --trials 16",
    ),
    _search(
        "every chain", "--dims 20x12 --factors 2 --min-rank 4 --min-use 0 --batch 8 --trials 100"
    ),
    _search("another seed", "--dims 64x64 --seed 7 --batch 16 --trials 40"),
    _search("taken up twice", "--dims 32x64 --batch 16", "--trials 5", "--trials 9", "--trials 20"),
    Case(
        "search",
        "replayed",
        (
            "search --dims 32x64 32x32 --batch 16 --trials 12 --device cpu --out first",
            "search --replay first --out out",
        ),
        documents.search,
    ),
    _refused("search", "a budget below all", "search --dims 32x64 --budget 1% --device cpu"),
    _refused("search", "no such family", "search --dims 32x64 --families fast --device cpu"),
    _explain("a model", "versions.models:build_monarch --input 6x32"),
    _explain("training", "versions.models:build_monarch --input 6x32 --train"),
    _explain(
        "any batch, bf16", "versions.models:build_monarch --input 6x32 --dynamic --dtype bfloat16"
    ),
    _explain("played times", "versions.models:build_monarch --input 600x32 --tune measure"),
    _explain("dense layers", f"{_MODEL} --input 4x16x32 --tune off"),
    _refused("explain", "a wrong shape", f"explain {_MODEL} --input 4x16x31"),
    _convert("a plan", f"--model {_MODEL} --plan plan.json"),
    _convert("refined", f"--model {_MODEL} --plan plan.json --refine 20 --include *.down"),
    _convert("a limit", f"--model {_MODEL} --plan plan.json --max-error 0.76 --exclude 1.*"),
    _convert("tied, stacked", "--model versions.models:build_tied --plan tied.json"),
    Case(
        "convert",
        "dry run",
        (f"convert --model {_MODEL} --plan plan.json --dry-run --json",),
        documents.planned,
    ),
    _refused("convert", "no plan", f"convert --model {_MODEL} --plan config.json --out out"),
    _tune("factors, both passes", f"{_PATTERNS} --batch 16 300 --backward"),
    _tune("bf16, batch_last", f"{_PATTERNS} --batch 64 --dtype bfloat16 --layout batch_last"),
    _tune("a layer's families", "--dims 64x96 --budget 25% 50% --batch 32"),
    _tune("recorded", f"{_PATTERNS} --batch 16", f"{_PATTERNS} --batch 16", "--show"),
    _tune("again", f"{_PATTERNS} --batch 16", f"{_PATTERNS} --batch 16 --again"),
    _refused("tune", "nothing", "tune --batch 16"),
    _bench(
        "factors and chains",
        "--patterns (4,8,8,4) (1,16,16,3) (6,5,7,1) --chain (1,16,8,4)*(4,8,8,1) --batch 16,100",
    ),
    _bench("six of the paper's, bf16", "--patterns sample:6 --dtype bfloat16 --batch 32"),
    _bench(
        "batch_last, named ways",
        "--patterns (4,8,8,4) (2,32,8,6) --layout batch_last --against bmm,dense,bsr,sparse",
    ),
    _bench("beside Inductor", "--patterns (4,8,8,4) --against eager,inductor --batch 16"),
    _refused("bench kernels", "no such way", "bench kernels --patterns (4,8,8,4) --against fast"),
    _doctor("this machine"),
    _doctor("nothing is measured", KSOPT_TUNE="off"),
    _doctor("a wrong setting", KSOPT_TUNE="sometimes", KSOPT_SPEED="high"),
    _doctor("no compiler", CXX="no-such-compiler"),
)
