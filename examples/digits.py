"""Train a Kronecker-sparse network on handwritten digits, beside two dense ones.

The data set is scikit-learn's digits: 1797 images of 8 x 8 pixels, a quarter of which is held out.
All networks have two hidden layers, the same epochs, optimiser and seeds:

- dense: 512 hidden features, full matrices;
- KS: 512 hidden features, each hidden matrix a Monarch chain of two sparse factors;
- narrow dense: full matrices, as wide as the KS network's number of parameters allows: the simplest
  way to fewer parameters.

This data set is small and easy: differences smaller than the range over the seeds mean nothing.

Run it with ``python examples/digits.py``; it takes less than a minute on two CPU cores.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import pandas
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from ksopt.nn import KSLinear
from ksopt.patterns.chain import Chain

PIXELS, HIDDEN, CLASSES = 64, 512, 10


def dense(hidden: int = HIDDEN) -> nn.Sequential:
    """PIXELS -> hidden -> hidden -> CLASSES, with full matrices."""
    return nn.Sequential(
        nn.Linear(PIXELS, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )


def kronecker_sparse() -> nn.Sequential:
    """The same network with Monarch chains in place of the two hidden matrices."""
    return nn.Sequential(
        KSLinear(PIXELS, HIDDEN, Chain.monarch(PIXELS, HIDDEN, p=4)),
        nn.ReLU(),
        KSLinear(HIDDEN, HIDDEN, Chain.monarch(HIDDEN, HIDDEN, p=8)),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )


def parameters(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in model.parameters())


def narrow_dense() -> nn.Sequential:
    """The widest dense network that has no more parameters than the KS one."""
    budget = parameters(kronecker_sparse())
    hidden = next(h for h in range(HIDDEN, 0, -1) if parameters(dense(h)) <= budget)
    return dense(hidden)


@dataclass(frozen=True)
class Digits:
    """The data, pixels scaled to [0, 1]: images [samples, 64], labels [samples]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls) -> "Digits":
        """Load and split the data deterministically."""
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(
            torch.tensor(images, dtype=torch.float32) / 16,
            torch.tensor(labels),
            test_size=0.25,
            random_state=0,
        )
        return cls(parts[0], parts[2], parts[1], parts[3])


def train(model: nn.Module, data: Digits, epochs: int, batch: int = 64) -> None:
    """Plain supervised training with AdamW and a cosine schedule."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(data.train_labels)).split(batch):
            loss = nn.functional.cross_entropy(
                model(data.train_images[rows]), data.train_labels[rows]
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """Share of the test images that are classified correctly."""
    return (model(data.test_images).argmax(1) == data.test_labels).float().mean().item()


def main() -> None:
    """Train every network with every seed, and print one row for each network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=25, help="passes over the data (25)")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each network (5)")
    args = parser.parse_args()

    data = Digits.load()
    networks: dict[str, Callable[[], nn.Module]] = {
        "dense": dense,
        "KS": kronecker_sparse,
        "narrow dense": narrow_dense,
    }
    scores: dict[str, list[float]] = {name: [] for name in networks}
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    for seed in range(args.seeds):  # in turns, so that a busy machine slows all of them
        for name, build in networks.items():
            torch.manual_seed(seed)
            model = build()
            started = time.perf_counter()
            train(model, data, args.epochs)
            seconds[name].append(time.perf_counter() - started)
            scores[name].append(100 * accuracy(model, data))
    rows = [
        {
            "network": name,
            "parameters": f"{parameters(build()):,}",
            "accuracy": f"{statistics.mean(scores[name]):.2f} %",
            "over the seeds": f"{min(scores[name]):.2f} to {max(scores[name]):.2f} %",
            "training time": f"{statistics.median(seconds[name]):.2f} s",
        }
        for name, build in networks.items()
    ]
    print(pandas.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
