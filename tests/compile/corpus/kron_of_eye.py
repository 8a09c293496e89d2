"""torch.kron with an identity, to the left, to the right, and on both sides."""

import torch
from torch import nn

INPUT = (5, 24)
CHAINS = ["(4,2,6,1)", "(1,5,2,4)", "(2,3,5,2)"]


class Kron(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(2, 6) / 2)
        self.second = nn.Parameter(torch.randn(5, 2) / 2)
        self.third = nn.Parameter(torch.randn(3, 5) / 2)
        self.register_buffer("eye", torch.eye(4))

    def forward(self, x):
        x = torch.relu(x @ torch.kron(torch.eye(4), self.first).T)
        x = torch.relu(x @ torch.kron(self.second, self.eye).T)
        return x @ torch.kron(torch.eye(2), torch.kron(self.third, torch.eye(2))).T


def build():
    return Kron()
