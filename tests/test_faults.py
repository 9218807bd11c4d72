"""Faults of workers do not change the result of training: a selection of schedules.

`make test-faults` plays more of them, and `python tests/faults --seed N` replays one.
"""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
from faults import bitflip
from faults.attempt import Attempt, until
from faults.play import Stage, play
from faults.schedule import KINDS, draw
from support.program import ddpm, start, wait_until
from torch.distributed import TCPStore

from ddpm_core.runtime.distributed import agree_on_name
from ddpm_core.training.checks import checksum

# Each kind of fault, with a seed whose schedule is short.
CHOSEN = {
    "kill-worker": 3,
    "kill-first": 3,
    "term-one": 0,
    "hang": 2,
    "kill-in-snapshot": 1,
    "kill-agent": 10,
    "resize": 2,
    "truncated": 4,
    "missing": 7,
    "disk-full": 2,
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHOSEN)
def test_disturbed_run_equals_an_undisturbed_one(stage: Stage, kind: str) -> None:
    play(draw(CHOSEN[kind], kind), stage)


def test_schedule_depends_only_on_its_seed() -> None:
    drawn = [draw(seed) for seed in range(100)]
    assert {schedule.kind for schedule in drawn} == set(KINDS)
    assert drawn == [draw(schedule.seed, schedule.kind) for schedule in drawn]
    assert {size for schedule in drawn for size in schedule.worlds} == {1, 2, 3, 4}
    assert len({(s.at, s.delay, s.chance) for s in drawn}) == 100


@pytest.mark.slow
@pytest.mark.parametrize(("average", "file"), [(False, "model"), (True, "ema-0.9")])
def test_flipped_bit_stops_the_run_and_names_the_worker(
    stage: Stage, average: bool, file: str
) -> None:
    folder = stage.new_run(f"flipped-{file}")
    flip = partial(bitflip.begin, rank=1, step=12, average=average)
    attempt = Attempt(folder, "forked", 3, beside=flip)
    try:
        until(lambda: "weights differ" in attempt.said(), "the workers detect it", 60)
    finally:
        attempt.close()
    said = attempt.said()
    assert "rank 1 of 3 differs from the rest" in said
    assert f"{file}.safetensors" in said
    assert "the newest complete one is that of step 10" in said
    assert not (folder / "workspace/snapshots/step-00000015").exists()


def test_workers_agree_on_a_name_despite_an_earlier_start() -> None:
    """torchrun's agent keeps one store for all restarts, also with other world sizes."""
    limit = timedelta(seconds=10)
    served = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=limit)

    def meet(rank: int, size: int) -> str:
        store = TCPStore("localhost", served.port, is_master=False, timeout=limit)
        return agree_on_name(store, rank, size, 10)

    names = []
    for size in (3, 3, 2, 4, 4):
        with ThreadPoolExecutor(size) as pool:
            agreed = set(pool.map(partial(meet, size=size), range(size)))
        assert len(agreed) == 1
        names += agreed
    assert len(set(names)) == 5
    with pytest.raises(RuntimeError, match=r"Timed out waiting for the start of workers \[1\]"):
        agree_on_name(TCPStore("localhost", served.port, is_master=False), 0, 2, 0.05)


def test_checksum_detects_any_bit_and_ignores_order() -> None:
    tensors = [torch.randn(5, 3), torch.arange(4), torch.tensor([True, False])]
    whole = checksum(tensors)
    assert torch.equal(checksum(tensors[::-1]), whole)
    for tensor, bit in ((tensors[0].view(torch.int32), 31), (tensors[1], 0)):
        tensor.view(-1)[2] ^= -(2**31) if bit == 31 else 1 << bit
        assert not torch.equal(checksum(tensors), whole)
        tensor.view(-1)[2] ^= -(2**31) if bit == 31 else 1 << bit


@pytest.mark.slow
def test_user_errors_are_not_retried(stage: Stage) -> None:
    folder = stage.new_run("mistake")
    said = ddpm(
        folder,
        *("train", "-S", "train.processes=2", "-S", "train.optimizer.lr=1e30"),
        *("-S", "train.optimizer.warmup=0", "-S", "train.optimizer.clip=0"),
        status=1,
    )
    assert said.count(". There is no snapshot yet. Nothing of the failure") == 2, said
    assert "Training by 2 processes ended with status 1." in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_sigterm_saves_on_all_processes_and_exits_143(stage: Stage) -> None:
    folder = stage.new_run("asked")
    program = start(folder, "train", "-S", "train.processes=2")
    log = folder / "workspace/log.jsonl"
    assert wait_until(log.exists, program)
    program.send_signal(signal.SIGTERM)
    said = program.ended()
    assert program.returncode == 143, said
    assert "SIGTERM: stopped the 2 processes." in said
    steps = [json.loads(row)["step"] for row in log.read_text().splitlines()]
    newest = max((folder / "workspace/snapshots").iterdir()).name
    assert int(newest.partition("-")[2]) >= steps[-1]
