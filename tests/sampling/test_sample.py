"""Image i is the same for every worker, number of shards and interruption."""

from __future__ import annotations

import functools
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from faults.attempt import together
from support.program import (
    TINY,
    ddpm,
    new_run,
    prepare_run,
    settings,
    start,
    wait_until,
    write_params,
)

from ddpm_core.config import Sample
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.sampling.gather import open_samples
from ddpm_core.sampling.plan import parse_shard, shards
from ddpm_core.storage.workspace import Workspace

CLASSES = TINY.replace("attention: [8]}", "attention: [8], conditioning: class}").replace(
    "count: 20, batch_size: 8", "count: 37, batch_size: 10, checkpoints: latest, shards: 3"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare_run(tmp_path_factory.mktemp("trained"), CLASSES)
    ddpm(folder, "train")
    return folder


@pytest.fixture(scope="module")
def images(trained: Path) -> np.ndarray:
    return sampled(new_workspace(trained, "whole"))


def new_workspace(trained: Path, name: str) -> Path:
    return new_run(trained, name, CLASSES, "data", "snapshots")


def sampled(folder: Path, *arguments: str) -> np.ndarray:
    ddpm(folder, "sample", *arguments)
    return np.array(open_samples(Workspace.open(str(folder / "workspace")), 12).images)


def test_shards_divide_the_images_without_overlap(
    images: np.ndarray,
) -> None:
    plan = shards(Sample(count=37, batch_size=10, shards=3))
    assert [(s.start, s.stop) for s in plan] == [(0, 10), (10, 20), (20, 37)]
    assert images.shape == (37, 8, 8, 1)
    assert len(np.unique(images.reshape(37, -1), axis=0)) == 37


def test_more_shards_than_images_leave_some_empty(trained: Path, images: np.ndarray) -> None:
    folder = new_workspace(trained, "many")
    assert np.array_equal(sampled(folder, "-S", "sample.shards=9"), images)
    empty = np.load(folder / "workspace/samples/step-00000012/shard-000-of-009.npy")
    assert empty.shape == (0, 8, 8, 1)


def test_one_worker_and_many_shards_draw_the_same_bytes(trained: Path, images: np.ndarray) -> None:
    folder = new_workspace(trained, "shards")
    for number in (2, 0):
        ddpm(folder, "sample", "--shard", f"{number}/4")
        with pytest.raises(Corrupt, match="no complete samples"):
            open_samples(Workspace.open(str(folder / "workspace")), 12)
    output = ddpm(folder, "sample", "--shard", "1/4")
    assert "still waits for shard-003-of-004" in output
    assert np.array_equal(sampled(folder, "--shard", "3/4"), images)


def test_killed_run_continues_from_its_chunks(trained: Path, images: np.ndarray) -> None:
    folder = new_workspace(trained, "killed")
    place = folder / "workspace/samples/step-00000012"
    process = start(folder, "sample", "-S", "sample.shards=1")
    assert wait_until(lambda: any(place.glob("parts-*/chunk-*")), process)
    process.send_signal(signal.SIGKILL)
    process.ended()
    assert np.array_equal(sampled(folder, "-S", "sample.shards=1"), images)
    assert not list(place.glob("parts-*/*"))


@pytest.mark.slow
def test_killed_shard_loses_at_most_one_batch(trained: Path) -> None:
    slow = settings("sample.shards=1", "sample.steps=25", "sample.batch_size=2", "sample.count=20")
    folder = new_workspace(trained, "bounded")
    place = folder / "workspace/samples/step-00000012"
    kept: dict[str, int] = {}
    for count in (3, 6):
        process = start(folder, "sample", *slow)
        assert wait_until(functools.partial(has_chunks, place, count), process)
        process.send_signal(signal.SIGKILL)
        process.ended()
        assert chunks(place).items() >= kept.items()  # the chunks of the killed run are kept
        kept = chunks(place)
    undisturbed = sampled(new_workspace(trained, "unbounded"), *slow)
    assert np.array_equal(sampled(folder, *slow), undisturbed)


def has_chunks(place: Path, count: int) -> bool:
    return len(chunks(place)) >= count


def chunks(place: Path) -> dict[str, int]:
    """Return the chunk files with their inodes, which change if a file is written again."""
    return {path.name: path.stat().st_ino for path in place.glob("parts-*/chunk-*")}


def test_workers_of_torchrun_draw_the_same_bytes(trained: Path, images: np.ndarray) -> None:
    folder = new_workspace(trained, "torchrun")
    together(folder, 3, "sample")
    assert np.array_equal(sampled(folder), images)


@pytest.mark.slow
def test_repeated_and_concurrent_shards_yield_each_image_once(
    trained: Path, images: np.ndarray
) -> None:
    folder = new_workspace(trained, "twice")
    for at_once in (["0/2", "0/2", "1/3"], ["1/2", "1/2", "0/2", "6/7"]):
        running = [start(folder, "sample", "--shard", shard) for shard in at_once]
        for process in running:
            output = process.ended()
            assert process.returncode == 0, output
    assert np.array_equal(sampled(folder, "--shard", "0/2"), images)
    for shard in range(7):
        ddpm(folder, "sample", "--shard", f"{shard}/7")
    assert np.array_equal(sampled(folder, "-S", "sample.shards=7"), images)


def test_samples_with_other_settings_are_redrawn(trained: Path) -> None:
    folder = new_workspace(trained, "anew")
    first = sampled(folder)
    assert "up to date" in ddpm(folder, "sample")
    output = ddpm(folder, "sample", "-S", "sample.seed=2")
    assert "Replacing the samples of step 12, which have different settings or weights" in output
    second = sampled(folder, "-S", "sample.seed=2")
    assert not np.array_equal(first, second)
    assert len(sampled(folder, "-S", "sample.count=5")) == 5


def test_damaged_shard_is_reported(trained: Path) -> None:
    folder = new_workspace(trained, "damaged")
    ddpm(folder, "sample")
    file = folder / "workspace/samples/step-00000012/shard-001-of-003.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(Corrupt, match="shard-001-of-003"):
        open_samples(Workspace.open(str(folder / "workspace")), 12)


def test_classes_are_the_requested_or_the_trained_ones(trained: Path) -> None:
    folder = new_workspace(trained, "classes")
    ddpm(folder, "sample", "-S", "sample.classes=['3', '7']", "-S", "sample.guidance=2")
    labels = open_samples(Workspace.open(str(folder / "workspace")), 12).labels
    assert labels is not None
    assert labels.tolist() == [3 if i % 2 == 0 else 7 for i in range(37)]
    drawn = open_samples(Workspace.open(str(trained / "whole/workspace")), 12).labels
    assert drawn is not None
    assert len(set(drawn.tolist())) > 4
    output = ddpm(folder, "sample", "-S", "sample.classes=[cat]", status=1)
    assert "sample.classes: got 'cat'; must be one of 0, 1, 2" in output


def test_png_files_are_written_on_request(trained: Path, images: np.ndarray) -> None:
    from PIL import Image

    folder = new_workspace(trained, "png")
    ddpm(folder, "sample", "-S", "sample.png=true")
    place = folder / "workspace/samples/step-00000012"
    assert len(list((place / "png").glob("*.png"))) == 37
    with Image.open(place / "png/000036.png") as opened:
        assert np.array_equal(np.asarray(opened), images[36, :, :, 0])
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["count"] == 37


def test_png_files_match_the_current_settings(
    trained: Path,
) -> None:
    folder = new_workspace(trained, "png-later")
    place = folder / "workspace/samples/step-00000012"

    def drawn(*given: str) -> dict[str, bytes]:
        ddpm(folder, "sample", *settings(*given))
        return {path.name: path.read_bytes() for path in place.glob("png/*")}

    assert drawn() == {}
    shards = {path: path.stat().st_mtime_ns for path in place.glob("shard*")}
    many = drawn("sample.png=true")
    assert len(many) == 37
    assert {path: path.stat().st_mtime_ns for path in place.glob("shard*")} == shards
    (place / "png/000007.png").unlink()
    (place / "grid.png").unlink()
    assert drawn("sample.png=true") == many and (place / "grid.png").is_file()
    assert "up to date" in ddpm(folder, "sample", "-S", "sample.png=true")
    assert "up to date" in ddpm(folder, "sample")  # existing PNGs do not matter without the setting
    few = drawn("sample.png=true", "sample.count=10", "sample.seed=5")
    assert sorted(few) == sorted(many)[:10]
    assert not set(few.values()) & set(many.values())


def test_checkpoint_needs_no_params_file(trained: Path, images: np.ndarray) -> None:
    folder = new_workspace(trained, "bare")
    write_params(folder, CLASSES.replace("channels: 8", "channels: 16").replace("50}", "60}"))
    assert np.array_equal(sampled(folder), images)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            settings("diffusion.timesteps=1000", "sample.steps=200"),
            "sample.steps: got 200; must be at most diffusion.timesteps, 50",
        ),
        (
            settings("model.conditioning=text", "sample.prompts=[a three]"),
            "sample.prompts: got ['a three']; requires model.conditioning text; it is class",
        ),
    ],
)
def test_settings_that_the_checkpoint_cannot_draw_are_reported(
    trained: Path, given: list[str], message: str
) -> None:
    folder = new_workspace(trained, message.partition(":")[0])
    output = ddpm(folder, "sample", *given, status=1)
    assert output.startswith("ddpm sample: The network cannot draw with these settings.")
    assert f"\n  {message}" in output and output.count("\n") == 2


