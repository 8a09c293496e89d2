"""ShuffleNet unit: grouped 1x1 convolution, channel shuffle, grouped 1x1 convolution."""

import torch
from torch import nn

INPUT = (2, 24, 5, 6)
CHAINS = ["(3,8,8,1)", "(2,8,12,1)"]


def channel_shuffle(x, groups):
    n, c, h, w = x.size()
    x = x.view(n, groups, c // groups, h, w)
    x = torch.transpose(x, 1, 2).contiguous()
    return x.view(n, -1, h, w)


class ShuffleUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.compress = nn.Conv2d(24, 24, 1, groups=3, bias=False)
        self.expand = nn.Conv2d(24, 16, 1, groups=2, bias=False)

    def forward(self, x):
        return self.expand(channel_shuffle(self.compress(x), 3))


build = ShuffleUnit
