"""torch.compile: where it pays, what it needs, and what its errors mean."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ddpm_core.errors import UserError

# Evaluations of a network, one for each image and step, from which on sampling is compiled. On an
# H200 each of Ho's network then took 69 microseconds less, a first compilation up to 130 s.
MANY = 2_000_000


def pays(device: torch.device) -> bool:
    """Whether training with `compile: auto` is compiled: on GPUs, where PyTorch can.

    On two CPU cores it gained 6 % and took minutes.
    """
    return device.type == "cuda" and can_build()


def wanted(setting: bool | str, device: torch.device, evaluations: int) -> bool:
    """Whether sampling is compiled: by `sample.compile`, and where that is auto if it pays."""
    if setting == "auto":
        return pays(device) and evaluations >= MANY
    return bool(setting)


def can_build() -> bool:
    """Whether there is what Triton, PyTorch's compiler for GPUs, builds its own driver with."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return (
        bool(compiler) and Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists()
    )


def lacks(device: torch.device, setting: bool | str) -> str | None:
    """What the user of a GPU is to install; None where nothing is missing, or wanted."""
    if setting != "auto" or device.type != "cuda" or can_build():
        return None
    return (
        "The network is not compiled, with which training is up to 1.5 times as fast: on a GPU "
        "PyTorch needs a C compiler (gcc, clang, or what CC names) and Python's headers for it "
        "(on Debian and Ubuntu: apt install gcc python3-dev)."
    )


@contextmanager
def translate_errors(setting: str) -> Iterator[None]:
    """Raises UserError in the place of torch.compile's errors; `setting` is what asked for it."""
    try:
        yield
    except RuntimeError as error:
        if not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            raise
        raise UserError(
            f"The network could not be compiled: {' '.join(str(error).split())[:300]} If an "
            "earlier compilation was killed, remove what it left (TORCHINDUCTOR_CACHE_DIR, or "
            f"torchinductor_* among the temporary files); {setting}: false does without."
        ) from error
