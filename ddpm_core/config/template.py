"""Write a params file that lists and explains every setting, of the defaults or of a preset."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ddpm_core.config import Config, yaml_text
from ddpm_core.errors import UserError
from ddpm_core.problems import fields_of, section_of

PRESETS = Path(__file__).parents[1] / "presets"
WIDTH = 29  # columns before the comments

_ABOUT = """\
# The default settings of `ddpm`: small digits that are legible after minutes on a CPU.
# Change a value here, or for one run: ddpm run -S train.steps=2000. Missing settings have their
# defaults. For your own images: ddpm init photos/ -o photos.yaml
"""


def presets() -> list[str]:
    """Return the names of the presets, which are settings for known data sets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def template(preset: str | None = None) -> str:
    """Return the text of a params file. Raises UserError if the preset does not exist."""
    if preset is None:
        return _ABOUT + "\n".join(_lines(Config, _defaults())) + "\n"
    if preset not in presets():
        raise UserError(f"Preset {preset!r} does not exist; must be one of {', '.join(presets())}.")
    text = yaml_text.text(PRESETS / f"{preset}.yaml", "preset")
    about = [line for line in text.splitlines(keepends=True) if line.startswith("#")]
    given = yaml_text.parse(text, preset, "sections")
    return "".join(about) + "\n".join(_lines(Config, _filled(_defaults(), given))) + "\n"


def excerpt(values: Mapping[str, Any], reasons: Mapping[str, str], about: str) -> str:
    """Return the text of a params file with some settings only, each with its own comment.

    `values` is nested like a params file; `reasons` has the comments, by dotted name. `about` is
    the comment at the top, of one or more lines.
    """
    head = "".join(f"# {line}\n" for line in about.splitlines())
    return head + "\n".join(_lines(Config, values, reasons)) + "\n"


def _defaults() -> dict[str, Any]:
    """Return the defaults of a params file, where `auto` attention follows the image size."""
    defaults = Config().dump()
    return {**defaults, "model": {**defaults["model"], "attention": "auto"}}


def _filled(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults, replaced by the given settings."""
    return {
        name: _filled(value, given.get(name, {}))
        if isinstance(value, dict)
        else given.get(name, value)
        for name, value in defaults.items()
    }


def _lines(
    model: type[BaseModel],
    values: Mapping[str, Any],
    reasons: Mapping[str, str] | None = None,
    path: tuple[str, ...] = (),
) -> Iterable[str]:
    """Yield the lines of a section and of the sections in it, in the order of their definition.

    `values` are the settings to show. Their comments are `reasons`, by dotted name, or what they
    mean.
    """
    indent = "  " * len(path)
    for name, field in fields_of(model).items():
        if name not in values:
            continue
        if section := section_of(field):
            yield from [""] * (not indent)
            yield _commented(f"{indent}{name}:", (section.__doc__ or "").partition("\n")[0])
            yield from _lines(section, values[name], reasons, (*path, name))
        else:
            dotted = ".".join((*path, name))
            comment = _meaning(field) if reasons is None else reasons[dotted]
            yield _commented(f"{indent}{name}: {_yaml(values[name])}", comment)


def _yaml(value: Any) -> str:
    """Return a value as YAML in one line, with quotes if a text would be read as another type."""
    import yaml  # here, because it takes 30 ms that other commands can save

    shown = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    shown = shown.removesuffix("...\n").rstrip()
    if not isinstance(value, str):
        return shown
    with suppress(ValueError):
        if "\n" not in shown and yaml_text.value(f"x: {shown}") == {"x": value}:
            return shown
    return json.dumps(value)


def _commented(line: str, comment: str) -> str:
    return f"{line.ljust(WIDTH - 2)}  # {comment}"


def _meaning(field: FieldInfo) -> str:
    """Return the comment of a setting: its choices, if they can be listed, and its description."""
    choices = _choices(field.annotation)
    listed = " | ".join(choices) + "; " if len(choices) > 1 else ""
    return listed + (field.description or "")


def _choices(kind: Any) -> list[str]:
    """Return the values of a Literal, or of a union of Literals and bool; else an empty list."""
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    arms = [["true", "false"] if arm is bool else _choices(arm) for arm in get_args(kind)]
    return [choice for arm in arms for choice in arm] if all(arms) else []
