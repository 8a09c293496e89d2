"""torch.nn.utils.prune with a mask of blocks: weight_orig * weight_mask before each forward."""

import torch
from torch import nn
from torch.nn.utils import prune

INPUT = (6, 32)
CHAINS = ["(4,6,8,1)"]


def build():
    layer = nn.Linear(32, 24)
    prune.custom_from_mask(layer, "weight", torch.block_diag(*torch.ones(4, 6, 8)))
    return nn.Sequential(layer)
