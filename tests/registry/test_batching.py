"""Waiting requests share batches, which changes no image."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import write_checkpoint

from ddpm_core.registry.drawing import DrawingQueue, Full, Job
from ddpm_core.registry.generate import tasks_of, wanted_of
from ddpm_core.registry.serving import Served, Shot, shots_of
from ddpm_core.sampling.noise import BatchNoise, Origin

CPU = torch.device("cpu")


class Paused(Served):
    """A real model that waits before each batch until `go` is set, and counts its images."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go, self.started = threading.Event(), threading.Event()
        self.batches: list[int] = []
        self.broken_seed = -1

    def draw(self, shots: Any, on_step: Any = None) -> list[dict[str, Any]]:
        self.batches.append(len(shots))
        self.started.set()
        assert self.go.wait(30)
        if any(shot.origin.seed == self.broken_seed for shot in shots):
            raise ArithmeticError("broken")
        return super().draw(shots, on_step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("batching") / "step", "class").folder


@pytest.fixture
def served(folder: Path) -> Iterator[Paused]:
    served = Paused(folder)
    yield served
    served.go.set()


def shots(served: Served, **row: Any) -> list[Shot]:
    wanted = wanted_of(served.checkpoint.params, {"format": "array", **row})
    return shots_of(tasks_of(served, wanted, None, 10**9))


def begin(served: Paused, queue: DrawingQueue, *rows: dict[str, Any]) -> list[Job]:
    """Let one request be drawn while others wait; return them all."""
    jobs = [Job(served, shots(served, **row)) for row in rows]
    queue.add(jobs[0])
    assert served.started.wait(30)
    for job in jobs[1:]:
        queue.add(job)
    return jobs


def pixels(job: Job) -> np.ndarray:
    return as_pixels([image.decode() for image in job.response.result(30)])


def as_pixels(images: list[Any]) -> np.ndarray:
    parsed = [json.loads(one) if isinstance(one, str) else one for one in images]
    return np.array([one["image"] for one in parsed])


def alone(folder: Path, **row: Any) -> np.ndarray:
    served = Served(folder)
    return as_pixels(served.draw(shots(served, **row)))


def test_waiting_requests_are_drawn_in_one_batch(folder: Path, served: Paused) -> None:
    rows: list[dict[str, Any]] = [
        {"n": 1, "seed": 9, "class": "circle"},
        {"n": 3, "seed": 4, "class": "square"},
        {"n": 2, "seed": 9, "first": 7},
        {"n": 3, "seed": 4, "toward": 5, "class": "7"},
    ]
    jobs = begin(served, DrawingQueue(9), {"n": 1}, *rows)
    served.go.set()
    for job, row in zip(jobs[1:], rows, strict=True):
        assert np.abs(pixels(job) - alone(folder, **row)).max() <= 1
    assert served.batches == [1, 9]


def test_other_settings_are_drawn_in_another_batch(served: Paused) -> None:
    rows = [{"n": 1}, {"n": 2, "steps": 3}, {"n": 2, "guidance": 2.0}, {"n": 3, "steps": 3}]
    jobs = begin(served, DrawingQueue(9), *rows)
    served.go.set()
    assert [len(job.response.result(30)) for job in jobs] == [1, 2, 2, 3]
    assert served.batches == [1, 5, 2]


def test_a_large_request_does_not_block_small_ones(served: Paused) -> None:
    rows = [{"n": 130, "steps": 1}, {"n": 1, "steps": 2}, {"n": 60, "steps": 1}]
    jobs = begin(served, DrawingQueue(9), *rows)
    ended: list[int] = []
    for number, job in enumerate(jobs):
        job.response.add_done_callback(lambda _, number=number: ended.append(number))
    served.go.set()
    assert len(jobs[0].response.result(30)) == 130
    assert ended == [1, 2, 0]
    assert served.batches == [64, 1, 64, 62]


def test_a_client_that_leaves_takes_only_its_images(folder: Path, served: Paused) -> None:
    queue = DrawingQueue(9)
    first, second, third = begin(served, queue, {"n": 1}, {"n": 2, "seed": 3}, {"n": 2})
    queue.abandon(first)
    queue.abandon(third)
    served.go.set()
    assert np.abs(pixels(second) - alone(folder, n=2, seed=3)).max() <= 1
    assert served.batches == [1, 2]
    assert not first.response.done() and not third.response.done()


def test_a_failure_in_a_batch_fails_only_its_request(folder: Path, served: Paused) -> None:
    served.broken_seed = 3
    jobs = begin(served, DrawingQueue(9), {"n": 1}, {"n": 2, "seed": 4}, {"n": 1, "seed": 3})
    served.go.set()
    assert np.abs(pixels(jobs[1]) - alone(folder, n=2, seed=4)).max() <= 1
    with pytest.raises(ArithmeticError):
        jobs[2].response.result(30)
    assert served.batches == [1, 3, 2, 1]


def test_the_queue_counts_requests_that_wait(served: Paused) -> None:
    queue = DrawingQueue(2)
    jobs = begin(served, queue, {"n": 1}, {"n": 1}, {"n": 1})
    with pytest.raises(Full):
        queue.add(Job(served, shots(served, n=1)))
    served.go.set()
    assert all(job.response.result(30) for job in jobs)


def test_noise_between_two_seeds_begins_and_ends_at_them() -> None:
    shape, numbers = (1, 8, 8), range(3)

    def noise(share: float, seed: int = 1) -> torch.Tensor:
        origins = [Origin(seed, number, (2, number), share) for number in numbers]
        return BatchNoise(origins, shape, CPU)(0)

    def of(seed: int) -> torch.Tensor:
        return BatchNoise([Origin(seed, number) for number in numbers], shape, CPU)(0)

    assert torch.equal(noise(0.0), of(1))
    assert torch.allclose(noise(1.0), of(2), atol=1e-6)
    many = BatchNoise([Origin(1, n, (2, n), 0.5) for n in range(400)], shape, CPU)(0)
    assert float(many.std()) == pytest.approx(1.0, abs=0.02)


def test_each_image_of_a_batch_has_its_own_seed() -> None:
    origins = [Origin(5, 3), Origin(7, 3), Origin(2**63 - 1, 4, (5, 4), 0.25)]
    together = BatchNoise(origins, (2, 5), CPU)(6, 1)
    for row, origin in enumerate(origins):
        assert torch.equal(together[row], BatchNoise([origin], (2, 5), CPU)(6, 1)[0])
