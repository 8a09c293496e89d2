"""Every Python with this folder in PYTHONPATH is played the times of `versions.played_times`."""

import sys

# An installed ksopt would lend its modules to a version that has none of their names.
sys.meta_path = [
    finder
    for finder in sys.meta_path
    if not getattr(finder, "__module__", "").startswith("__editable___ksopt")
]

try:
    from versions import played_times

    played_times.install()
except Exception as error:  # Python itself would go on, with the true times
    raise SystemExit(f"no times are played: {type(error).__name__}: {error}") from error
