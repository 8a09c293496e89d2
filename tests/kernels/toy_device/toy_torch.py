"""torch's part of the device type "toy" (toy_torch.cpp), as any package of a new device has it."""

import types
from pathlib import Path

import torch

torch.utils.rename_privateuse1_backend("toy")
torch.ops.load_library(Path(__file__).with_name("libtoy_torch.so"))

module = types.ModuleType("torch.toy")
module.is_available = lambda: True
module.device_count = lambda: 1
module.current_device = lambda: 0
module.synchronize = lambda device=None: None
module.get_device_name = lambda device=None: "Toy 1"
module.get_amp_supported_dtype = lambda: [torch.bfloat16]
module._is_in_bad_fork = lambda: False
module.manual_seed_all = lambda seed: None
torch._register_device_module("toy", module)
torch.utils.generate_methods_for_privateuse1_backend()
