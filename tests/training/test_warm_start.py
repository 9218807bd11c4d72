"""train.init takes the weights of another network, and names the settings that do not match.

The other network is that of `models.write_checkpoint`, for the classes circle, square and 7.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import CLASSES, write_checkpoint

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import Config, Diffusion
from ddpm_core.config import load as params
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.interop.checkpoints import import_checkpoint
from ddpm_core.interop.diffusers import export_folder
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.storage import seal
from ddpm_core.storage.files import read_tensors, save_tensors
from ddpm_core.storage.workspace import Workspace
from ddpm_core.training.dry_run import describe
from ddpm_core.training.identity import differences, identity
from ddpm_core.training.init import Origin, initial_weights, take_weights

HERE = UNetConfig(8, 1, 8, (1, 2), 1, (4,), conditioning="class", classes=3)
VECTORS = "condition.embedding.weight"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("other") / "class", "class")


Weights = dict[str, torch.Tensor]


SAME = ("diffusion.timesteps=50",)


def begun(
    other: Checkpoint, network: UNetConfig, classes: list[str], *given: str
) -> tuple[Weights, str]:
    """Return the initial weights of a network with train.init, and the note on them."""
    model = UNet(network)
    config = params.load(None, [f"train.init={other.folder}", *(given or SAME)])
    return model.state_dict(), initial_weights(model, config, classes)


def fresh(network: UNetConfig) -> Weights:
    model = UNet(network)
    initial_weights(model, params.load())
    return model.state_dict()


def of(other: Checkpoint) -> Weights:
    return other.load("auto", torch.device("cpu")).state_dict()


def test_warm_start_with_equal_classes_takes_all_weights(other: Checkpoint) -> None:
    weights, told = begun(other, HERE, CLASSES)
    assert told == ""
    assert all(torch.equal(weights[name], tensor) for name, tensor in of(other).items())


def test_warm_start_keeps_vectors_of_classes_by_name(other: Checkpoint) -> None:
    network, there = replace(HERE, classes=2), of(other)
    weights, told = begun(other, network, ["7", "triangle"])
    assert told == (
        "train.init: it has 3 classes, this run has 2. The vectors of the classes start from "
        "random values, except 7."
    )
    seven, triangle, none = weights[VECTORS]
    assert torch.equal(seven, there[VECTORS][CLASSES.index("7")])
    assert torch.equal(triangle, fresh(network)[VECTORS][1])
    assert torch.equal(none, there[VECTORS][-1])
    assert all(torch.equal(weights[name], there[name]) for name in there.keys() - {VECTORS})


def test_warm_start_takes_renamed_classes_in_order(other: Checkpoint) -> None:
    weights, told = begun(other, HERE, ["a", "b", "c"])
    assert torch.equal(weights[VECTORS], of(other)[VECTORS])
    assert "using them in order" in told


def test_warm_start_without_classes_takes_the_rest(other: Checkpoint) -> None:
    weights, told = begun(other, replace(HERE, conditioning="none", classes=0), [])
    assert told == (
        "train.init: model.conditioning is class in train.init, none in this run. All other "
        "weights are used."
    )
    assert all(torch.equal(tensor, of(other)[name]) for name, tensor in weights.items())


def test_warm_start_adds_or_drops_cross_attention(tmp_path: Path) -> None:
    """Its last layers start at zero, so adding it does not change what the network computes."""
    origin = write_checkpoint(tmp_path / "text", "text")
    pooled = replace(HERE, conditioning="text", classes=0)
    tokens = replace(pooled, cross_attention=True)
    weights, told = begun(origin, tokens, [])
    assert told == (
        "train.init: model.cross_attention is False in train.init, True in this run; its weights "
        "start from random values."
    )
    assert all(torch.equal(weights[name], tensor) for name, tensor in of(origin).items())
    assert not any(t.any() for name, t in weights.items() if ".cross.out." in name)
    other = write_checkpoint(tmp_path / "tokens", "text", cross_attention=True)
    for network in (pooled, HERE):
        weights, told = begun(other, network, CLASSES)
        assert "in train.init" in told and torch.equal(
            weights["conv_in.weight"], of(other)["conv_in.weight"]
        )


def test_warm_start_with_or_without_augmentation(other: Checkpoint) -> None:
    """Only training uses the weights for its parameters: without `edm` they are dropped."""
    network, extra = replace(HERE, augmentation=14), "augmentation.weight"
    weights, told = begun(other, network, CLASSES)
    assert told == (
        "train.init: the weights for the parameters of train.augment start from random values."
    )
    assert torch.equal(weights.pop(extra), fresh(network)[extra])
    assert all(torch.equal(tensor, of(other)[name]) for name, tensor in weights.items())
    origin = Origin(network, {}, {**of(other), extra: torch.ones(32, 14)}, CLASSES)
    for wanted in (HERE, network):
        model = UNet(wanted)
        assert take_weights(model, origin, CLASSES) == ""
        taken = model.state_dict()
        assert all(torch.equal(tensor, origin.weights[name]) for name, tensor in taken.items())


def test_warm_start_names_network_settings_that_differ(other: Checkpoint) -> None:
    wide = replace(HERE, in_channels=3, channels=16, multipliers=(1, 2, 2), attention=(8, 2))
    with pytest.raises(UserError, match=r"has different settings") as caught:
        begun(other, replace(wide, heads=2), CLASSES)
    *lines, advice = str(caught.value).splitlines()[1:]
    assert lines == [
        "  prepare.channels is 1 in train.init, 3 in this run",
        "  model.channels is 8 in train.init, 16 in this run",
        "  model.multipliers is [1, 2] in train.init, [1, 2, 2] in this run",
        "  model.heads is 1 in train.init, 2 in this run",
        "  model.attention is [4] in train.init, [2, 8] in this run",
    ]
    assert "-S prepare.channels=1 -S model.channels=8 -S 'model.multipliers=[1, 2]'" in advice
    # The image size may differ, as long as attention is on the same levels.
    assert begun(other, replace(HERE, image_size=16, attention=(8,)), CLASSES)[1] == ""


@pytest.fixture(scope="module", params=["snapshot", "diffusers"])
def noise(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that predicts noise under the linear schedule, in 1000 timesteps."""
    folder = tmp_path_factory.mktemp("noise")
    model = UNet(UNetConfig(8, 3, 128, (1, 1), 1, (4,)))
    initial_weights(model, params.load())
    export_folder(
        model,
        Diffusion(schedule="linear", timesteps=1000, prediction="noise"),
        folder / "diffusers",
    )
    if request.param == "diffusers":
        return folder / "diffusers"
    import_checkpoint(folder / "diffusers", folder / "snapshot")
    return folder / "snapshot"


