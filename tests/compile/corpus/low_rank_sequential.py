"""SVD-compressed layer: two nn.Linear in a Sequential, the first without a bias."""

from torch import nn

INPUT = (5, 48)
CHAINS = ["(1,64,6,1)*(1,6,48,1)"]


def build():
    return nn.Sequential(nn.Linear(48, 6, bias=False), nn.Linear(6, 64), nn.ReLU())
