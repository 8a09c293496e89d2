"""The list of the files with tests that `make test` runs."""

import pytest

FAST: pytest.StashKey[set[str]] = pytest.StashKey()
"""Their names in the checkout, where all tests were collected."""
