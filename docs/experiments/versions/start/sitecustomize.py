"""Installs the times of `versions.played_times` in every Python with this folder in its path."""

import sys

# An installed ksopt would provide modules that a version lacks.
sys.meta_path = [
    finder
    for finder in sys.meta_path
    if not getattr(finder, "__module__", "").startswith("__editable___ksopt")
]

try:
    from versions import played_times

    played_times.install()
except Exception as error:  # Python itself would continue, with the real times
    raise SystemExit(f"no times are played: {type(error).__name__}: {error}") from error
