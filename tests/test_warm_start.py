"""train.init: what another network knows is taken, what it does not is told in words of the params.

The other network is that of `models.write_checkpoint`, for the classes circle, square and 7.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import CLASSES, write_checkpoint

from ddpm_core import params
from ddpm_core.checkpoint import Checkpoint
from ddpm_core.errors import UserError
from ddpm_core.models.unet import UNet, UNetConfig
from ddpm_core.training.initial import initial_weights

HERE = UNetConfig(8, 1, 8, (1, 2), 1, (4,), conditioning="class", classes=3)
VECTORS = "condition.embedding.weight"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("other") / "class", "class")


Weights = dict[str, torch.Tensor]


def begun(other: Checkpoint, network: UNetConfig, classes: list[str]) -> tuple[Weights, str]:
    """The weights of a network that begins with the other one, and what is told of them."""
    model = UNet(network)
    told = initial_weights(model, params.load(None, [f"train.init={other.folder}"]), classes)
    return model.state_dict(), told


def fresh(network: UNetConfig) -> Weights:
    model = UNet(network)
    initial_weights(model, params.load())
    return model.state_dict()


def of(other: Checkpoint) -> Weights:
    return other.load("auto", torch.device("cpu")).state_dict()


def test_the_same_classes_are_taken_whole_and_nothing_is_told(other: Checkpoint) -> None:
    weights, told = begun(other, HERE, CLASSES)
    assert told == ""
    assert all(torch.equal(weights[name], tensor) for name, tensor in of(other).items())


def test_other_classes_start_anew_but_those_of_the_same_name(other: Checkpoint) -> None:
    network, there = replace(HERE, classes=2), of(other)
    weights, told = begun(other, network, ["7", "triangle"])
    assert told == (
        "train.init: 3 classes there, 2 here: their vectors start anew, but those of 7."
    )
    seven, triangle, none = weights[VECTORS]
    assert torch.equal(seven, there[VECTORS][CLASSES.index("7")])
    assert torch.equal(triangle, fresh(network)[VECTORS][1])
    assert torch.equal(none, there[VECTORS][-1])
    assert all(torch.equal(weights[name], there[name]) for name in there.keys() - {VECTORS})


def test_as_many_classes_of_other_names_are_taken_in_their_order(other: Checkpoint) -> None:
    weights, told = begun(other, HERE, ["a", "b", "c"])
    assert torch.equal(weights[VECTORS], of(other)[VECTORS])
    assert "taken in their order" in told


def test_all_but_the_classes_is_taken_where_there_are_none(other: Checkpoint) -> None:
    weights, told = begun(other, replace(HERE, conditioning="none", classes=0), [])
    assert told == "train.init: model.conditioning is class there, none here: all else is taken."
    assert all(torch.equal(tensor, of(other)[name]) for name, tensor in weights.items())


def test_another_network_is_refused_in_words_of_the_settings(other: Checkpoint) -> None:
    wide = replace(HERE, in_channels=3, channels=16, multipliers=(1, 2, 2), attention=(8, 2))
    with pytest.raises(UserError, match=r"another network than the settings ask for") as caught:
        begun(other, wide, CLASSES)
    assert str(caught.value).splitlines()[1:] == [
        "  prepare.channels is 1 there, 3 here",
        "  model.channels is 8 there, 16 here",
        "  model.multipliers is [1, 2] there, [1, 2, 2] here",
        "  model.attention is [4] for 8 pixels there, [2, 8] for 8 pixels here",
    ]
    # Images of twice the size are no other network, where attention is at the same levels.
    assert begun(other, replace(HERE, image_size=16, attention=(8,)), CLASSES)[1] == ""
