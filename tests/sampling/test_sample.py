"""Image i is the same everywhere: whoever draws it, after whatever interruption."""

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


def test_37_images_in_batches_of_10_on_3_shards_none_twice_none_missing(
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
    said = ddpm(folder, "sample", "--shard", "1/4")
    assert "still waits for shard-003-of-004" in said
    assert np.array_equal(sampled(folder, "--shard", "3/4"), images)


def test_a_killed_run_goes_on_with_the_chunks_it_has(trained: Path, images: np.ndarray) -> None:
    folder = new_workspace(trained, "killed")
    place = folder / "workspace/samples/step-00000012"
    process = start(folder, "sample", "-S", "sample.shards=1")
    assert wait_until(lambda: any(place.glob("parts-*/chunk-*")), process)
    process.send_signal(signal.SIGKILL)
    process.ended()
    assert np.array_equal(sampled(folder, "-S", "sample.shards=1"), images)
    assert not list(place.glob("parts-*/*"))


def test_a_killed_shard_loses_one_batch_at_most(trained: Path) -> None:
    slow = settings("sample.shards=1", "sample.steps=25", "sample.batch_size=2", "sample.count=20")
    folder = new_workspace(trained, "bounded")
    place = folder / "workspace/samples/step-00000012"
    kept: dict[str, int] = {}
    for count in (3, 6):
        process = start(folder, "sample", *slow)
        assert wait_until(functools.partial(has_chunks, place, count), process)
        process.send_signal(signal.SIGKILL)
        process.ended()
        assert chunks(place).items() >= kept.items()  # those of the killed run, not drawn anew
        kept = chunks(place)
    undisturbed = sampled(new_workspace(trained, "unbounded"), *slow)
    assert np.array_equal(sampled(folder, *slow), undisturbed)


def has_chunks(place: Path, count: int) -> bool:
    return len(chunks(place)) >= count


def chunks(place: Path) -> dict[str, int]:
    """The files of chunks that are on disk, each with what changes if it is written again."""
    return {path.name: path.stat().st_ino for path in place.glob("parts-*/chunk-*")}


def test_workers_of_torchrun_draw_the_same_bytes(trained: Path, images: np.ndarray) -> None:
    folder = new_workspace(trained, "torchrun")
    together(folder, 3, "sample")
    assert np.array_equal(sampled(folder), images)


def test_shards_drawn_twice_at_once_or_in_other_numbers_double_and_omit_nothing(
    trained: Path, images: np.ndarray
) -> None:
    folder = new_workspace(trained, "twice")
    for at_once in (["0/2", "0/2", "1/3"], ["1/2", "1/2", "0/2", "6/7"]):
        running = [start(folder, "sample", "--shard", shard) for shard in at_once]
        for process in running:
            said = process.ended()
            assert process.returncode == 0, said
    assert np.array_equal(sampled(folder, "--shard", "0/2"), images)
    for shard in range(7):
        ddpm(folder, "sample", "--shard", f"{shard}/7")
    assert np.array_equal(sampled(folder, "-S", "sample.shards=7"), images)


def test_samples_of_other_weights_or_settings_are_drawn_anew(trained: Path) -> None:
    folder = new_workspace(trained, "anew")
    first = sampled(folder)
    assert "up to date" in ddpm(folder, "sample")
    said = ddpm(folder, "sample", "-S", "sample.seed=2")
    assert "The samples of step 12 are of other settings or weights, and are replaced" in said
    second = sampled(folder, "-S", "sample.seed=2")
    assert not np.array_equal(first, second)
    assert len(sampled(folder, "-S", "sample.count=5")) == 5


def test_a_damaged_shard_is_named(trained: Path) -> None:
    folder = new_workspace(trained, "damaged")
    ddpm(folder, "sample")
    file = folder / "workspace/samples/step-00000012/shard-001-of-003.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(Corrupt, match="shard-001-of-003"):
        open_samples(Workspace.open(str(folder / "workspace")), 12)


def test_classes_are_those_asked_for_or_as_frequent_as_in_training(trained: Path) -> None:
    folder = new_workspace(trained, "classes")
    ddpm(folder, "sample", "-S", "sample.classes=['3', '7']", "-S", "sample.guidance=2")
    labels = open_samples(Workspace.open(str(folder / "workspace")), 12).labels
    assert labels is not None
    assert labels.tolist() == [3 if i % 2 == 0 else 7 for i in range(37)]
    drawn = open_samples(Workspace.open(str(trained / "whole/workspace")), 12).labels
    assert drawn is not None
    assert len(set(drawn.tolist())) > 4
    said = ddpm(folder, "sample", "-S", "sample.classes=[cat]", status=1)
    assert "'cat' given; the model knows 0, 1, 2" in said


def test_png_files_are_written_where_asked(trained: Path, images: np.ndarray) -> None:
    from PIL import Image

    folder = new_workspace(trained, "png")
    ddpm(folder, "sample", "-S", "sample.png=true")
    place = folder / "workspace/samples/step-00000012"
    assert len(list((place / "png").glob("*.png"))) == 37
    with Image.open(place / "png/000036.png") as picture:
        assert np.array_equal(np.asarray(picture), images[36, :, :, 0])
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["count"] == 37


def test_png_files_are_those_of_the_present_settings_whenever_they_are_asked_for(
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
    assert "up to date" in ddpm(folder, "sample")  # asked for or not, they do no harm
    few = drawn("sample.png=true", "sample.count=10", "sample.seed=5")
    assert sorted(few) == sorted(many)[:10]
    assert not set(few.values()) & set(many.values())


def test_a_checkpoint_is_read_without_its_params_file(trained: Path, images: np.ndarray) -> None:
    folder = new_workspace(trained, "bare")
    write_params(folder, CLASSES.replace("channels: 8", "channels: 16").replace("50}", "60}"))
    assert np.array_equal(sampled(folder), images)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            settings("diffusion.timesteps=1000", "sample.steps=200"),
            "sample.steps: 200 given; the checkpoint was trained with 50 timesteps",
        ),
        (
            settings("model.conditioning=text", "sample.prompts=[a three]"),
            "sample.prompts: given; the checkpoint was trained with model.conditioning class",
        ),
    ],
)
def test_what_the_checkpoint_cannot_draw_is_one_sentence_whatever_the_params_say(
    trained: Path, given: list[str], told: str
) -> None:
    folder = new_workspace(trained, told.partition(":")[0])
    said = ddpm(folder, "sample", *given, status=1)
    assert said.startswith(f"ddpm sample: {told}") and said.count("\n") == 1


def test_guidance_that_can_not_work_is_refused(trained: Path) -> None:
    folder = new_run(trained, "unguided", TINY)
    ddpm(folder, "train", *settings("train.steps=2"))
    said = ddpm(folder, "sample", *settings("sample.guidance=3"), status=1)
    assert "sample.guidance: 3 given; the checkpoint was trained with model.conditioning" in said


def test_params_that_could_not_train_so_still_sample_a_checkpoint_that_can(
    trained: Path,
) -> None:
    folder = new_workspace(trained, "other-params")
    given = settings("model.conditioning=none", "sample.classes=['3']", "sample.ema=0.9")
    given += settings("train.ema=[0.5]", "diffusion.timesteps=3")
    assert len(sampled(folder, *given)) == 37
    for verb in ("train", "run", "prepare", "status"):
        said = ddpm(folder, verb, *given, status=1)
        assert "3 problems" in said and "sample.classes: got ['3']; requires" in said, said


@pytest.mark.parametrize("wanted", ["[5]", "best"])
def test_checkpoints_that_are_not_there_are_named(trained: Path, wanted: str) -> None:
    folder = new_workspace(trained, f"absent{wanted}")
    said = ddpm(folder, "sample", "-S", f"sample.checkpoints={wanted}", status=1)
    assert "step 5 (there: 6, 8, 12)" in said or "nothing is scored yet" in said


@pytest.mark.parametrize(
    "file", ["ema-0.9.safetensors", "model.safetensors", "config.json", "manifest.json"]
)
def test_a_damaged_checkpoint_is_left_out_of_all_and_named(trained: Path, file: str) -> None:
    folder = new_run(trained, f"rotten-{file}", CLASSES)
    snapshots = folder / "workspace/snapshots"
    shutil.copytree(trained / "workspace/snapshots", snapshots)
    with (snapshots / "step-00000006" / file).open("a") as damaged:
        damaged.write("?")
    every = settings("sample.checkpoints=all")
    for _ in range(2):
        said = ddpm(folder, "sample", *every)
        assert "step-00000006" in said and "The checkpoint is left out." in said
        assert "up to date" in ddpm(folder, "wait", "sample", *every)
    assert "up to date" in said and "Traceback" not in said
    assert len(open_samples(Workspace.open(str(folder / "workspace")), 12).images) == 37
    said = ddpm(folder, "sample", *settings("sample.checkpoints=[6, 12]"), status=1)
    assert "sample.checkpoints: all leaves out what is damaged" in said


@pytest.mark.parametrize("text", ["3/3", "-1/2", "a/b", "1", "1/0", "", "1/2/3"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="I/N is needed"):
        parse_shard(text)
    with pytest.raises(UserError, match=r"sample\.shards: got 10{15}; must be at most 10{5}"):
        parse_shard(f"0/{10**15}")
    assert parse_shard("0/1") == (0, 1)
