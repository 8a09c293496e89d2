"""Glossary of a report."""

from __future__ import annotations

from ksopt.report import tables
from ksopt.report.document import Section
from ksopt.search.report.sections import section
from ksopt.search.results import SearchResult

TERMS = {
    "pattern (a,b,c,d)": "A sparse matrix. Its diagonal has blocks, a of them. Each holds b x c "
    "diagonals of length d. `ksopt show` draws it.",
    "factor": "A matrix of such a pattern, whose nonzero entries are trained.",
    "chain": "A product of factors that takes the place of a layer's matrix. The last factor "
    "meets the input first.",
    "Monarch": "A chain (1,b,c,p)*(p,e,f,1): its p blocks meet the input first. Mirrored, "
    "(p,b,c,1)*(1,e,f,p), they give the output.",
    "dense": "The layer as it is, torch.nn.Linear, timed in turns with the chains.",
    "weights": "Numbers that are trained. The bias is not counted.",
    "budget": "The most weights that a chain may have, as a share of the dense layer's or a count.",
    "latency": "The median time of a call, in microseconds (us). Caches are overwritten before "
    "each one.",
    "p20 to p80": "The middle 60% of the times. Two latencies differ only if both medians "
    "lie outside the other's band.",
    "within noise": "Neither of two latencies is clearly the lower one: see p20 to p80.",
    "speedup": "The dense layer's latency over the chain's. At 2 the chain is twice as fast, below "
    "1 it is slower.",
    "floor": "The least time by the roofline: moving the data once, or computing, whichever takes "
    "longer.",
    "efficiency": "The floor over the latency. At 1 a call takes what the roofline predicts. The "
    "roofline is measured too: a little more than 1 is possible.",
    "rho": "(b + c)/(b c), averaged over the factors by their weights. Where it is large, moving "
    "data costs more than computing.",
    "d rho": "d times rho, by which the paper ranks the energy that a fused kernel saves.",
    "weight error": "||W - W'|| / ||W||: how far the nearest chain is from trained weights. 0 is "
    "the same matrix.",
    "energy": "What the whole board uses in a call, by its own counter, idle draw included.",
    "Pareto front": "The chains that no other chain equals or beats in everything asked for.",
    "trial": "One measured chain of the search. The final times the best ones again.",
    "chosen by": "What proposed a chain: a sampler (such as Optuna's TPE), a family of the "
    "literature, or a rule.",
    "given up": "A chain that after some repeats could no longer become one of the fastest.",
    "sampler": "What draws the next chain to measure.",
    "Spearman": "A rank correlation. 1: a prediction ranks all chains rightly. 0: it says nothing. "
    "-1: it ranks them the wrong way round.",
}


@section(order=130, of="search")
def glossary(result: SearchResult) -> Section:
    """Definitions of the report's terms."""
    return Section("Glossary", (), (), tables.of(("word", "meaning"), list(TERMS.items())))
