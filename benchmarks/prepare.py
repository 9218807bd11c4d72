"""Measure the time and memory of prepare: python -m benchmarks.prepare SOURCE [--size 32]

Prepares the whole source and, if it is a zip, a tenth of it. Each runs in a separate process with
its own workers; their peak memory comes from /proc (Linux). Prints JSON.
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

_POLL = 0.05  # seconds between two readings of the workers' memory
_PREPARE = """
import json, sys
from ddpm_core.data.prepare import prepare
from ddpm_core.config.load import validate
from ddpm_core.storage.workspace import Workspace

given = json.loads(sys.argv[1])
size = given["image_size"]
network = {"multipliers": [1, 2], "attention": [size // 2]}
manifest = prepare(validate({"prepare": given, "model": network}), Workspace.open(sys.argv[2]))
print(json.dumps({"images": manifest["count"] + manifest["holdout_count"]}))
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
    """Write every tenth file of a zip to `target`, to compare its memory with the whole."""
    with zipfile.ZipFile(source) as whole, zipfile.ZipFile(target, "w") as part:
        for member in whole.infolist()[::10]:
            part.writestr(member, whole.read(member))
    return target


def measure(source: Path, settings: dict[str, Any], workspace: Path) -> dict[str, float]:
    """Return seconds, images per second, and peak memory (MB) of prepare and its workers."""
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
    images = json.loads(output)["images"]
    return {
        "images": images,
        "seconds": round(seconds, 2),
        "images_per_second": round(images / seconds),
        "memory_mb": peaks.pop(process.pid, 0.0),
        "worker_memory_mb": max(peaks.values(), default=0.0),
        "workers": len(peaks),
    }


def _watch(process: subprocess.Popen[str], peaks: dict[int, float]) -> None:
    """Record the peak memory of the process and its workers while they run."""
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
