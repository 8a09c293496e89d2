"""The entry point of ``python -m ksopt``, the command ``ksopt``."""

import sys

from ksopt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
