"""The cost of listing the linear layers of a config.json: by transformers, and by reading it.

    python docs/experiments/auto_config.py config.json

Without a file it uses the config of a Llama of 70 billion weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
MEASURED = """
import resource, sys, time
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.monotonic()
{listing}
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(f"{{count}} layers in {{time.monotonic() - began:.1f}} s, {{used / 1024:.0f}} MB")
"""
BY_TRANSFORMERS = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
count = sum(isinstance(one, torch.nn.Linear) for one in model.modules())
"""
BY_READING = """
from ksopt.search.hf_config import layers_of_config
count = layers_of_config(sys.argv[1] + "/config.json", (), ()).count
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each way, each in a separate process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, help="a config.json")
    config = parser.parse_args(arguments).config
    text = json.dumps(LLAMA_70B) if config is None else config.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(text, encoding="utf-8")
        for name, listing in (("transformers", BY_TRANSFORMERS), ("ksopt", BY_READING)):
            program = MEASURED.format(listing=listing)
            print(f"{name}: ", end="", flush=True)
            subprocess.run([sys.executable, "-c", program, folder], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
