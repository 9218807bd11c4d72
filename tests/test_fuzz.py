"""Damaged files are read correctly or raise a user error, never another exception.

Readers also write nothing elsewhere, and allocate no memory that a file only claims to need.
FUZZ_SEED selects another seed, FUZZ_ROUNDS multiplies the number of inputs.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import mutations
from support.strangers import Strangers, Target

from ddpm_core.errors import UserError
from ddpm_core.storage.files import open_array, parse_object, read_tensors

SEED = int(os.environ.get("FUZZ_SEED", "1"))
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "1"))
ROOM = 256 * 2**20  # bytes that the process may allocate; files of a few kB need far less
INPUTS = {
    "snapshot": 230,
    "data": 500,
    "samples": 460,
    "reference": 300,
    "neighbours": 230,
    "extractor": 60,
    "diffusers": 300,
    "documents": 560,
    "chunk": 100,
}
RAW = 300  # inputs per format that are read without a checksum


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Strangers:
    return Strangers(tmp_path_factory.mktemp("strangers") / "inside")


@pytest.fixture
def outside(
    strangers: Strangers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Yield a folder; check afterwards that readers changed neither it nor the current folder."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "secret").write_text("secret")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    beside = sorted(strangers.root.parent.iterdir())
    yield place
    assert [path.name for path in place.iterdir()] == ["secret"]
    assert (place / "secret").read_text() == "secret"
    assert not list((tmp_path / "here").iterdir())
    assert sorted(strangers.root.parent.iterdir()) == beside


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Refuse allocations beyond ROOM during the block."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def is_user_error(error: BaseException) -> bool:
    """Return whether an error is a UserError, and not the result of a failed allocation."""
    causes, cause = "", error.__cause__
    while cause is not None:
        causes, cause = f"{causes} {cause!r}", cause.__cause__
    refused = "alloc" in f"{error} {causes}" or "MemoryError" in causes
    return isinstance(error, UserError) and len(str(error)) < 3000 and not refused


def fails(target: Target, random_: random.Random, outside: Path) -> str:
    """Damage one file of a target and read it; return the failure, or "" if there is none."""
    path = random_.choice(target.files)
    story = f"{target.name}: {path.name}"
    changed = {path}
    if random_.random() < 0.08:
        story += f", {mutations.replace_file(random_, path, outside)}"
    else:
        data = target.content[path]
        for _ in range(random_.choice([1, 1, 1, 2, 3])):
            mutation = random_.choice(mutations.fitting(path.name))
            data, story = mutation(random_, data), f"{story}, {mutation.__name__}"
        restore(path, data)  # a new file, because open files must not change
    if target.sealed and path.name != "manifest.json" and random_.random() < 0.75:
        mutations.reseal(target.sealed)
        changed.add(target.sealed / "manifest.json")
        story += ", sealed again"
    try:
        target.read()
    except Exception as error:
        if not is_user_error(error):
            return f"{story}\n{''.join(traceback.format_exception(error))[-3000:]}"
    finally:
        for file in changed:
            restore(file, target.content[file])
    return ""


def restore(path: Path, data: bytes) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.write_bytes(data)


@pytest.mark.parametrize("name", INPUTS)
def test_damaged_file_is_read_or_a_user_error(
    strangers: Strangers, outside: Path, name: str
) -> None:
    target = strangers.targets[name]
    target.read()
    passed = 0
    with bounded_memory():
        for number in range(INPUTS[name] * ROUNDS):
            random_ = random.Random(f"{SEED} {name} {number}")
            failure = fails(target, random_, outside)
            assert not failure, f"input {number} of seed {SEED} of {failure}"
            passed += 1
    target.read()
    assert passed == INPUTS[name] * ROUNDS


@pytest.mark.parametrize("kind", ["json", "npy", "safetensors"])
def test_damaged_format_is_read_or_a_user_error(
    strangers: Strangers, outside: Path, tmp_path: Path, kind: str
) -> None:
    where = {"json": "snapshots", "npy": "samples", "safetensors": "snapshots"}[kind]
    samples = [p.read_bytes() for p in strangers.root.glob(f"run/{where}/*/*.{kind}")]
    file = tmp_path / f"file.{kind}"
    readers = {"npy": open_array, "safetensors": read_tensors}
    with bounded_memory():
        for number in range(RAW * ROUNDS):
            random_ = random.Random(f"{SEED} {kind} {number}")
            data = random_.choice(samples)
            for _ in range(random_.choice([1, 1, 2, 4])):
                data = random_.choice(mutations.fitting(file.name))(random_, data)
            file.write_bytes(data)
            try:
                if kind == "json":
                    assert isinstance(parse_object(data, file.name), dict)
                else:
                    readers[kind](file)
            except Exception as error:
                assert is_user_error(error), f"input {number} of seed {SEED}: {error!r}"
