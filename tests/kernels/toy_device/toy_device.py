"""ksopt's part of the device type "toy": a plugin that registers its backend."""

import toy_torch  # noqa: F401  adds the type to torch
from toy_backend import ToyBackend

from ksopt.kernels.backends.base import register_backend


@register_backend
class Toy(ToyBackend):
    """Computes by the reference."""

    device_type = "toy"
