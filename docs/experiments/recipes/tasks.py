"""The tasks: scikit-learn's handwritten digits, and the text of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.models import GPT, Linear, Mixer, Size, chain_linear, dense_size

_NO_TEXT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Task:
    """Data, and the networks that learn it.

    Args:
        name: For files and tables.
        data: A description of the data.
        draw: (generator on the CPU) -> a batch of inputs and labels.
        held_out: Batches that are not trained on.
        build: (size, factory of layers) -> a network.
        sizes: Of the network of chains and of the dense one, which has as many parameters.
        steps: Of a training.
        points: Number of evaluations.
        settings: Further settings of the run.
    """

    name: str
    data: str
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    held_out: list[tuple[Tensor, Tensor]]
    build: Callable[[Size, Linear], nn.Module]
    sizes: Mapping[str, Size]
    steps: int
    points: int
    settings: Mapping[str, Any]

    def network(self, is_dense: bool) -> nn.Module:
        """A new network with random parameters."""
        if is_dense:
            return self.build(self.sizes["dense"], nn.Linear)
        return self.build(self.sizes["chains"], chain_linear)


def digits(device: torch.device, small: bool) -> Task:
    """The Mixer on scikit-learn's 1797 images of digits, a quarter of which is held out."""
    from sklearn.datasets import load_digits  # no other task needs it
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.25, random_state=0)
    x, held_x, y, held_y = (torch.tensor(part, device=device) for part in parts)
    x, held_x = (part.float().view(-1, 1, 8, 8) for part in (x, held_x))
    batch = 128

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(y), (batch,), generator=generator).to(device)
        return x[rows], y[rows]

    chains, width = (Size(64, 128, 2), 48) if small else (Size(128, 512, 4), 80)
    return Task(
        "digits",
        f"scikit-learn's digits: {len(y)} images to learn, {len(held_y)} held out",
        draw,
        [(held_x, held_y)],
        Mixer,
        {"chains": chains, "dense": dense_size(Mixer, chains, width)},
        60 if small else 200,
        5 if small else 20,
        {"batch": batch},
    )


def text(device: torch.device, small: bool) -> Task:
    """The GPT on the sources of Python's standard library; every twentieth file is held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        file
        for file in folder.rglob("*.py")
        if not _NO_TEXT & set(file.relative_to(folder).parts[:-1])
    )[:: 8 if small else 1]
    sources = [file.read_bytes() for file in files]
    held = b"".join(sources[::20])
    learned = b"".join(one for at, one in enumerate(sources) if at % 20)
    batch, context = (16, 64) if small else (64, 256)
    stream = torch.frombuffer(bytearray(learned), dtype=torch.uint8).to(device)
    span = torch.arange(context + 1, device=device)

    def windows(stream: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        taken = stream[starts.to(device).unsqueeze(1) + span].long()
        return taken[:, :-1], taken[:, 1:]

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        last = len(stream) - context
        return windows(stream, torch.randint(last, (batch,), generator=generator))

    held_stream = torch.frombuffer(bytearray(held), dtype=torch.uint8).to(device)
    last = len(held_stream) - context - 1
    starts = torch.linspace(0, last, 2 * batch, dtype=torch.float64).long()
    chains, width = (Size(64, 256, 2), 40) if small else (Size(512, 2048, 4), 288)

    def build(size: Size, linear: Linear) -> nn.Module:
        return GPT(size, context, linear)

    return Task(
        "text",
        f"{len(files)} files of Python's standard library: {len(learned):,} bytes to learn, "
        f"{len(starts) * context:,} of {len(held):,} held out",
        draw,
        [windows(held_stream, some) for some in starts.split(batch)],
        build,
        {"chains": chains, "dense": dense_size(build, chains, width)},
        60 if small else 300,
        5 if small else 20,
        {"batch": batch, "context": context},
    )
