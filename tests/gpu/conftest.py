"""Where there are several devices, processes of pytest-xdist take one each, in turns."""

import os

import torch

_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
if _worker and torch.cuda.device_count() > 1:
    if len(_devices) < torch.cuda.device_count():
        _devices = [str(index) for index in range(torch.cuda.device_count())]
    # Before CUDA is initialised, so that device 0 is this one.
    os.environ["CUDA_VISIBLE_DEVICES"] = _devices[int(_worker.removeprefix("gw")) % len(_devices)]
