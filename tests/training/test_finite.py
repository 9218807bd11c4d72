"""Non-finite values are refused wherever weights are read, sampled or written."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import spoil, write_checkpoint
from support.program import TINY, Program, ddpm, new_run, prepare_run, run_in, settings
from support.runs import bits, final, rows
from support.scored import row

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import load as params
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.registry.register import register
from ddpm_core.registry.serving import Served
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.scores import Row
from ddpm_core.storage.workspace import RESULTS, Workspace, snapshot_key
from ddpm_core.training import snapshot

NAN = float("nan")
WILD = ("train.optimizer.lr=1e30", "train.optimizer.warmup=0", "train.precision=fp32")
SNAPSHOT = "workspace/snapshots/step-00000008"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("prepared"), TINY)


def begun(prepared: Path, name: str, *given: str) -> Path:
    """Train a run with snapshots of steps 4, 6 and 8."""
    folder = new_run(prepared, name, TINY)
    ddpm(folder, "train", *settings("train.steps=8", *given))
    return folder


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_checkpoint_with_non_finite_weights_is_not_loaded(tmp_path: Path, value: float) -> None:
    folder = write_checkpoint(tmp_path / "it").folder
    spoil(folder, value)
    with pytest.raises(Corrupt, match=r"ema-0\.9\.safetensors.*values that are not finite"):
        Checkpoint.open(folder).load("auto", torch.device("cpu"))
    with pytest.raises(Corrupt, match="values that are not finite"):
        Served(folder)


def test_non_finite_weights_are_not_registered(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path / "run"))
    folder = write_checkpoint(workspace.path(snapshot_key(4))).folder
    spoil(folder, NAN)
    scored = row(5.0, weights=Checkpoint.open(folder).weights_hash(), seed=1)
    workspace.write_json(
        RESULTS, {"rows": [Row.model_validate({**scored, "step": 4}).with_checksum().plain()]}
    )
    config = params.validate({"workspace": workspace.uri, "tracking": {"uri": "http://absent"}})
    with pytest.raises(Corrupt, match="values that are not finite"):
        register(config, workspace)


@pytest.mark.slow
def test_snapshot_with_non_finite_weights_is_not_resumed(prepared: Path) -> None:
    whole = new_run(prepared, "whole", TINY)
    ddpm(whole, "train")
    folder = begun(prepared, "spoiled")
    spoil(folder / SNAPSHOT, NAN)
    said = ddpm(folder, "sample", *settings("sample.checkpoints=latest"), status=1)
    assert "step-00000008/ema-0.9.safetensors is damaged" in said
    said = ddpm(folder, "train")
    assert "A snapshot was skipped: step-00000008/" in said
    assert "resuming from step 6" in said
    assert bits(final(folder, 12)) == bits(final(whole, 12))
    assert ddpm(folder, "sample")


@pytest.mark.parametrize("given", [{"guidance": 1.0}, {"sampler": "ddim"}])
def test_sampler_refuses_non_finite_images(tmp_path: Path, given: dict[str, object]) -> None:
    checkpoint = write_checkpoint(tmp_path / "it")
    model = checkpoint.load("auto", torch.device("cpu"))
    chosen = checkpoint.params.sample.model_copy(update={"precision": "fp32", **given})
    sampler = ImageSampler(model, checkpoint.training_data, chosen, checkpoint.params.diffusion)
    assert sampler.images(range(3)).shape == (3, 8, 8, 1)
    model.conv_out.bias.fill_(1e38)
    model.conv_out.weight.fill_(1e38)  # finite weights with an infinite output
    with pytest.raises(UserError, match="3 of 3 images are not finite"):
        sampler.images(range(3))


def test_failing_first_step_names_the_snapshot_it_resumed_from(prepared: Path) -> None:
    folder = begun(prepared, "large")
    spoil(folder / SNAPSHOT, 1e38)
    said = ddpm(folder, "train", status=1)
    assert "The loss of step 9 is not finite" in said
    assert "the first step with the weights of the snapshot of step 8" in said
    assert "--from-step" in said
    for cause in ("is too high", "is too short", "clipping is off", "is complete"):
        assert cause not in said


def test_failing_first_step_names_train_init_and_moves_nothing(prepared: Path) -> None:
    folder = begun(prepared, "warm")
    origin = write_checkpoint(prepared / "origin").folder
    spoil(origin, 1e38)
    given = ("model.multipliers=[1, 2]", "model.attention=[4]", f"train.init={origin}")
    said = ddpm(folder, "train", *settings(*given), status=1)
    assert "The loss of step 1 is not finite" in said
    assert f"the first step with the weights of train.init {origin}" in said
    assert "The run with different settings in this workspace stays as it is." in said
    assert not (folder / "workspace/superseded").exists()


def test_steps_before_a_failure_are_logged_with_true_causes(prepared: Path) -> None:
    folder = new_run(prepared, "logged", TINY)
    given = (*WILD, "train.log_every=1000", "train.snapshot_every=1000", "train.steps=2000")
    said = ddpm(folder, "train", *settings(*given, "train.milestone_every=50"), status=1)
    [last] = rows(folder)
    assert (
        f"is not finite, after logged losses of {last['loss']:.3g}. There is no snapshot yet"
        in said
    )
    assert f"The loss of step {last['step'] + 1} " in said
    assert last["loss"] > 0.0 and last["grad_norm"] > 0.0
    assert "train.optimizer.lr 1e+30 is too high" in said
    assert "clipping is off" not in said and "precision" not in said
    said = ddpm(folder, "train", *settings(*given, "train.optimizer.clip=0"), status=1)
    assert "clipping is off (train.optimizer.clip 0)" in said


def test_failure_waits_for_the_snapshot_being_written(prepared: Path) -> None:
    folder = new_run(prepared, "slow", TINY)
    given = settings(*WILD, "train.log_every=1", "train.snapshot_every=1")
    program = Program(folder, ("train", *given), run_slowly)
    said = program.ended()
    assert program.returncode == 1, said
    assert "The snapshot of step 1 is complete. Nothing of the failure was saved." in said
    assert (folder / "workspace/snapshots/step-00000001").is_dir()


def run_slowly(folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    """Run with a disk on which writing takes longer than the next step."""
    save = snapshot.save_tensors

    def slow(*given: Any) -> None:
        time.sleep(0.3)
        save(*given)

    snapshot.save_tensors = slow
    run_in({}, folder, arguments, output)


def test_overflowing_weights_are_not_written(prepared: Path) -> None:
    """The loss of the step that spoils them is still finite."""
    folder = new_run(prepared, "overflow", TINY)
    given = ("train.optimizer.lr=1e39", "train.optimizer.warmup=0", "train.snapshot_every=1")
    said = ddpm(folder, "train", *settings(*given), status=1)
    assert "The weights after step 1 are not finite" in said
    assert not list(folder.glob("workspace/snapshots/*"))
    assert json.loads((folder / "workspace/log.jsonl").read_text())["step"] == 1
