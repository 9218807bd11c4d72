"""Runs whose workspace is in S3: killed, resumed, shared, damaged and disconnected."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.mlflow_server import free_port
from support.program import TINY, Program, ddpm, wait_until, write_params
from support.runs import bits, final, tensors
from support.s3_server import Bucket, Gate

STEPS = 30
PARAMS = (
    TINY.replace("steps: 12", f"steps: {STEPS}")
    .replace("snapshot_every: 4", "snapshot_every: 5")
    .replace("milestone_every: 6", "milestone_every: 15")
    .replace("attention: [8]}", "attention: [8], dropout: 0.1, conditioning: class}")
)
LAST = f"snapshots/step-{STEPS:08d}"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run on a local disk."""
    folder = tmp_path_factory.mktemp("local")
    write_params(folder, PARAMS)
    ddpm(folder, "prepare")
    ddpm(folder, "train")
    return folder / "workspace"


class Run:
    """A run in S3 with the prepared data of `local`. Commands share no local files."""

    def __init__(self, bucket: Bucket, local: Path, root: Path) -> None:
        self.bucket, self.root, self.prefix = bucket, root, root.name
        self._commands = 0
        for path in (local / "data").iterdir():
            bucket.put(f"{self.prefix}/data/{path.name}", path.read_bytes())

    def start(self, *arguments: str, **changed: str) -> Program:
        self._commands += 1
        folder = self.root / f"machine-{self._commands}" / "project"
        folder.mkdir(parents=True)
        write_params(folder, PARAMS)
        command, *rest = arguments
        uri = self.bucket.uri(self.prefix)
        place = folder.parent / "tmp"
        return self.bucket.start(folder, command, "-w", uri, *rest, place=place, **changed)

    def ddpm(self, *arguments: str, status: int = 0) -> str:
        process = self.start(*arguments)
        said = process.ended()
        assert process.returncode == status, said
        return said

    def keys(self, folder: str) -> list[str]:
        return self.bucket.keys(f"{self.prefix}/{folder}")

    def weights(self) -> dict[str, bytes]:
        """Return every tensor of the last snapshot as bytes."""
        keys = self.keys(f"{LAST}/")
        return bits(tensors((key.rpartition("/")[2], self.bucket.read(key)) for key in keys))

    def steps_logged(self) -> list[int]:
        text = b"".join(map(self.bucket.read, self.keys("log.jsonl.parts/")))
        return [json.loads(line)["step"] for line in text.splitlines()]

    def sealed(self) -> list[int]:
        """Return the steps of complete snapshots."""
        names = [key for key in self.keys("snapshots/") if key.endswith("/manifest.json")]
        return sorted(int(name.split("/")[-2].removeprefix("step-")) for name in names)

    def has(self, step: int) -> Callable[[], bool]:
        return lambda: step in self.sealed()


@pytest.fixture
def run(bucket: Bucket, local: Path, tmp_path: Path) -> Run:
    return Run(bucket, local, tmp_path)


@pytest.mark.slow
def test_run_killed_twice_in_s3_equals_a_run_on_disk(run: Run, local: Path) -> None:
    for step in (5, 20):
        process = run.start("train")
        assert wait_until(run.has(step), process, pause=0.05)
        process.send_signal(signal.SIGKILL)
        process.ended()
    *_, before, newest = run.sealed()
    run.bucket.delete(f"{run.prefix}/snapshots/step-{newest:08d}/manifest.json")  # unfinished
    said = run.ddpm("train")
    assert f"resuming from step {before}" in said
    assert run.weights() == bits(final(local.parent, STEPS))
    assert run.steps_logged() == list(range(2, STEPS + 1, 2))
    assert not run.keys("snapshots/step-00000005/")


@pytest.mark.slow
def test_changed_snapshot_is_named_and_not_resumed(run: Run, local: Path) -> None:
    run.ddpm("train", "-S", "train.steps=15")
    key = f"{run.prefix}/snapshots/step-00000015/optimizer.safetensors"
    content = bytearray(run.bucket.read(key))
    content[-5] ^= 4
    run.bucket.put(key, bytes(content))
    said = run.ddpm("train")
    assert "A snapshot was skipped: snapshots/step-00000015/optimizer.safetensors was" in said
    assert "resuming from step 10" in said
    assert run.weights() == bits(final(local.parent, STEPS))


