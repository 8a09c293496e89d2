"""The command ``ksopt doctor``: the state of this machine, what will be slow, how to fix it."""

from __future__ import annotations

import argparse
import json

SUMMARY = "Say what ksopt finds on this machine, what will be slow, and how to fix it."
EPILOG = """\
The last line says whether ksopt is ready, or the one thing to do first.

exit codes: 0, or 1 when something keeps ksopt from working at all
"""


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; return the exit code."""
    from ksopt.doctor.advice import diagnose, print_diagnosis

    diagnosis = diagnose()
    if args.json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    else:
        print_diagnosis(diagnosis)
    return 1 if diagnosis.is_broken else 0
