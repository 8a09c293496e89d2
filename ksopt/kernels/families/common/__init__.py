"""Code that kernel families share: layouts, tiles, launches, packing, and cost models.

Nothing here is a family. The templates' shared headers are in csrc/cuda/common.
"""