def test_guidance_without_conditioning_is_rejected(trained: Path) -> None:
    folder = new_run(trained, "unguided", TINY)
    ddpm(folder, "train", *settings("train.steps=2"))
    output = ddpm(folder, "sample", *settings("sample.guidance=3"), status=1)
    expected = "must be 1 (no guidance) with model.conditioning none"
    assert f"sample.guidance: got 3.0; {expected}" in output


def test_params_that_cannot_train_can_sample_a_checkpoint(
    trained: Path,
) -> None:
    folder = new_workspace(trained, "other-params")
    given = settings("model.conditioning=none", "sample.classes=['3']", "sample.ema=0.9")
    given += settings("train.ema=[0.5]", "diffusion.timesteps=3")
    assert len(sampled(folder, *given)) == 37
    for verb in ("train", "run", "prepare", "status"):
        output = ddpm(folder, verb, *given, status=1)
        assert "3 problems" in output and "sample.classes: got ['3']; requires" in output, output


@pytest.mark.parametrize("wanted", ["[5]", "best"])
def test_missing_checkpoints_are_reported(trained: Path, wanted: str) -> None:
    folder = new_workspace(trained, f"absent{wanted}")
    output = ddpm(folder, "sample", "-S", f"sample.checkpoints={wanted}", status=1)
    assert "step 5 (available: 6, 8, 12)" in output or "best requires scores" in output


