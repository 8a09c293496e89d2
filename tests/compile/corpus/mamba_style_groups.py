"""State-space block: grouped input projection by conv1d on transposed tokens, gate by SiLU."""

import torch.nn.functional as F
from torch import nn

INPUT = (2, 7, 24)
CHAINS = ["(3,16,8,1)"]


class GroupedMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Conv1d(24, 48, 1, groups=3)
        self.norm = nn.LayerNorm(24)

    def forward(self, hidden):
        projected = self.in_proj(self.norm(hidden).transpose(1, 2)).transpose(1, 2)
        x, gate = projected.chunk(2, dim=-1)
        return x * F.silu(gate)


build = GroupedMixer
