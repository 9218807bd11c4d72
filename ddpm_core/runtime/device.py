"""Which device work is done on, and how many of them there are."""

from __future__ import annotations

import functools
import os
import re

import torch

from ddpm_core.console import warn
from ddpm_core.errors import UserError


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of `device: auto | cpu | mps | cuda[:N]`. Raises UserError if it is not there."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = torch.backends.mps.is_available()
    if name == "auto":
        suits = gpus and not _too_old(local_rank % gpus, warned=True)
        name = "cuda" if suits else "mps" if mps else "cpu"
    if (name.startswith("cuda") and not gpus) or (name == "mps" and not mps):
        raise UserError(f"device: {name} given; this machine has none that PyTorch can use.")
    if name == "cuda":
        name = f"cuda:{local_rank % gpus}"
    device = torch.device(name)
    if device.type == "cuda":
        index = device.index or 0
        if index >= gpus:
            raise UserError(f"device: {name} given; there are {gpus} GPUs.")
        if old := _too_old(index):
            raise UserError(f"device: {name} given. {old}")
        make_repeatable()
    return device


@functools.cache
def _too_old(index: int, warned: bool = False) -> str:
    """What to do about a GPU that PyTorch was not built for; empty where it was."""
    built = [int(re.sub(r"\D", "", name)) for name in torch.cuda.get_arch_list() if "sm_" in name]
    major, minor = torch.cuda.get_device_capability(index)
    if not built or 10 * major + minor >= min(built):
        return ""
    told = (
        f"The GPU {torch.cuda.get_device_name(index)} has compute capability {major}.{minor} and "
        f"is not used: this PyTorch was built for {min(built) / 10:.1f} and later. With a PyTorch "
        "that was built for it, it is."
    )
    if warned:
        warn(told)
    return told


def make_repeatable() -> None:
    """Make CUDA's kernels those that give the same bits each time, and fp32 fp32.

    cuDNN rounds the inputs of convolutions to TF32 unless it is told not to; sums by atomic
    additions, and kernels that are chosen by timing them, differ from run to run.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")


def processes(wanted: str | int, device: str) -> int:
    """How many workers `train.processes` asks for on this machine: auto is one a GPU.

    Raises UserError for more than there are GPUs: two can't talk by NCCL on the same one.
    """
    kind = choose_device(device).type
    gpus = torch.cuda.device_count() if kind == "cuda" and not is_one(kind, device) else 0
    if wanted == "auto":
        return gpus or 1
    if gpus and int(wanted) > gpus:
        raise UserError(
            f"{wanted} workers given; there are {gpus} GPUs, and each takes one: give at most as "
            "many, or device: cpu."
        )
    return int(wanted)


def is_one(kind: str, setting: str) -> bool:
    """Whether a setting of `device` means the same one for every worker."""
    return kind == "mps" or setting.startswith("cuda:")
