"""Which settings affect a result. A method that is not selected makes its settings irrelevant.

Changing an irrelevant setting must not repeat training or sampling. Names are dotted, as after -S.
Settings that `USES` does not list always count.

Two rules keep old results valid when a setting is added. Its default must be the former behavior,
because a missing setting is read as its default. And a default never changes: a better value goes
into a preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# For each setting that selects a method: the settings that each method uses, without those that
# all of them use.
USES: dict[str, dict[str, tuple[str, ...]]] = {
    "model.conditioning": {
        "none": (),
        "class": ("train.label_drop",),
        "text": ("train.label_drop", "model.cross_attention"),
    },
    "train.loss.weighting": {
        "uniform": (),
        "min_snr": ("train.loss.gamma",),
        "p2": ("train.loss.gamma", "train.loss.k"),
        "debias": (),
        "edm": (),
    },
    "train.timesteps.adaptive": {
        "none": (),
        "loss_second_moment": (),
        "uncertainty": (),
        "variance": ("train.steps",),
        "wiener_gate": ("train.steps",),
        "paired_progress": (),
        "held_out": (),
        "kim": (),
        "replay": ("train.steps", "train.timesteps.tables", "train.timesteps.order"),
    },
    "train.optimizer.schedule": {"constant": (), "cosine": ("train.steps",)},
    "sample.sampler": {
        "ddpm": ("sample.spacing", "sample.variance"),
        "ddim": ("sample.spacing", "sample.eta"),
        "dpmpp": (),
        "heun": (),
    },
}


def relevant(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, by dotted name, that the selected methods use."""
    used: set[str] = set()
    unused: set[str] = set()
    for selector, methods in USES.items():
        method = settings.get(selector)
        if isinstance(method, str) and method in methods:
            used |= {*methods[method]}
            unused |= {name for names in methods.values() for name in names}
    return {name: value for name, value in settings.items() if name in used or name not in unused}


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the plain data of a section as settings by dotted name, which begins with `prefix`."""
    found: dict[str, Any] = {}
    for name, item in section.items():
        inner = isinstance(item, dict)
        found |= flat(item, f"{prefix}{name}.") if inner else {prefix + name: item}
    return found


def non_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults.

    Fingerprints hash only those, so that a new setting does not change them.
    """
    return {n: v for n, v in settings.items() if n not in defaults or v != defaults[n]}
