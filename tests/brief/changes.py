"""What makes measurements short: the same code, which repeats less."""

CHANGES = {
    "ksopt.search.objectives._TRIAL_SECONDS": 0.02,
    "ksopt.search.objectives.FINAL_SECONDS": 0.1,
    # So short measurements are noisy: a slow moment must not get a chain pruned.
    "ksopt.search.pruning.MARGIN": 1e6,
    # Overwriting a large cache between repeats is most of the time of a tiny layer's trial.
    "ksopt.measure.timers.flush_bytes": lambda cache_bytes: 2**16,
    "ksopt.measure.roofline._CPU_SIDES": (256,),
}
