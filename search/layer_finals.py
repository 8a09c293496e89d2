"""Final of a layer's run: its finalists are timed against each other, and measured again.

Where no chain wins, the best are also timed in the surroundings that such layers usually have. What
full rank costs, which is the default, is predicted.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from ksopt.kernels.compile_ahead import Compilers
from ksopt.search import (
    finals,
    lower_rank,
    metrics,
    recommend,
    surrounded_finals,
    trial_records,
)
from ksopt.search.layer_record import LayerRecord
from ksopt.search.progress import Progress
from ksopt.search.worker_pool import Share
from ksopt.search.worker_processes import SpareProcess
from ksopt.system.plurals import counted


def run_final(
    share: Share,
    record: LayerRecord,
    device: torch.device,
    spare: SpareProcess,
    compilers: Compilers,
    stopped: str | None,
    progress: Progress,
    began: float,
) -> LayerRecord:
    """A layer's record with the results of its final, unless it was interrupted."""
    request = share.request
    assert request.batch is not None
    trials = trial_records.records(share.study, record.roofline, request.batch)
    admitted = recommend.admitted(trials, request)
    elected = recommend.elect(admitted, share.space.steps, request.max_error)
    if elected and stopped != "interrupted":
        count = counted(len(elected), "finalist")
        progress.note(f"timing {count} of {request.size} in turns with dense")
        try:
            chains = [trial.facts.chain for trial in elected]
            final_began = time.monotonic()
            dense_us = trial_records.dense_us(trials)
            assert dense_us is not None  # every elected trial has it
            final = finals.trusted(request, device, chains, spare, dense_us, progress.note)
            record = replace(record, final=final, final_seconds=time.monotonic() - final_began)
            for metric in metrics.measured(request):
                if metric.final is not None:
                    # If the next step fails, the final is not lost.
                    until_now = time.monotonic() - began
                    replace(record, stopped=stopped, seconds=until_now).save(share.study)
                    progress.note(f"measuring the {metric.title} of the finalists and of dense")
                    again = metric.final(request, device, chains)
                    record = replace(
                        record, final_values={**record.final_values, metric.name: again}
                    )
            standing = recommend.finalists(elected, final)
            in_order = [one.facts.chain for one in standing]
            record = replace(record, lower_rank=lower_rank.faster(request, device, in_order))
            answers = recommend.recommend(
                share.space, standing, request.max_error, request.min_speedup, dense_us
            )
            few = surrounded_finals.chains_of(
                request, device, share.space.steps, answers, standing, admitted
            )
            if few:
                # If Ctrl-C ends the next step, the final is not lost.
                until_now = time.monotonic() - began
                replace(record, stopped=stopped, seconds=until_now).save(share.study)
                count = counted(len({chain for own in few.values() for chain in own}), "chain")
                progress.note(
                    f"timing {count} of {request.size} as in a model: with a bias and an "
                    "activation or a residual, and three on one input"
                )
                others = surrounded_finals.measure(request, device, few, compilers, progress.note)
                record = replace(record, surrounded=others)
        except KeyboardInterrupt:
            stopped = "interrupted"
    record = replace(record, stopped=stopped, seconds=time.monotonic() - began)
    record.save(share.study)
    return record
