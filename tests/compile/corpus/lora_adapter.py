"""A frozen layer with a low-rank adapter beside it: only the adapter is Kronecker-sparse."""

import torch
from torch import nn

INPUT = (4, 3, 32)
CHAINS = ["(1,40,2,1)*(1,2,32,1)"]


class LoRALinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(32, 40).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, 32) / 5)
        self.lora_B = nn.Parameter(torch.randn(40, 2) / 5)
        self.scaling = 0.5

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


build = LoRALinear
