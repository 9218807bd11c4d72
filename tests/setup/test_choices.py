"""Each choice of init follows from facts, and has a reason with the numbers that decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.data.check import DataReport
from ddpm_core.setup import choices
from ddpm_core.setup.choices import CHOICES, choose
from ddpm_core.setup.init import nested
from ddpm_core.setup.machine import Measured
from ddpm_core.setup.mirror import Mirror
from ddpm_core.setup.networks import NETWORKS
from ddpm_core.setup.plan import BESIDE_STEPS, CHECKPOINTS, PASSES, SAMPLING, Facts, Plan

# A step of 0.2 s, 1 ms to evaluate the network for an image, 1 GB and 10 MB for each image.
MEASURED = Measured(1_100_000, 0.2, 0.001, 1e9, 10_000_000)
CLASSES = {"cat": 600, "dog": 400}


def report(classes: Mapping[str, int] = CLASSES, **facts: Any) -> DataReport:
    splits = {"undecided": dict(classes)}
    colors = np.arange(3 * 32 * 32).reshape(1, 32, 32, 3).astype(np.uint8)
    return DataReport(
        "photos/", sum(classes.values()), splits, median_side=300, squares=colors, **facts
    )


def plan(found: DataReport | None = None, share: float = 0.52, **known: Any) -> Plan:
    facts = Facts(found or report(), Mirror(share, 1000), seconds=10.0)
    size = known.pop("size", 32)
    known = {"measured": MEASURED, "classifier": 0.0005, "memory": 8e9, **known}
    return Plan(facts, size, NETWORKS[size][0], **known)


def chosen(name: str, given: Plan) -> Any:
    found = CHOICES[name](given)
    assert found is not None and found.reason
    return found.value


@pytest.mark.parametrize("size", NETWORKS)
@pytest.mark.parametrize("time", [None, 600.0, 8 * 3600.0])
def test_all_choices_together_are_valid_settings(size: int, time: float | None) -> None:
    for network in NETWORKS[size]:
        found = choose(replace(plan(size=size, time=time), network=network))
        config = params.validate(nested({key: choice.value for key, choice in found.items()}))
        assert config.train.steps % config.train.milestone_every == 0
        assert config.sample.count % config.sample.batch_size == 0
        assert all(choice.reason and "\n" not in choice.reason for choice in found.values())


def test_every_section_of_the_dvc_stages_has_a_choice() -> None:
    stages = {"seed", "prepare", "model", "diffusion", "train", "sample", "evaluate", "register"}
    assert {*stages, "tracking"} <= {name.partition(".")[0] for name in choose(plan())}


@pytest.mark.parametrize(("share", "flip"), [(0.91, False), (0.67, False), (0.58, True)])
def test_flip_is_off_if_mirrored_images_look_different(share: float, flip: bool) -> None:
    found = choices.flip(plan(share=share))
    assert found.value is flip and f"{share:.0%} of 1,000 images" in found.reason


def test_flip_is_off_if_images_are_too_few_to_test() -> None:
    few = plan()
    few = replace(few, facts=replace(few.facts, mirror=Mirror(0.5, 20)))
    assert choices.flip(few).value is False
    assert "20 images are too few" in choices.flip(few).reason


@pytest.mark.parametrize(
    ("classes", "captioned", "expected"),
    [
        (CLASSES, False, "class"),
        (CLASSES, True, "text"),
        ({"": 1000}, False, "none"),
        ({"": 1000}, True, "text"),
        ({"cat": 1000}, False, "none"),
        ({"cat": 1000, "dog": 9}, False, "none"),
    ],
)
def test_conditioning_uses_captions_then_classes(
    classes: dict[str, int], captioned: bool, expected: str
) -> None:
    assert chosen("model.conditioning", plan(report(classes, captioned=captioned))) == expected


@pytest.mark.parametrize(("far", "value"), [(0, "crop"), (170, "crop"), (300, "pad")])
def test_many_long_images_are_padded(far: int, value: str) -> None:
    found = choices.resize(plan(report(far_from_square=far, cropped=0.33)))
    assert found.value == value
    assert (f"{far / 1000:.0%} of the images" in found.reason) == bool(far)


def test_images_without_colors_are_measured_with_one_channel() -> None:
    assert not plan().facts.gray
    squares = np.full((4, 32, 32, 3), 9, np.uint8)
    assert plan(DataReport("x", 4, {}, squares=squares)).facts.gray


def test_steps_take_the_time_that_remains() -> None:
    given = plan(time=3600.0)
    assert given.available == pytest.approx((1 - SAMPLING) * (3600 - given.other_seconds))
    assert given.steps * 0.2 * BESIDE_STEPS >= 0.99 * given.available
    assert 0.98 * 3600 < sum(given.times.values()) <= 3600
    assert "200 ms per step" in choices.steps(given).reason


def test_slower_steps_are_fewer() -> None:
    slow = replace(MEASURED, step=2.0)
    assert plan(time=3600.0, measured=slow).steps == pytest.approx(
        plan(time=3600.0).steps / 10, 0.1
    )


def test_without_a_time_the_network_gets_enough_images() -> None:
    given = plan()
    assert given.steps * given.batch == pytest.approx(given.network.enough, rel=0.01)


def test_passes_over_few_images_are_limited() -> None:
    given = plan(report({"": 100}), time=8 * 3600.0)
    assert given.passes == pytest.approx(PASSES, rel=0.01)
    assert "more would memorize them" in choices.steps(given).reason
    assert "memorize" not in choices.steps(plan(time=3600.0)).reason


def test_batch_is_at_most_a_quarter_of_the_images() -> None:
    assert (plan().batch, plan(report({"": 100})).batch) == (32, 22)


@pytest.mark.parametrize(("memory", "parts"), [(8e9, 1), (1.5e9, 2), (1.3e9, 8), (1e9, 32)])
def test_microbatches_fit_the_memory(memory: float, parts: int) -> None:
    given = plan(memory=memory)
    assert given.microbatches == parts
    assert given.fits == (memory > 1.25e9)
    assert f"of {memory / 1e9:.3g} GB free" in choices.microbatches(given).reason


def test_a_network_fits_if_its_least_training_does() -> None:
    needed = plan().seconds_for(plan().network.least)
    limit = needed / (1 - SAMPLING) + plan().other_seconds
    assert plan(time=limit + 1).fits and not plan(time=limit - 1).fits
    assert plan().fits and not plan(measured=replace(MEASURED, step=3.0)).fits


def test_samples_are_bounded_by_time_and_by_images() -> None:
    assert plan(time=8 * 3600.0).samples == (10, 500)
    assert plan(report({"": 20_000}), time=8 * 3600.0).samples == (10, 10_000)
    assert plan(time=600.0).samples == (4, 500)
    slow = replace(MEASURED, evaluation=0.1)
    assert plan(time=3600.0, measured=slow).samples == (1, 200)
    assert min(least for _, least in CHECKPOINTS) == 100


def test_wide_networks_learn_slower_with_dropout() -> None:
    rates = [network.lr for network in NETWORKS[32]]
    assert rates == sorted(rates, reverse=True) and rates[0] == 1e-3 and rates[-1] == 2e-4
    assert [network.dropout for network in NETWORKS[32]] == [0.0, 0.1, 0.1]


def test_short_training_predicts_by_wiener() -> None:
    assert chosen("diffusion.prediction", plan()) == "wiener"
    wide = replace(plan(), network=NETWORKS[32][1])
    assert chosen("diffusion.prediction", wide) == "v"


def test_settings_of_the_user_replace_choices() -> None:
    given = plan(given={"train.steps": 1000, "train.batch_size": 8, "sample.count": 50})
    found = choose(given)
    assert found["train.steps"] == (1000, "set by -S")
    assert (given.batch, given.samples[1]) == (8, 50)
    assert found["train.milestone_every"].value == 1000 // given.samples[0]


@pytest.mark.parametrize(("source", "name"), [("cifar10", "workspace"), ("photos", "runs/photos")])
def test_workspace_of_a_known_source_has_its_download(source: str, name: str) -> None:
    found = report()
    found.source = source
    assert chosen("workspace", plan(found)) == name


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("photos/", "photos"),
        ("../My Cats.tar.gz", "my-cats"),
        ("s3://bucket/prefix", "prefix"),
        ("dvc:https://host/data.git#photos@v2", "data-git-photos"),
        ("\u732b/", "images"),
        ("digits", "digits"),
    ],
)
def test_names_follow_from_the_source(source: str, name: str) -> None:
    found = report()
    found.source = source
    assert choices.label(plan(found)) == name
    registered = chosen("register.name", plan(found))
    Config.model_validate({"register": {"name": registered}, "workspace": f"runs/{name}"})


@pytest.mark.parametrize(
    ("count", "share", "hours", "expected"),
    [
        (1000, 0.52, 8, "edm"),
        (1000, 0.52, 0.1, "none"),  # few passes
        (1000, 0.91, 8, "none"),  # mirrored images look different
        (9000, 0.52, 8, "none"),
    ],
)
def test_few_images_are_augmented_if_seen_often(
    count: int, share: float, hours: float, expected: str
) -> None:
    given = plan(report({"": count}), share, time=3600.0 * hours)
    assert chosen("train.augment", given) == expected


def test_unequal_classes_are_drawn_equally() -> None:
    assert CHOICES["train.balance"](plan()) is None
    assert chosen("train.balance", plan(report({"cat": 600, "dog": 100}))) == "classes"
    assert CHOICES["train.balance"](plan(report({"cat": 600, "dog": 9}))) is None
