"""An emulated device with separate memory, which code cannot distinguish from a GPU.

Its tensors wrap CPU tensors, on which PyTorch's operations run, so results are the CPU's. As on a
GPU, an operation cannot mix its tensors with CPU tensors, and reading a value waits for the device.
`Record` counts where that happened, and where a number was wider than float32, which MPS does not
support. Like MPS, it has no foreach API. GPU kernels, streams and autocast are not emulated.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from ddpm_core.evaluation import in_domain
from support.program import Program, _run

_ATEN = torch.ops.aten
_COPIES = (_ATEN.copy_.default, _ATEN._to_copy.default, _ATEN._foreach_copy_.default)
_READS = (_ATEN._local_scalar_dense.default, _ATEN.nonzero.default, _ATEN.equal.default)
_WIDE = (torch.float64, torch.complex64, torch.complex128)
FILE = "apart.json"  # the record, in the folder of a run


@dataclass
class Record:
    """How often each function of ddpm_core waited for the device or used a wide number on it."""

    waits: Counter[str] = field(default_factory=Counter)
    wide: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def place() -> str:
        """Return `module.py:function` of the innermost caller in ddpm_core."""
        frames = [f for f in traceback.extract_stack() if "/ddpm_core/" in f.filename]
        frames = [f for f in frames if not f.name.startswith("<")]  # comprehensions, up to 3.11
        return f"{frames[-1].filename.split('/ddpm_core/')[1]}:{frames[-1].name}" if frames else "?"


RECORD = Record()


class Apart(Tensor):
    """A tensor of the device; `there` is the CPU tensor with its values."""

    there: Tensor

    @staticmethod
    def __new__(cls, there: Tensor) -> Apart:
        made: Apart = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            there.size(),
            strides=there.stride(),
            storage_offset=there.storage_offset(),
            dtype=there.dtype,
            device=torch.device("apart:0"),
        )
        made.there = there
        return made

    def __init__(self, there: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # autograd cannot use tensors that were created in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return _compute(operation, args, kwargs or {})


def _compute(operation: Any, args: Any, kwargs: Any) -> Any:
    flat, form = tree_flatten((args, kwargs))
    own = [value for value in flat if isinstance(value, Apart)]
    others = [v for v in flat if isinstance(v, Tensor) and not isinstance(v, Apart) and v.dim()]
    if others and operation not in _COPIES:
        shapes = [tuple(tensor.shape) for tensor in others]
        raise RuntimeError(f"{operation}: tensors of {shapes} are on the CPU, others on the device")
    stays = isinstance(args[0], Apart) if operation is _ATEN.copy_.default else True
    if kwargs.get("device") is not None:
        stays = torch.device(kwargs["device"]).type == "apart"
    if operation in _READS or not stays:
        RECORD.waits[Record.place()] += 1
    known = {id(value.there): value for value in own}
    flat = [value.there if isinstance(value, Apart) else value for value in flat]
    args, kwargs = tree_unflatten(flat, form)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor) or not stays:
            return value
        if value.dtype in _WIDE:
            RECORD.wide[Record.place()] += 1
        return known[id(value)] if id(value) in known else Apart(value)

    result = tree_map(back, operation(*args, **kwargs))
    if any(value.shape != value.there.shape for value in own):
        raise NotImplementedError(f"{operation} changed the size of a tensor")
    return result


_LIBRARY = torch.library.Library("aten", "IMPL")  # its kernels are removed with it


class _Backend(_DummyBackendModule):  # type: ignore[misc]
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between the device and the CPU, in either direction."""
    if not isinstance(target, Apart):
        RECORD.waits[Record.place()] += 1
    to, of = (t.there if isinstance(t, Apart) else t for t in (target, source))
    to.copy_(of)
    return target


def _read(tensor: Apart) -> Any:
    RECORD.waits[Record.place()] += 1
    return tensor.there.item()


def set_up() -> torch.device:
    """Register the device with PyTorch in this process."""
    _setup_privateuseone_for_python_backend("apart", _Backend())
    torch.utils._foreach_utils._get_foreach_kernels_supported_devices = list
    kernels: dict[str, Callable[..., Any]] = {
        "empty.memory_format": lambda size, dtype=None, memory_format=None, **_: Apart(
            torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
        ),
        "empty_strided": lambda size, stride, dtype=None, **_: Apart(
            torch.empty_strided(size, stride, dtype=dtype)
        ),
        "arange": lambda *given, dtype=None, **_: Apart(torch.arange(*given, dtype=dtype)),
        "_copy_from": _copy,
        "_local_scalar_dense": _read,
    }
    kernels |= {f"arange.{form}": kernels["arange"] for form in ("start", "start_step")}
    for name, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, "PrivateUse1")
    return torch.device("apart:0")


def use_it() -> None:
    """Run all computation of the program in this process on the device.

    Collectives must use tensors on the device too, as NCCL requires and Gloo does not.
    """
    device = set_up()
    for name, module in list(sys.modules.items()):
        if name.startswith("ddpm_core") and hasattr(module, "choose_device"):
            module.choose_device = lambda name, local_rank=0: device  # type: ignore[attr-defined]
    for name in ("all_reduce", "all_gather", "broadcast"):
        setattr(torch.distributed, name, partial(_on_it, getattr(torch.distributed, name)))


def _on_it(collective: Callable[..., Any], *given: Any, **options: Any) -> Any:
    for tensor in tree_flatten(given)[0]:
        if isinstance(tensor, Tensor) and not isinstance(tensor, Apart):
            raise TypeError(f"{collective}: got a tensor on the CPU")
    return collective(*given, **options)


def _run_apart(folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    use_it()
    in_domain.STEPS = (4, 4)  # they use every operation of the device that more steps use
    try:
        _run(folder, arguments, output)
    finally:
        (folder / FILE).write_text(json.dumps(vars(RECORD)))


def ddpm_apart(folder: Path, *arguments: str) -> Record:
    """Run `ddpm ARGUMENTS` on the device and return its record."""
    program = Program(folder, arguments, _run_apart)
    said = program.ended()
    assert program.returncode == 0, said
    return Record(**{k: Counter(v) for k, v in json.loads((folder / FILE).read_text()).items()})
