"""prepare in several processes: the same result, limited memory, and a clean end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.images import (
    config,
    dies,
    loaded,
    noise,
    prepared,
    rejected,
    write,
    write_classes,
)

from ddpm_core.data import workers
from ddpm_core.data.prepare import prepare
from ddpm_core.errors import UserError
from ddpm_core.storage import verify
from ddpm_core.storage.lease import LEASE
from ddpm_core.storage.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(str(tmp_path / "workspace"))


def left_in(workspace: Workspace) -> set[str]:
    """Return all files in a workspace, also hidden ones, except its lease."""
    return {item.name for item in workspace.path("").iterdir()} - {".lock", LEASE}


SCRIPT = """
import resource, signal, sys
from ddpm_core import console
from ddpm_core.data import workers
from ddpm_core.data.prepare import prepare
from ddpm_core.errors import UserError
from ddpm_core.config.load import validate
from ddpm_core.storage.workspace import Workspace

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts without it
console.PLAIN_INTERVAL = 0.0
workers.SINGLE_IMAGES = workers.SINGLE_BYTES = 0
workers.CHUNK_IMAGES = 1
source, target, count, limit = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
settings = {"source": source, "image_size": 64, "workers": int(count)}
config = validate({"prepare": settings, "model": {"attention": [16]}})
try:
    prepare(config, Workspace.open(target))
except UserError as error:
    sys.exit(str(error))
print("torch" in sys.modules)
"""


def start(tmp_path: Path, workers: int = 2, limit: int = 0) -> subprocess.Popen[str]:
    """Start prepare in its own process; it prints its progress after every image."""
    script = write(tmp_path / "script.py", SCRIPT)
    target = str(tmp_path / "workspace")
    arguments = [
        sys.executable,
        str(script),
        str(tmp_path / "raw"),
        target,
        str(workers),
        str(limit),
    ]
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def write_many(root: Path) -> None:
    """Write images that take seconds to decode: 20, each under 200 names."""
    for seed in range(20):
        path = write(root / "a" / f"{seed}.png", noise(seed, (300, 300)))
        for number in range(200):
            path.with_name(f"{path.stem}-{number}.png").hardlink_to(path)


def wait_for_first_images(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("prepare: 3/"):
            return
    raise AssertionError("prepare ended before its first images")


def test_result_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SINGLE_IMAGES", 0)
    monkeypatch.setattr(workers, "CHUNK_IMAGES", 3)
    root = write_classes(tmp_path / "raw", ["cat", "dog"], each=20)
    write(root / "cat/broken.png", b"broken")
    settings = {"holdout": 0.3, "max_rejected": 0.5}
    one = prepared(tmp_path / "1", root, workers=1, **settings)
    three = prepared(tmp_path / "3", root, workers=3, **settings)
    assert one.manifest.files == three.manifest.files
    assert rejected(tmp_path / "1/workspace") == rejected(tmp_path / "3/workspace")


def test_workers_do_not_import_the_main_script(tmp_path: Path) -> None:
    """The script comes from standard input, where no worker could read it again."""
    write_classes(tmp_path / "raw", ["a"], each=20)
    arguments = [str(tmp_path / "raw"), str(tmp_path / "workspace"), "2", "0"]
    done = subprocess.run(
        [sys.executable, "-", *arguments], input=SCRIPT, capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


def test_prepare_and_workers_do_not_import_torch(tmp_path: Path) -> None:
    write_classes(tmp_path / "raw", ["a"])
    out, errors = start(tmp_path, workers=1).communicate(timeout=60)
    assert out == "False\n", errors
    (modules,) = workers.map_chunks(loaded, (), [[(0, b"")]], workers=2)
    assert "ddpm_core.data.prepare" in modules and "torch" not in modules


def test_full_disk_keeps_earlier_data(tmp_path: Path, workspace: Workspace) -> None:
    root = write_classes(tmp_path / "raw", ["a"], each=40)
    before = prepare(config(root), workspace)
    process = start(tmp_path, workers=1, limit=100_000)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in printed
    assert "No space left for the prepared data" in printed
    assert workspace.read_json("data/manifest.json") == before
    verify(workspace.path("data"))
    assert left_in(workspace) == {"data"}


def test_second_prepare_at_the_same_time_is_refused(tmp_path: Path, workspace: Workspace) -> None:
    """The first prepare in a workspace holds its lease."""
    write_many(tmp_path / "raw")
    process = start(tmp_path)
    wait_for_first_images(process)
    with pytest.raises(UserError, match=f"in use by process {process.pid} on "):
        prepare(config(tmp_path / "raw"), workspace)
    process.kill()
    process.communicate(timeout=60)
    assert not workspace.path("data").exists()


def test_ctrl_c_ends_the_workers_and_leaves_no_files(tmp_path: Path) -> None:
    write_many(tmp_path / "raw")
    process = start(tmp_path)
    wait_for_first_images(process)
    os.killpg(process.pid, signal.SIGINT)  # to all processes, as a terminal sends it
    # The workers share the pipes: this returns when the last of them has ended.
    _, printed = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert printed.count("KeyboardInterrupt") == 1
    assert left_in(Workspace.open(str(tmp_path / "workspace"))) == set()


def test_workers_exit_when_their_parent_is_killed(tmp_path: Path) -> None:
    write_many(tmp_path / "raw")
    process = start(tmp_path)
    wait_for_first_images(process)
    process.kill()
    # The workers share the pipes: this returns when the last of them has ended.
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "workspace/data").exists()


def test_killed_worker_is_a_user_error() -> None:
    chunks: list[Any] = [[(0, b"")], [(1, b"")]]
    with pytest.raises(UserError, match=r"was killed, .* memory.* prepare\.workers"):
        list(workers.map_chunks(dies, (), chunks, workers=2))


def test_large_images_in_transit_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes may have three chunks of 1,000 bytes each in transit; these have 4,000."""
    monkeypatch.setattr(workers, "AHEAD_BYTES", 1000)
    in_transit: list[int] = []
    finished = 0

    def chunks() -> Iterator[workers.Chunk]:
        for number in range(6):
            in_transit.append(number - finished)
            yield [(number, bytes(4000))]

    for count in workers.map_chunks(len, (), chunks(), 2):
        assert count == 1
        finished += 1
    assert finished == 6 and max(in_transit) == 1


def test_chunks_in_transit_are_limited() -> None:
    taken = 0

    def chunks() -> Iterator[Any]:
        nonlocal taken
        for number in range(40):
            taken += 1
            yield [(number, b"")]

    results = workers.map_chunks(loaded, (), chunks(), workers=2)
    next(results)
    assert taken <= 2 * 3
    assert len(list(results)) == 39


def test_chunks_are_limited_in_images_and_bytes() -> None:
    payloads: list[Any] = [(n, bytes(2**20)) for n in range(20)]
    assert max(len(chunk) for chunk in workers.chunked(payloads, 0)) == workers.CHUNK_BYTES // 2**20
    small: list[Any] = [(n, b"x") for n in range(200)]
    assert {len(chunk) for chunk in workers.chunked(small, 2**20)} == {4}
    assert [n for chunk in workers.chunked(small, 0) for n, _ in chunk] == list(range(200))