def test_second_run_is_refused_with_the_owner_named(run: Run) -> None:
    first = run.start("train", "-S", "train.steps=100000")
    try:
        assert wait_until(run.has(5), first, pause=0.05)
        said = run.ddpm("train", status=1)
        assert f"is in use by process {first.pid} on {socket.gethostname()}" in said
    finally:
        first.send_signal(signal.SIGKILL)
        first.ended()


@pytest.mark.slow
def test_server_outage_delays_a_run_and_changes_nothing(run: Run, local: Path) -> None:
    gate = Gate(run.bucket.environment["AWS_ENDPOINT_URL"])
    process = run.start("train", AWS_ENDPOINT_URL=gate.endpoint)
    assert wait_until(run.has(5), process, pause=0.05)
    gate.shut()
    told = ("Cannot renew the lease", "Cannot write the snapshot")
    assert wait_until(lambda: any(text in process.said() for text in told), process)
    gate.open()
    said = process.ended()
    assert process.returncode == 0, said
    assert run.weights() == bits(final(local.parent, STEPS))
    assert run.steps_logged() == list(range(2, STEPS + 1, 2))


def test_missing_server_is_a_user_error(run: Run) -> None:
    gate = Gate(run.bucket.environment["AWS_ENDPOINT_URL"])
    gate.shut()
    process = run.start("train", AWS_ENDPOINT_URL=gate.endpoint)
    said = process.ended(limit=60)
    assert process.returncode == 1
    assert f"The S3 server at {gate.endpoint} is unavailable" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_workers_without_a_shared_disk_equal_those_with_one(run: Run, local: Path) -> None:
    together = run.root / "together"
    (together / "workspace").mkdir(parents=True)
    (together / "workspace" / "data").symlink_to(local / "data")
    write_params(together, PARAMS)
    workers(lambda **which: run.bucket.start(together, "train", place=together, **which))
    for steps, told in ((10, ""), (STEPS, "resuming from step 10")):
        command = ("train", "-S", f"train.steps={steps}")
        for said in workers(lambda **which: run.start(*command, **which)):  # noqa: B023
            assert told in said
    assert run.weights() == bits(final(together, STEPS))
    assert run.steps_logged() == list(range(2, STEPS + 1, 2))


def workers(start: Callable[..., Program]) -> list[str]:
    """Run two workers as torchrun starts them; return their output."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    both = [start(RANK=str(rank), LOCAL_RANK="0", **common) for rank in range(2)]
    said = [worker.ended() for worker in both]
    assert [worker.returncode for worker in both] == [0, 0], said
    return said


def test_last_machine_combines_the_shards_of_both(run: Run, local: Path) -> None:
    needed = ("manifest.json", "config.json", "ema-0.9.safetensors")
    for path in (local / LAST).iterdir():  # other files are zeros: not to be read
        content = path.read_bytes() if path.name in needed else bytes(path.stat().st_size)
        run.bucket.put(f"{run.prefix}/{LAST}/{path.name}", content)
    latest = ("-S", "sample.checkpoints=latest")
    machines = [run.start("sample", "--shard", f"{n}/2", *latest) for n in range(2)]
    for machine in machines:
        said = machine.ended()
        assert machine.returncode == 0, said
    run.bucket.delete(f"{run.prefix}/{LAST}/{needed[-1]}")
    assert "up to date" in run.ddpm("sample", *latest, "-S", "sample.shards=2")
    ddpm(local.parent, "sample", *latest, "-S", "sample.shards=2")
    samples = f"samples/step-{STEPS:08d}"
    for name in ("shard-000-of-002.npy", "shard-001-of-002.npy", "labels.npy", "grid.png"):
        there = run.bucket.read(f"{run.prefix}/{samples}/{name}")
        assert there == (local / samples / name).read_bytes(), name
    ours = json.loads(run.bucket.read(f"{run.prefix}/{samples}/manifest.json"))
    theirs = json.loads((local / samples / "manifest.json").read_bytes())
    assert ours == theirs
