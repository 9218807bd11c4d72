"""Out-of-memory errors are reported as such, whichever exception a library raises."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddpm_core.errors import Corrupt, UserError
from ddpm_core.runtime.memory import OutOfMemory, shortage, translate_errors

LIMITED = """
import resource, sys
from ddpm_core.console import report_errors
from ddpm_core.errors import require
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + int(sys.argv[1]),) * 2)
with report_errors("ddpm evaluate"):
    require(sys.argv[2], "eval")
"""


def limited(module: str, more: int) -> subprocess.CompletedProcess[str]:
    """Import a module in a process that may allocate only `more` bytes."""
    arguments = [sys.executable, "-c", LIMITED, str(more), module]
    return subprocess.run(arguments, capture_output=True, text=True)


@pytest.mark.parametrize("module", ["scipy.linalg", "torch"])
def test_library_that_does_not_fit_is_reported_as_memory(module: str) -> None:
    done = limited(module, 20 * 2**20)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(
        "ddpm evaluate: Out of memory with the memory limit of this process: "
    )
    assert "not installed" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_broken_package_is_not_reported_as_missing(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("from json import nothing_of_this_name\n")
    script = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "from ddpm_core.errors import require\n"
        "require('broken', 'eval')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "The package 'broken' is installed but cannot be imported (" in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("could not create a primitive"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ImportError("libx.so: failed to map segment from shared object"),
    ],
)
def test_memory_errors_become_one_message(error: Exception) -> None:
    advice = "sample.batch_size 8: lower it."
    expected = r"^Out of memory with sample\.batch_size 8: lower it\. \("
    with pytest.raises(OutOfMemory, match=expected), translate_errors(advice):
        raise error
    with pytest.raises(OutOfMemory), translate_errors():
        raise Corrupt("step-00000012 is damaged.") from error


def test_innermost_advice_is_kept() -> None:
    with (
        pytest.raises(OutOfMemory, match="with less"),
        translate_errors(),
        translate_errors("less"),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        ImportError("x.so: failed to map segment from shared object: Operation not permitted"),
        OSError(errno.ENOSPC, "No space left on device"),
        UserError("The file 'out of memory.txt' is missing."),
    ],
)
def test_other_errors_are_not_translated(error: Exception) -> None:
    assert shortage(error) is None
    with pytest.raises(type(error)), translate_errors():
        raise error
