"""How long prepare takes, and how much memory: python -m benchmarks.prepare SOURCE [--size 32]

Prepares the whole source, and of a zip then a tenth, each in a process of its own with workers of
its own, and reads the largest memory of each of them from /proc (Linux). JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

_POLL = 0.05  # seconds between two looks at the memory of the workers
_PREPARE = """
import json, sys
from ddpm_core.data.prepare import prepare
from ddpm_core.config.load import validate
from ddpm_core.storage.workspace import Workspace

given = json.loads(sys.argv[1])
size = given["image_size"]
network = {"multipliers": [1, 2], "attention": [size // 2]}
manifest = prepare(validate({"prepare": given, "model": network}), Workspace.open(sys.argv[2]))
print(json.dumps({"pictures": manifest["count"] + manifest["holdout_count"]}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--workers", default="auto")
    given = parser.parse_args()
    workers = given.workers if given.workers == "auto" else int(given.workers)
    settings = {"image_size": given.size, "workers": workers, "max_rejected": 1.0}
    with tempfile.TemporaryDirectory() as root:
        result = {"whole": measure(given.source, settings, Path(root) / "whole")}
        if given.source.suffix == ".zip":
            part = a_tenth(given.source, Path(root) / "part.zip")
            result["tenth"] = measure(part, settings, Path(root) / "tenth")
    print(json.dumps(result, indent=1))


def a_tenth(source: Path, target: Path) -> Path:
    """Every tenth file of a zip, so that memory can be compared with that of the whole."""
    with zipfile.ZipFile(source) as whole, zipfile.ZipFile(target, "w") as part:
        for member in whole.infolist()[::10]:
            part.writestr(member, whole.read(member))
    return target


def measure(source: Path, settings: dict[str, Any], workspace: Path) -> dict[str, float]:
    """Seconds, pictures a second, and the peaks of memory (MB) of prepare and of each worker."""
    given = json.dumps({**settings, "source": str(source.absolute())})
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", _PREPARE, given, str(workspace)], stdout=subprocess.PIPE, text=True
    )
    peaks: dict[int, float] = {}
    watcher = threading.Thread(target=_watch, args=(process, peaks))
    watcher.start()
    output, _ = process.communicate()
    seconds = time.monotonic() - started
    watcher.join()
    pictures = json.loads(output)["pictures"]
    return {
        "pictures": pictures,
        "seconds": round(seconds, 2),
        "pictures_per_second": round(pictures / seconds),
        "memory_mb": peaks.pop(process.pid, 0.0),
        "worker_memory_mb": max(peaks.values(), default=0.0),
        "workers": len(peaks),
    }


def _watch(process: subprocess.Popen[str], peaks: dict[int, float]) -> None:
    """Read the high-water marks of the process and its workers while they live."""
    while process.poll() is None:
        for pid in [process.pid, *_children(process.pid)]:
            peak = _peak(pid)
            if peak:
                peaks[pid] = peak
        time.sleep(_POLL)


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split() if b"resource_tracker" not in _command(child)]


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _peak(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    found = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return round(found[0] / 1024, 1) if found else 0.0


if __name__ == "__main__":
    main()
