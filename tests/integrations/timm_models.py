"""Models of timm, converted and optimized in a separate process, which prints the results.

Beside a torch for CPUs, torchvision misses the operators of its own binary, and neither timm nor
transformers can be imported. So timm and torchvision lie in a folder that only this process sees,
and the names of two operators, which no model here calls, are declared.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(sys.prefix) / "timm"))

import torch

if torch.version.cuda is None:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm

import ksopt
from ksopt.conversion.model_call import ModelCall, evaluating

MODELS = {
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 1},
    "swin_tiny_patch4_window7_224": {
        "img_size": 56, "embed_dim": 32, "depths": (1, 1), "num_heads": (1, 2),
    },
    # Its attention reads the weight of qkv and does not call the layer.
    "beit_base_patch16_224": {"img_size": 32, "embed_dim": 64, "num_heads": 2, "depth": 1},
}  # fmt: skip


def converted(name: str) -> dict[str, object]:
    """What one line makes of a model, and whether that still runs."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **MODELS[name]).eval()
    size = MODELS[name]["img_size"]
    x = torch.randn(2, 3, size, size)
    with evaluating(model):
        rows = ModelCall.of(x, torch.device("cpu"), None, "timm").rows(model)
    plan = {
        f"{dims}": ksopt.Chain.monarch(dims.in_features, dims.out_features, p=4)
        for dims in ksopt.search.layers_of_model(model).sizes
        if dims.out_features % 4 == 0 and dims.in_features % 4 == 0
    }
    done = ksopt.convert(model, plan, exclude=[n for n in ["*.attn.qkv"] if "beit" in name])
    return {
        "called": sorted(rows),
        "converted": [layer.name for layer in done.layers],
        "shape": list(model(x).shape),
    }


print(json.dumps({name: converted(name) for name in MODELS}))
