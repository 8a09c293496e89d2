"""Short Inductor compilation for the tests, except for tests of the default settings.

Elsewhere tests would wait for what is not ksopt's: graphs are pickled to be kept on disk, and g++
reads long headers for loops with vectors.
"""

import os

# Variables of torch. Values from torch's configuration or the test runner's environment stay.
_SHORT = {"TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT": "0", "TORCHINDUCTOR_VEC_ISA_OK": "0"}


def begin() -> None:
    """Shorten it, in this process before it imports torch, and in those that it starts."""
    for name, value in _SHORT.items():
        os.environ.setdefault(name, value)


def as_users_have_it() -> dict[str, str]:
    """The environment of a process that compiles as a user's does."""
    return {name: value for name, value in os.environ.items() if name not in _SHORT}
