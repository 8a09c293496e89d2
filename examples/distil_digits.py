"""Train a dense network, convert it to chains, distil it: the accuracy after each step.

The data set is scikit-learn's digits, of which a quarter is held out. The dense network has two
hidden layers of 512 features; a conversion replaces both matrices by Monarch chains, which have
a quarter of the weights. `ksopt.distil` then trains the chains to reproduce the dense network, on
the training images without their labels.

Run it with ``python examples/distil_digits.py``; it takes less than a minute on two CPU cores.
"""

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import ksopt


def network() -> nn.Sequential:
    """64 pixels -> 512 -> 512 -> 10 classes."""
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    """Train with labels."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of correctly classified images, percent."""
    with torch.no_grad():
        return 100 * (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    """Train, convert, distil, and print the accuracy after each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=12, help="of training (12)")
    parser.add_argument("--steps", type=int, default=300, help="of distillation (300)")
    args = parser.parse_args()
    torch.manual_seed(0)
    pixels, targets = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(targets)
    order = train_test_split(range(len(images)), test_size=0.25, random_state=0, stratify=targets)
    learn, test = (torch.tensor(part) for part in order)

    dense = network()
    train(dense, images[learn], labels[learn], args.epochs)
    print(f"dense      {accuracy(dense, images[test], labels[test]):.1f} %")

    model = copy.deepcopy(dense)
    done = ksopt.convert(model, {"64x512": "monarch", "512x512": "monarch:8"})
    print(f"converted  {accuracy(model, images[test], labels[test]):.1f} %   {done.sentence}")

    ksopt.distil(model, dense, images[learn].split(64), steps=args.steps, lr=3e-3)
    print(f"distilled  {accuracy(model, images[test], labels[test]):.1f} %")


if __name__ == "__main__":
    main()
