"""ksopt's own layer."""

from ksopt.nn import KSLinear

INPUT = (5, 16)
CHAINS = ["(1,12,4,2)*(2,4,8,1)"]


def build():
    return KSLinear(16, 24, "(1,12,4,2)*(2,4,8,1)")
