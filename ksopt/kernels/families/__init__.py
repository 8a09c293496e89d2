"""Kernel families: one file each, beside its template in csrc/cuda."""
