"""Compile a Kronecker-sparse feed-forward block with ``backend="ksopt"``, check it, time it.

The block is a transformer's: 768 -> 3072 -> 768 with a GELU between. Three versions are timed:
dense through Inductor, and the KS block before and after compilation. Which one is fastest depends
on the device and the batch; the example prints the times of this machine.

Run it with ``python examples/compile_model.py [--device cuda] [--dtype bfloat16]``.
"""

import argparse

import torch
from torch import nn

from ksopt.measure.timing import measure
from ksopt.nn import KSLinear
from ksopt.patterns.chain import Chain

WIDTH, HIDDEN = 768, 3072


def dense_block() -> nn.Sequential:
    """The block with full matrices."""
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def ks_block() -> nn.Sequential:
    """The block with Monarch chains, which have about a tenth of the weights."""
    return nn.Sequential(
        KSLinear(WIDTH, HIDDEN, Chain.monarch(WIDTH, HIDDEN, p=12)),
        nn.GELU(),
        KSLinear(HIDDEN, WIDTH, Chain.monarch(HIDDEN, WIDTH, p=12)),
    )


def main() -> None:
    """Compile, compare with eager, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--batch", type=int, default=256, help="rows of the input (256)")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)

    torch.manual_seed(0)
    x = torch.randn(args.batch, WIDTH, device=device, dtype=dtype)
    dense, ks = dense_block().to(device, dtype).eval(), ks_block().to(device, dtype).eval()
    dense_compiled = torch.compile(dense)
    ks_compiled = torch.compile(ks, backend="ksopt")

    with torch.inference_mode():
        expected, got = ks(x), ks_compiled(x)
        torch.testing.assert_close(got, expected)
        print(f"compiled and eager agree: largest difference {(got - expected).abs().max():.1e}")

        times = measure(
            {
                "dense, Inductor": lambda: dense_compiled(x),
                "KS, eager": lambda: ks(x),
                "KS, backend ksopt": lambda: ks_compiled(x),
            },
            device=device,
        )
    for name, took in times.items():
        print(f"{name:18} {took.median_us:9.1f} us  (p20 {took.p20_us:.1f}, p80 {took.p80_us:.1f})")
    count = {n: sum(p.numel() for p in m.parameters()) for n, m in (("KS", ks), ("dense", dense))}
    print(f"parameters: KS {count['KS']:,}, dense {count['dense']:,}")


if __name__ == "__main__":
    main()
