"""Unused settings and new settings at their default do not repeat training or sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from ddpm_core.config import Config, Sample, Train
from ddpm_core.config import load as params
from ddpm_core.config.identity import USES, flat
from ddpm_core.config.results import as_sampled
from ddpm_core.training import identity
from ddpm_core.training.identity import differences, train_fingerprint


def settings_of(*overrides: str) -> dict[str, object]:
    return identity.identity(params.load(None, overrides), "data")


def test_a_run_older_than_a_setting_stays_up_to_date() -> None:
    now = settings_of()
    for name in (
        *("train.ema_warmup", "train.optimizer.betas", "train.augment", "train.balance"),
        *("diffusion.prediction", "model.cross_attention"),
    ):
        before = {key: value for key, value in now.items() if key != name}
        assert differences(before, now) == []
    warm = settings_of("train.ema_warmup=true")
    del now["train.ema_warmup"]
    assert differences(now, warm) == ["train.ema_warmup: False -> True"]


def test_a_new_default_does_not_change_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NewTrain(Train):
        shake: float = 0.0

    class NewConfig(Config):
        train: NewTrain = NewTrain()

    before = train_fingerprint(Config(), "data")
    monkeypatch.setattr(identity, "Config", NewConfig)
    identity._defaults.cache_clear()
    try:
        assert train_fingerprint(NewConfig(), "data") == before
        assert train_fingerprint(NewConfig(train=NewTrain(shake=1.0)), "data") != before
    finally:
        identity._defaults.cache_clear()


@pytest.mark.parametrize(
    "unused",
    [
        ("train.loss.k=2",),
        ("train.loss.weighting=uniform", "train.loss.gamma=3"),
        ("train.label_drop=0.5",),
        ("model.cross_attention=true",),
        ("train.steps=9",),
        ("train.timesteps.order=last",),
        ("train.timesteps.adaptive=kim", "train.steps=9"),
    ],
)
def test_unused_settings_do_not_change_the_run(unused: tuple[str, ...]) -> None:
    *chosen, _ = unused
    there = {**settings_of(*chosen), "train.loss.k": 7.0}  # as in runs that stored every setting
    assert differences(there, settings_of(*unused)) == []
    assert settings_of(*unused) == settings_of(*chosen)


def test_recorded_tables_are_identified_by_their_content(tmp_path: Path) -> None:
    """A moved file is the same run, a changed one is another; a missing one is not compared."""
    first, moved = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    first.write_bytes(b"tables")

    def of(file: Path) -> dict[str, object]:
        return settings_of("train.timesteps.adaptive=replay", f"train.timesteps.tables={file}")

    begun = of(first)
    assert settings_of(f"train.timesteps.tables={first}") == settings_of()
    first.rename(moved)
    assert of(moved) == begun and differences(begun, of(first)) == []
    by_path = {**of(first), "train.timesteps.tables": "elsewhere"}  # as earlier versions did
    assert differences(by_path, begun) == []
    moved.write_bytes(b"others")
    (change,) = differences(begun, of(moved))
    assert change.startswith("content of train.timesteps.tables: ")


def test_methods_that_follow_the_run_depend_on_its_length() -> None:
    """One method uses the steps even if another setting of the run does not."""
    for method in ("variance", "wiener_gate"):
        chosen = f"train.timesteps.adaptive={method}"
        assert settings_of(chosen)["train.steps"] == 800
        assert settings_of(chosen) != settings_of(chosen, "train.steps=9")


def test_a_changed_method_hides_its_own_settings() -> None:
    changes = differences(settings_of(), settings_of("train.loss.weighting=p2", "train.loss.k=2"))
    assert changes == ["train.loss.weighting: min_snr -> p2"]
    one, two = (settings_of("train.loss.weighting=p2", f"train.loss.k={k}") for k in (1, 2))
    assert differences(one, two) == ["train.loss.k: 1.0 -> 2.0"]


def test_unused_settings_do_not_change_the_images() -> None:
    idle = Sample(eta=0.5, spacing="quadratic", variance="small")
    assert idle.of_sampler() == Sample().of_sampler()
    ddim = Sample(sampler="ddim", eta=0.5, variance="small").of_sampler()
    assert ddim["eta"] == 0.5 and "variance" not in ddim


def test_unlisted_sample_settings_change_the_images() -> None:
    class NewSample(Sample):
        churn: float = 0.0

    assert NewSample(churn=1.0).of_sampler() != NewSample().of_sampler()


def test_scores_older_than_a_setting_stay_comparable() -> None:
    now = Sample(sampler="ddim").of_sampler()
    before = {name: value for name, value in now.items() if name != "eta"}
    assert as_sampled(before) == as_sampled(now)
    assert as_sampled(before) != as_sampled({**now, "eta": 0.5})


def test_the_table_of_uses_matches_the_config() -> None:
    names = flat(Config().dump())
    for chooser, choices in USES.items():
        assert chooser in names
        assert {name for used in choices.values() for name in used} <= names.keys()
        model: Any = Config
        *sections, last = chooser.split(".")
        for section in sections:
            model = model.model_fields[section].annotation
        assert set(get_args(model.model_fields[last].annotation)) == set(choices)