def like_noise(init: Path, *given: str) -> Config:
    network = ("model.channels=128", "model.multipliers=[1, 1]", "model.attention=[4]")
    return params.load(None, [f"train.init={init}", "prepare.image_size=8", *network, *given])


def test_warm_start_names_diffusion_settings_to_copy(noise: Path, tmp_path: Path) -> None:
    config = like_noise(noise, "prepare.source=photos", "diffusion.timesteps=500")
    model = UNet(UNetConfig(8, 3, 128, (1, 1), 1, (4,)))
    for attempt in (
        lambda: initial_weights(model, config),
        lambda: describe(config, Workspace.open(str(tmp_path / "absent")), 1),  # --dry-run
    ):
        with pytest.raises(UserError, match=r"has different settings") as caught:
            attempt()
        *lines, advice = str(caught.value).splitlines()[1:]
        assert sorted(lines) == [
            "  diffusion.prediction is noise in train.init, v in this run",
            "  diffusion.schedule is linear in train.init, cosine in this run",
            "  diffusion.timesteps is 1000 in train.init, 500 in this run",
        ]
        copied = [word for word in advice.split() if word.startswith("diffusion.")]
        found = like_noise(noise, *(word.rstrip(";") for word in copied))
        assert initial_weights(model, found) == ""
    allowed = like_noise(noise, "train.init_diffusion=any")
    assert "diffusion.prediction is noise in train.init, v in this run" in initial_weights(
        model, allowed
    )


def test_dry_run_names_the_network_of_train_init(noise: Path, tmp_path: Path) -> None:
    same = ("diffusion.prediction=noise", "diffusion.schedule=linear", "prepare.source=photos")
    told = describe(like_noise(noise, *same), Workspace.open(str(tmp_path / "absent")), 1)
    assert f"starts with the weights of {noise}." in told


def test_init_diffusion_is_not_part_of_the_identity() -> None:
    both = [
        identity(params.load(None, given), "data") for given in ([], ["train.init_diffusion=any"])
    ]
    assert differences(*both) == []


def test_warm_start_refuses_non_finite_weights(noise: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(noise, folder)
    [file] = folder.rglob("*.safetensors")
    tensors = read_tensors(file)
    tensors["conv_in.weight"][0, 0, 0, 0] = torch.nan
    save_tensors(tensors, file)
    if (folder / "manifest.json").exists():
        (folder / "manifest.json").unlink()
        seal(folder)
    model = UNet(UNetConfig(8, 3, 128, (1, 1), 1, (4,)))
    with pytest.raises(Corrupt, match=r"conv_in\.weight has values that are not finite"):
        initial_weights(model, like_noise(folder, "diffusion.prediction=noise"))
