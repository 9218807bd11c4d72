"""How a network is laid out in memory for a device, decided by measurement."""

from __future__ import annotations

import torch


def layout(device: torch.device) -> torch.memory_format:
    """Channels last on CPUs and CUDA GPUs, where convolutions are fastest with it."""
    return torch.contiguous_format if device.type == "mps" else torch.channels_last
