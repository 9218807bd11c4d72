"""Which settings decide what comes out: a chosen method leaves others without an effect.

So neither training nor images are made again over a setting that would change nothing. Names are
dotted, as after -S. A setting that is not here counts whatever is chosen.

Two rules keep what was made before a setting came: its default is the former behaviour, since an
absent setting is read as its default; and a default stays (another value goes into a preset).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By the setting that chooses: the settings that each choice uses, of those that not all use.
USES: dict[str, dict[str, tuple[str, ...]]] = {
    "model.conditioning": {
        "none": (),
        "class": ("train.label_drop",),
        "text": ("train.label_drop",),
    },
    "train.loss.weighting": {
        "uniform": (),
        "min_snr": ("train.loss.gamma",),
        "p2": ("train.loss.gamma", "train.loss.k"),
    },
    "train.optimizer.schedule": {"constant": (), "cosine": ("train.steps",)},
    "sample.sampler": {
        "ddpm": ("sample.spacing", "sample.variance"),
        "ddim": ("sample.spacing", "sample.eta"),
        "dpmpp": (),
    },
}


def deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, without those that the choices among them do not use."""
    unused: set[str] = set()
    for chooser, choices in USES.items():
        choice = settings.get(chooser)
        if isinstance(choice, str) and choice in choices:
            unused |= {name for names in choices.values() for name in names} - {*choices[choice]}
    return {name: value for name, value in settings.items() if name not in unused}


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Plain data of a section as settings by dotted name, each behind `prefix`."""
    found: dict[str, Any] = {}
    for name, item in section.items():
        inner = isinstance(item, dict)
        found |= flat(item, f"{prefix}{name}.") if inner else {prefix + name: item}
    return found


def unlike(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not their defaults: what a fingerprint is of, so that it stays when
    a setting is added."""
    return {n: v for n, v in settings.items() if n not in defaults or v != defaults[n]}
