"""QLoRA's base (arXiv 2305.14314): linear layers in 4-bit NormalFloat with double quantization, by bitsandbytes.

Weights are buffers, which FSDP and optimizers do not see. bitsandbytes' own layer loses precision in its first
evaluation on some CPUs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dpo.errors import InputError, explaining_library, one_sentence
from dpo.parallel.sharding import read_weight
from dpo.system.arithmetic import find_compute_dtype
from dpo.system.host import choose_device, release_freed_memory, silence_bitsandbytes

BLOCK = 64  # weights that share a scale
SCALES = 256  # scales that share a scale of scales


class Linear4bit(nn.Linear):
    """A linear layer whose weight is frozen, and whose bias stays a parameter."""

    weight: Tensor  # two weights per byte, (number of weights / 2, 1)
    scales: Tensor  # one byte per block
    scales_of_scales: Tensor  # one float32 per SCALES blocks
    offset: Tensor  # the mean of the scales, subtracted before they are quantized
    code: Tensor  # the values that the bytes of `scales` stand for

    def __init__(self, weight: Tensor, bias: nn.Parameter | None = None):
        super(nn.Linear, self).__init__()  # not nn.Linear's own, which would make a weight
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        for name, tensor in _quantize(weight).items():
            self.register_buffer(name, tensor)

    def forward(self, input: Tensor) -> Tensor:
        dtype = find_compute_dtype(input.device.type, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return _Multiply.apply(input.to(dtype), bias, self)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight by which inputs are multiplied, (out_features, in_features)."""
        kernels = torch.ops.bitsandbytes
        scales = kernels.dequantize_blockwise(self.scales, self.scales_of_scales, self.code, SCALES, torch.float32)
        # Dequantize with one block per row, as the CPU kernel is wrong where a row ends inside a block.
        one_block_per_row = (scales.numel(), BLOCK)
        weight = kernels.dequantize_4bit(self.weight, scales + self.offset, BLOCK, "nf4", one_block_per_row, dtype)
        return weight.view(self.out_features, self.in_features)


class _Multiply(torch.autograd.Function):
    """The product with a dequantized weight; only the input gets a gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, layer: Linear4bit) -> Tensor:
        ctx.layer = layer  # not the dequantized weight, which would take its full size until the backward pass
        return nn.functional.linear(input, layer.dequantized(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.layer.dequantized(gradient.dtype), None, None


def _quantize(weight: Tensor) -> dict[str, Tensor]:
    """Make a `Linear4bit`'s buffers, also on the meta device."""
    from bitsandbytes.functional import create_dynamic_map  # not at the top, as only QLoRA needs the package

    kernels = torch.ops.bitsandbytes
    code = create_dynamic_map().to(weight.device)
    packed, scales = kernels.quantize_4bit(weight.contiguous(), BLOCK, "nf4", torch.uint8)
    # The mean is taken in float64. In float32, as in bitsandbytes' own function, it depends on the number of threads,
    # so a run that is resumed with more processes would get another base.
    offset = scales.double().mean().float()
    quantized_scales, scales_of_scales = kernels.quantize_blockwise(scales - offset, code, SCALES)
    return {
        "weight": packed,
        "scales": quantized_scales,
        "scales_of_scales": scales_of_scales,
        "offset": offset,
        "code": code,
    }


def quantize(model: Any) -> Any:
    """Replace linear layers, except the head, by 4-bit ones, and move the model to a GPU if there is one.

    The GPU never holds the whole model unquantized. A model on the meta device stays there. Raises InputError if
    bitsandbytes does not work here.
    """
    device = model.device.type if model.device.type == "meta" else choose_device()
    for name in layers_to_quantize(model):
        layer = model.get_submodule(name)
        model.set_submodule(name, Linear4bit(_oriented_weight(layer).to(device), layer.bias))
    release_freed_memory()  # the memory of the weights that were quantized
    return model.to(device)


def _oriented_weight(layer: Any) -> Tensor:
    """Return a layer's weight as (out_features, in_features); GPT-2's `Conv1D` has the transposed one."""
    weight = read_weight(layer.weight)
    return weight.T if isinstance(layer, Conv1D) else weight


def round_weight(layer: Any) -> None:
    """Round a layer's weight as 4-bit quantization does, by quantizing and dequantizing it; its dtype stays."""
    rounded = Linear4bit(_oriented_weight(layer)).dequantized(layer.weight.dtype)
    layer.weight.data = rounded.T if isinstance(layer, Conv1D) else rounded


def layers_to_quantize(model: Any) -> list[str]:
    """List the names of linear layers, without the head and layers whose weights do not fill whole blocks.

    Raises InputError if bitsandbytes does not work here, which is tried out with one block.
    """
    silence_bitsandbytes()
    needed = "lora=qlora needs bitsandbytes with kernels for this machine (python -m bitsandbytes says what is wrong)"
    with explaining_library(lambda error: InputError(f"{needed}, or use lora=lora: {one_sentence(error)}")):
        _quantize(torch.zeros(BLOCK, device=choose_device()))
    return [name for name in list_linear(model) if model.get_submodule(name).weight.numel() % BLOCK == 0]


def list_linear(model: Any) -> list[str]:
    """List the names of linear layers, without the head."""
    head = model.get_output_embeddings()
    return [name for name, layer in model.named_modules() if is_linear(layer) and layer is not head]


def is_linear(layer: Any) -> bool:
    """Return whether a layer is linear; subclasses that override `forward`, such as Llama 4's routers, may not be."""
    is_falcons = type(layer).__name__ == "FalconLinear"  # a subclass that computes the same
    return is_falcons or isinstance(layer, (Conv1D, Linear4bit)) or type(layer).forward is nn.Linear.forward
