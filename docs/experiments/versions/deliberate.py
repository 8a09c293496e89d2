"""Deliberate differences from 792ddf8, the version before the rebuild, with their reasons."""

from __future__ import annotations

from versions.comparing import Deliberate

_SMALL = r"(0\.00\d+|[\d.]+e-\d+)"
_SITES = "sites/module_.*"
"""Of a random module: no site of the corpus or of a model differs."""

DELIBERATE = (
    Deliberate(
        "search",
        r"trials.*/error",
        f"^{_SMALL} -> {_SMALL}$",
        "A trial's product is compared with float64 on the rows that kernels and benchmarks are "
        "compared on, both ends of the batch and some between (e180258); before, on 64 others.",
    ),
    Deliberate(
        "search",
        r"trials.*/reason",
        r"^\"hopeless after (\d+ repeats): more than ([\d.]+) times the dense layer's latency\" -> "
        r"\"given up after \1: above \2 of the dense layer's latency it is none of the fastest\"$",
        "The reason why a trial was pruned is worded anew (322213b).",
    ),
    Deliberate(
        "search",
        r"(trials, in order|finalists|answers)/32x32/.*(_us|/noise|/efficiency|_over_dense)"
        r"|trials\.csv/\d+/.*(_us|_over_dense)"
        r"|settings and diagnoses/32x32/(drift/.*_us|dense_layer/(over_floor|.*_us))"
        r"|the model/.*(_us|_over_dense)",
        r"^\d.* -> \d",
        "A layer of a model is timed with what surrounds it in the model's graph (06a7d70): the "
        "layers q and v of a block, which read one input, are timed at once.",
        title="a model, timed whole",
    ),
    Deliberate(
        "bench kernels",
        r".*/latency/(repeats|noise)",
        r"^\d",
        "Ways that are near each other are timed in more rounds (032243c, 5ceb7d5).",
    ),
    Deliberate(
        "bench kernels",
        r".*(/latency/(median|p\d0)_us|/efficiency|/ratio|/ratio_paper)",
        r"^\d",
        "In more rounds (032243c, 5ceb7d5) more of the played samples are seen, which are 1 % "
        "apart: a median or a quantile moves by one of them at most, and so do their quotients.",
        at_most=0.0101,
    ),
    Deliberate(
        "bench kernels",
        r"settings/identity/against/\d+",
        "",
        "PyTorch's einsum with the weight first and its convolution are among the ways (3b37bc0).",
    ),
    Deliberate(
        "explain",
        "what the pass counts/.*/nodes_(followed|emitted|removed)",
        "",
        "A layer of ksopt's is one node, ks_chain (9a2a8ee); what the author's product saves for "
        "the backward pass is saved as the author saves it (82dfd03).",
    ),
    Deliberate(
        "explain",
        _SITES,
        "-> .*not recognised.*an operand is written in place behind it, and gradients are on",
        "PyTorch computes what reads a tensor that is written later where gradients are on: the "
        "backward pass read what was written (ec567bd, 22f339e).",
    ),
    Deliberate(
        "explain",
        _SITES,
        "-> .*not recognised.*written in place, returned under two names, or copied where grad",
        "PyTorch computes what is returned beside its own copy, or copied where gradients are off: "
        "views were returned for copies (091b616, 12dac4f, b5ed21b).",
    ),
    Deliberate(
        "explain",
        _SITES,
        "-> .*not recognised.*an operand is made in a torch.inference_mode",
        "PyTorch computes what reads a tensor of a torch.inference_mode where gradients are on: "
        "autograd refuses to save it (e8583b8).",
    ),
    Deliberate(
        "explain",
        r"sites/module_0056, as written/2",
        r"lowered: \(1,40,24,1\)\*\(1,24,80,1\) as linear, .* -> nothing$",
        "The inner weight is an elementwise product of a parameter that is written behind the "
        "layer: AOTAutograd may compute that product again in the backward pass, from what was "
        "written (22f339e). PyTorch computes the pair of dense layers, and neither is a site "
        "alone. Without the write the pair is lowered as before.",
    ),
    Deliberate(
        "explain",
        "sites/.*",
        "epilogue",
        "The report names what a launch could compute behind the product in the rewritten graph; "
        "before, also what is behind a copy or a permutation, and where the graph writes in "
        "place (e1f08d17).",
        but_for=r", epilogue \[[^]]*\]",
    ),
    Deliberate(
        "doctor",
        r"rows that are printed/\d+",
        "^nothing -> '(not )?ready",
        "The last line says whether all is ready, or the one thing to do (6473ce3).",
    ),
)
