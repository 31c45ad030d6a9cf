"""How many GPUs there are. Imports torch only where there may be one: that takes longer than all of validation."""

from __future__ import annotations

import glob
import sys

DEVICES = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd")  # of NVIDIA's driver, the same under WSL, AMD's


def count_gpus(devices: tuple[str, ...] = DEVICES) -> int:
    """GPUs that torch can use."""
    if "torch" not in sys.modules and not any(map(glob.glob, devices)):
        return 0
    import torch

    return torch.cuda.device_count()
