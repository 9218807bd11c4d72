"""The device of a process: which one, in which number format, and whether to compile for it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from ddpm_core.console import warn
from ddpm_core.errors import UserError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# With this many network evaluations (images times steps) or more, sampling with `compile: auto` is
# compiled. On an H200, compiling Ho's network takes up to 130 s the first time and then saves
# 69 microseconds per evaluation.
MIN_EVALUATIONS = 2_000_000


def device_name(device: torch.device) -> str:
    """Return the name of a device, for reports and benchmarks."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device for the setting `device: auto | cpu | mps | cuda[:N]`.

    `local_rank` is the number of this worker on its machine; it selects the GPU. On CUDA, also
    makes kernels deterministic. Raises UserError if the device does not exist or is too old.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = torch.backends.mps.is_available()
    if name == "auto":
        usable = gpus and not _too_old(local_rank % gpus, warned=True)
        name = "cuda" if usable else "mps" if mps else "cpu"
    if (name.startswith("cuda") and not gpus) or (name == "mps" and not mps):
        raise UserError(
            f"device: got {name}, but PyTorch finds no such device on this machine. Set device: "
            "cpu or auto."
        )
    if name == "cuda":
        name = f"cuda:{local_rank % gpus}"
    device = torch.device(name)
    if device.type == "cuda":
        index = device.index or 0
        if index >= gpus:
            raise UserError(
                f"device: got {name}, but this machine has {gpus} GPUs, numbered from 0."
            )
        if reason := _too_old(index):
            raise UserError(f"device: got {name}. {reason}")
        make_deterministic()
    return device


@functools.cache
def _too_old(index: int, warned: bool = False) -> str:
    """Return why this PyTorch build does not support a GPU, and what to do; "" if it does."""
    built = [int(re.sub(r"\D", "", name)) for name in torch.cuda.get_arch_list() if "sm_" in name]
    major, minor = torch.cuda.get_device_capability(index)
    if not built or 10 * major + minor >= min(built):
        return ""
    message = (
        f"The GPU {torch.cuda.get_device_name(index)} has compute capability {major}.{minor}, but "
        f"this PyTorch build supports {min(built) / 10:.1f} and later, so the GPU is not used. "
        "Install a PyTorch build that supports it."
    )
    if warned:
        warn(message)
    return message


def make_deterministic() -> None:
    """Make CUDA return the same bits on each run, and compute fp32 in full precision.

    By default cuDNN rounds the inputs of convolutions to TF32. Sums with atomic additions, and
    kernels chosen by timing them, differ between runs.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")


def worker_count(setting: str | int, device: str) -> int:
    """Return how many workers `train.processes` starts on this machine; auto is one per GPU.

    Raises UserError for more workers than GPUs: NCCL does not let two processes share one.
    """
    kind = choose_device(device).type
    gpus = torch.cuda.device_count() if kind == "cuda" and not is_shared(kind, device) else 0
    if setting == "auto":
        return gpus or 1
    if gpus and int(setting) > gpus:
        raise UserError(
            f"Got {setting} workers for {gpus} GPUs; each worker needs its own GPU. Start at most "
            f"{gpus} workers, or set device: cpu."
        )
    return int(setting)


def is_shared(kind: str, setting: str) -> bool:
    """Return whether a `device` setting gives every worker the same single device."""
    return kind == "mps" or setting.startswith("cuda:")


def choose_precision(setting: str, device: torch.device) -> str:
    """Return fp32, bf16 or fp16; auto is bf16 on devices where it is faster, else fp32."""
    if setting != "auto":
        return setting
    return "bf16" if _fast_bf16(device) else "fp32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which the network computes in bf16 or fp16; fp32 changes nothing."""
    dtype = _DTYPES.get(precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _fast_bf16(device: torch.device) -> bool:
    """Return whether bf16 is fast: GPUs since Ampere, CPUs with AMX tiles, AMD's with AVX512-BF16.

    Measured on two cores of an EPYC: a training step is 1.3 to 1.7 times as fast as in fp32, a
    denoising step 1.4 to 1.7 times. On a Xeon whose AMX is hidden from the machine, a training step
    took 1.26 times as long as in fp32: with AVX512-BF16 it multiplies no more numbers per cycle.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    if torch.cpu._is_amx_tile_supported():
        return True
    return torch.cpu._is_avx512_bf16_supported() and "GenuineIntel" not in _processor()


@functools.cache
def _processor() -> str:
    """Return the description of the first processor on Linux, "" elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return ""


def compiles_training(device: torch.device) -> bool:
    """Return whether training with `compile: auto` is compiled: on GPUs, if a compiler exists.

    On two CPU cores compiling took minutes and made steps 6 % faster.
    """
    return device.type == "cuda" and has_compiler()


def compiles_sampling(setting: bool | str, device: torch.device, evaluations: int) -> bool:
    """Return whether sampling is compiled, for `sample.compile` and a number of evaluations."""
    if setting == "auto":
        return compiles_training(device) and evaluations >= MIN_EVALUATIONS
    return bool(setting)


def has_compiler() -> bool:
    """Return whether Triton, PyTorch's compiler for GPUs, can build its driver.

    It needs a C compiler and Python's headers.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return (
        bool(compiler) and Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists()
    )


def compiler_hint(device: torch.device, setting: bool | str) -> str | None:
    """Return what to install so that `compile: auto` compiles on this GPU; None if nothing."""
    if setting != "auto" or device.type != "cuda" or has_compiler():
        return None
    return (
        "The network is not compiled; compiling makes training up to 1.5 times as fast. It "
        "requires a C compiler (gcc, clang, or the one in CC) and Python's headers (on Debian and "
        "Ubuntu: apt install gcc python3-dev)."
    )


@contextmanager
def translate_compile_errors(setting: str) -> Iterator[None]:
    """Raise UserError in place of torch.compile's errors; `setting` is the one that enabled it."""
    try:
        yield
    except RuntimeError as error:
        if not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            raise
        raise UserError(
            f"Cannot compile the network: {' '.join(str(error).split())[:300]} If an earlier "
            "compilation was killed, remove its cache (TORCHINDUCTOR_CACHE_DIR, or "
            f"torchinductor_* in the temporary folder). {setting}: false trains and samples "
            "without compiling."
        ) from error
