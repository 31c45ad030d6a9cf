"""The number of GPUs. Imports torch, slower than all of validation, only if there may be a GPU."""

from __future__ import annotations

import glob
import sys

DEVICES = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd")  # of NVIDIA's driver, the same under WSL, of AMD's driver


def count_gpus(devices: tuple[str, ...] = DEVICES) -> int:
    """The number of GPUs that torch can use."""
    if "torch" not in sys.modules and not any(map(glob.glob, devices)):
        return 0
    import torch

    return torch.cuda.device_count()
