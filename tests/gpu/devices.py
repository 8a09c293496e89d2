"""The device that tiles are drawn for: what runs elsewhere is chosen from the same ones."""

from ksopt.kernels.problem import DeviceSpec

H200 = DeviceSpec((9, 0), multiprocessors=132, shared_bytes=228 * 1024)
