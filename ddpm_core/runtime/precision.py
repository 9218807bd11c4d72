"""The number format of the network's arithmetic: fp32, or bf16 and fp16 by autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose(setting: str, device: torch.device) -> str:
    """What `precision: auto` means on a device: bf16 where it is the faster one, else fp32."""
    if setting != "auto":
        return setting
    return "bf16" if _fast_bf16(device) else "fp32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    dtype = _DTYPES.get(precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _fast_bf16(device: torch.device) -> bool:
    """On GPUs since Ampere, and on CPUs with instructions for it (AMX tiles, AVX512-BF16).

    Measured with AVX512-BF16 on two cores: a training step is 1.3 to 1.7 times as fast as in fp32,
    a denoising step 1.4 to 1.7 times.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and (
        torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )
