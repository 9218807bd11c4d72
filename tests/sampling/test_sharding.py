"""Shards in any number and order yield each image once, and missing ones are reported."""

from __future__ import annotations

import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import write_checkpoint
from support.strangers import ALONE, CPU, STEP, Strangers

from ddpm_core.config import Config, Sample
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.evaluation.evaluate import evaluate
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling import gather, plan
from ddpm_core.sampling.freshness import stale
from ddpm_core.sampling.plan import Recipe
from ddpm_core.sampling.run import Drawer, sample
from ddpm_core.sampling.shards import ShardStore
from ddpm_core.storage import LocalStorage
from ddpm_core.storage.workspace import Workspace, samples_key, snapshot_key


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Strangers:
    return Strangers(tmp_path_factory.mktemp("sharding"))


@pytest.fixture(scope="module")
def config(strangers: Strangers) -> Config:
    """Return settings for 37 images in batches of 10."""
    return with_sample(strangers.config, count=37, batch_size=10, shards=1)


@pytest.fixture
def workspace(strangers: Strangers) -> Workspace:
    """Return a workspace without samples."""
    shutil.rmtree(folder(strangers.workspace), ignore_errors=True)
    return strangers.workspace


@pytest.fixture(scope="module")
def images(strangers: Strangers, config: Config) -> np.ndarray:
    shutil.rmtree(folder(strangers.workspace), ignore_errors=True)
    sample(config, strangers.workspace, ALONE)
    return gathered(strangers.workspace)


def with_sample(config: Config, **changes: object) -> Config:
    return config.model_copy(update={"sample": config.sample.model_copy(update=changes)})


def folder(workspace: Workspace) -> Path:
    return workspace.path(samples_key(STEP))


RECIPE: dict[str, Any] = {
    "step": 4,
    "count": 500,
    "batch_size": 250,
    "weights": "ab" * 32,
    "sampler": {"sampler": "dpmpp", "steps": 20, "guidance": 2.0, "classes": ["caf\udce9"]},
    "seed": 1,
    "data_fingerprint": "0123456789abcdef",
    "train_fingerprint": "fedcba9876543210",
    "image_size": 16,
    "channels": 1,
    "classes": ["caf\udce9", "7"],  # a name that is not UTF-8
}


def gathered(workspace: Workspace) -> np.ndarray:
    return np.array(gather.open_samples(workspace, STEP).images)


def recipe(config: Config, workspace: Workspace) -> Recipe:
    [checkpoint] = plan.look_at_chosen(config, workspace)
    return plan.make_recipe(config, checkpoint, "fp32")


def parts_of(config: Config, workspace: Workspace) -> ShardStore:
    return ShardStore(workspace, recipe(config, workspace))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_workers_share_one_shard_in_any_order(
    config: Config, workspace: Workspace, images: np.ndarray, ranks: int
) -> None:
    order = random.Random(ranks).sample(range(ranks), ranks)
    for number, rank in enumerate(order):
        assert not gather.complete(workspace, recipe(config, workspace))
        sample(config, workspace, World(rank, ranks, CPU))
        drawn = number + 1 == ranks or list(folder(workspace).glob("parts-*/chunk-*"))
        assert drawn or rank >= 4  # there are four chunks
    assert np.array_equal(gathered(workspace), images)


@pytest.mark.parametrize("seed", range(4))
def test_shards_in_any_number_and_order_yield_each_image_once(
    config: Config, workspace: Workspace, images: np.ndarray, seed: int
) -> None:
    random_ = random.Random(seed)
    wanted = random_.choice([1, 3, 4, 7])
    last = [(number, wanted) for number in random_.sample(range(wanted), wanted)]
    others = [(random_.randrange(of), of) for of in random_.choices([2, 3, 4, 5, 7], k=3)]
    for shard in [*others, *last, *others]:
        sample(config, workspace, ALONE, shard)
    assert np.array_equal(gathered(workspace), images), f"{others} {last}"
    listed = gather.open_samples(workspace, STEP).manifest.shards
    assert len(listed) == len({name[-7:] for name in listed}) * int(listed[0][-7:-4])


def test_intact_chunks_of_a_killed_worker_are_reused(
    config: Config, workspace: Workspace, images: np.ndarray
) -> None:
    parts = parts_of(config, workspace)
    marked = np.zeros_like(images[:10])
    parts.write_chunk(1, marked)
    parts.write_chunk(2, marked)
    [damaged] = folder(workspace).glob("parts-*/chunk-000002")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    sample(config, workspace, ALONE)
    found = gathered(workspace)
    assert np.array_equal(found[10:20], marked)
    assert np.array_equal(np.delete(found, range(10, 20), 0), np.delete(images, range(10, 20), 0))


def test_concurrent_gathering_writes_one_complete_manifest(
    config: Config, workspace: Workspace, images: np.ndarray
) -> None:
    """Some threads list three shards and some two; all five exist."""
    for of in (3, 2):
        for number in range(of):
            sample(config, workspace, ALONE, (number, of))
        (folder(workspace) / "manifest.json").unlink()
    several = [with_sample(config, shards=of) for of in (3, 2, 3, 2, 3, 2)]
    facts, done = recipe(config, workspace), []
    threads = [
        threading.Thread(
            target=lambda each=each: done.append(gather.try_gather(each, workspace, facts))
        )
        for each in several
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * len(several)
    assert gather.complete(workspace, facts, thorough=True)
    assert np.array_equal(gathered(workspace), images)


def test_missing_and_damaged_shards_are_reported_and_redrawn(
    config: Config,
    workspace: Workspace,
    images: np.ndarray,
    capsys: pytest.CaptureFixture[str],
) -> None:
    four = with_sample(config, shards=4)
    assert "no samples with these settings" in str(stale(four, workspace))
    for number in (3, 1):
        sample(four, workspace, ALONE, (number, 4))
    waits = "still waits for shard-000-of-004, shard-002-of-004."
    assert waits in capsys.readouterr().err.replace("\n", " ")
    # Jobs may have another number of shards than the settings.
    assert f"step {STEP}: missing shard-000-of-004, shard-002-of-004" in str(
        stale(config, workspace)
    )
    shard = folder(workspace) / "shard-001-of-004.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert "shard-001-of-004 (damaged)" in str(stale(four, workspace))
    sample(four, workspace, ALONE)
    assert np.array_equal(gathered(workspace), images)
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    sample(four, workspace, ALONE)
    assert np.array_equal(gathered(workspace), images)
    other = with_sample(four, seed=9)
    found = gather.waiting(workspace, recipe(other, workspace), plan.shards(other.sample))
    assert found.count("(different settings)") == 4


def test_starting_other_settings_removes_the_old_manifest(
    config: Config, workspace: Workspace, images: np.ndarray
) -> None:
    two = with_sample(config, shards=2)
    sample(two, workspace, ALONE)
    sample(with_sample(two, seed=9), workspace, ALONE, (0, 2))
    assert not (folder(workspace) / "manifest.json").exists()
    sample(two, workspace, ALONE)
    assert np.array_equal(gathered(workspace), images)


def test_images_of_other_settings_are_never_listed(
    config: Config, workspace: Workspace, images: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another `ddpm sample` draws and gathers while this one writes its PNGs."""
    with_png, other = with_sample(config, png=True), with_sample(config, seed=9)
    write = LocalStorage.write

    def slow(storage: LocalStorage, key: str, data: bytes) -> None:
        if key.endswith("000011.png"):
            monkeypatch.setattr(LocalStorage, "write", write)
            sample(other, workspace, ALONE)
        write(storage, key, data)

    monkeypatch.setattr(LocalStorage, "write", slow)
    with pytest.raises(
        UserError, match=r"\(different settings\). Another `ddpm sample` is running"
    ):
        sample(with_png, workspace, ALONE)
    assert gather.open_samples(workspace, STEP).manifest.seed == 9
    assert not np.array_equal(gathered(workspace), images)
    sample(with_png, workspace, ALONE)
    assert np.array_equal(gathered(workspace), images)


def test_shard_replaced_at_the_last_moment_is_detected(
    config: Config, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = gather._write_manifest

    def late(*arguments: Any) -> None:
        shard = folder(workspace) / "shard-000-of-001.npy"
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        written(*arguments)

    monkeypatch.setattr(gather, "_write_manifest", late)
    sample(config, workspace, ALONE)
    with pytest.raises(Corrupt, match=r"shard-000-of-001.npy is missing or was changed"):
        gather.open_samples(workspace, STEP)


def test_manifest_with_changed_settings_is_rejected(
    config: Config, workspace: Workspace, images: np.ndarray
) -> None:
    sample(config, workspace, ALONE)
    manifest = folder(workspace) / "manifest.json"
    written = manifest.read_text()
    for change in ({"seed": 7}, {"sampler": {**json.loads(written)["sampler"], "steps": 50}}):
        manifest.write_text(json.dumps({**json.loads(written), **change}))
        with pytest.raises(Corrupt, match="its fingerprint does not match its settings"):
            gather.open_samples(workspace, STEP)
        assert not gather.complete(workspace, recipe(config, workspace))
    sample(config, workspace, ALONE)
    assert manifest.read_text() == written
    assert np.array_equal(gathered(workspace), images)


def test_truncated_grid_is_rebuilt(config: Config, workspace: Workspace) -> None:
    sample(config, workspace, ALONE)
    file = folder(workspace) / "grid.png"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "the shards are complete, but not gathered" in str(stale(config, workspace))
    sample(config, workspace, ALONE)
    assert file.read_bytes() == whole


def test_unused_sampler_settings_redraw_nothing(config: Config, workspace: Workspace) -> None:
    fingerprints = [
        recipe(with_sample(config, **changes), workspace).samples_fingerprint
        for changes in (
            {},
            {"eta": 0.5, "spacing": "quadratic"},
            {"steps": config.sample.steps + 1},
        )
    ]
    assert config.sample.sampler == "dpmpp"
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "56691f02ddbce928"),
        ({"compiled": True}, "7385391618a16a68"),
        ({"later": [1, "x"], "png": True}, "ef6d7891bdf07755"),
    ],
)
def test_fingerprint_of_a_recipe_is_that_of_earlier_versions(
    changes: dict[str, Any], expected: str
) -> None:
    """A default, or a field of another version, must not be added to or lost from the facts."""
    facts = {**RECIPE, **changes}
    assert Recipe(**facts).fingerprint() == expected
    assert Recipe(**facts).plain() == facts


def test_checkpoint_removed_while_sampling_is_skipped(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workspace = Workspace.open(str(tmp_path))
    for step in (4, 8):
        write_checkpoint(workspace.path(snapshot_key(step)), step=step)
    train = config.train.model_copy(update={"milestone_every": 4})
    every = with_sample(config, checkpoints="all", count=2, batch_size=2)
    every = every.model_copy(update={"train": train})
    draw = Drawer.draw

    def pruned(drawer: Drawer, *arguments: Any) -> None:
        if drawer.recipe.step == 4:
            workspace.storage.remove(snapshot_key(4))
        draw(drawer, *arguments)

    monkeypatch.setattr(Drawer, "draw", pruned)
    sample(every, workspace, ALONE)
    message = "The checkpoint of step 4 was removed while it was sampled"
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert gather.open_samples(workspace, 8)
    write_checkpoint(workspace.path(snapshot_key(4)), step=4)
    with pytest.raises(UserError, match=f"{message}. Run `ddpm sample`"):
        sample(with_sample(every, checkpoints=(4, 8)), workspace, ALONE)


def test_leftovers_of_a_killed_verb_are_removed(config: Config, workspace: Workspace) -> None:
    for verb, place in ((sample, "samples"), (evaluate, "evaluation")):
        left = workspace.path(f"{place}/.reference.0123abcd.ddpm-staged")
        left.mkdir(parents=True)
        if verb is sample:
            sample(config, workspace, ALONE)
        else:
            shutil.rmtree(workspace.path("samples"))
            with pytest.raises(UserError, match="no samples"):
                evaluate(config, workspace)
        assert not left.exists()


def test_out_of_memory_names_the_setting_to_change(config: Config, workspace: Workspace) -> None:
    with pytest.raises(UserError, match=f"Out of memory with sample.batch_size {2**50}: lower it"):
        sample(with_sample(config, batch_size=2**50), workspace, ALONE)


def test_truncated_prompts_are_reported(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace.open(str(tmp_path))
    write_checkpoint(workspace.path(snapshot_key(4)), "text")
    given = with_sample(config, count=2, batch_size=2, prompts=("a three", "é" * 33))
    sample(given, workspace, ALONE)
    output = capsys.readouterr().err.replace("\n", " ")
    assert f"sample.prompts: '{'é' * 33}' is longer than 64 bytes" in output
    assert output.count("longer than") == 1


def test_guidance_without_effect_is_rejected() -> None:
    guided = Sample(guidance=3.0, steps=4)
    for conditioning, drop, message in (
        ("none", 0.1, "model.conditioning none"),
        ("class", 0.0, "train.label_drop 0"),
    ):
        with pytest.raises(UserError, match=f"sample.guidance: got 3.0; must be 1 .*{message}"):
            plan.must_suit(guided, conditioning, 50, drop)
        plan.must_suit(Sample(steps=4), conditioning, 50, drop)
    plan.must_suit(guided, "text", 50, 0.1)