@pytest.mark.parametrize(
    "file", ["ema-0.9.safetensors", "model.safetensors", "config.json", "manifest.json"]
)
def test_damaged_checkpoint_is_skipped_and_reported(trained: Path, file: str) -> None:
    folder = new_run(trained, f"rotten-{file}", CLASSES)
    snapshots = folder / "workspace/snapshots"
    shutil.copytree(trained / "workspace/snapshots", snapshots)
    with (snapshots / "step-00000006" / file).open("a") as damaged:
        damaged.write("?")
    every = settings("sample.checkpoints=all")
    for _ in range(2):
        output = ddpm(folder, "sample", *every)
        assert "step-00000006" in output and "Skipping this checkpoint." in output
        assert "up to date" in ddpm(folder, "wait", "sample", *every)
    assert "up to date" in output and "Traceback" not in output
    assert len(open_samples(Workspace.open(str(folder / "workspace")), 12).images) == 37
    output = ddpm(folder, "sample", *settings("sample.checkpoints=[6, 12]"), status=1)
    assert "sample.checkpoints: all skips damaged checkpoints" in output


@pytest.mark.parametrize("text", ["3/3", "-1/2", "a/b", "1", "1/0", "", "1/2/3"])
def test_invalid_shard_arguments_are_rejected(text: str) -> None:
    with pytest.raises(UserError, match="must be I/N with I from 0 to N - 1"):
        parse_shard(text)
    with pytest.raises(UserError, match=r"sample\.shards: got 10{15}; must be at most 10{5}"):
        parse_shard(f"0/{10**15}")
    assert parse_shard("0/1") == (0, 1)
