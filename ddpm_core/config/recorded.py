"""The settings that a checkpoint records, which another version of ddpm may have written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from ddpm_core import __version__
from ddpm_core.config import Config
from ddpm_core.config.load import validate
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.problems import fields_of, section_of

# Sections without which a network has no meaning. Keys that another version of ddpm added to other
# sections are ignored; unknown keys in these are an error.
NEEDED = ("model", "diffusion", "train", "sample")


def read_params(given: dict[str, Any], name: str, made_by: str | None) -> Config:
    """Return the Config of a checkpoint's params.

    Unknown keys outside the sections in NEEDED are ignored. `name` is the file's name, `made_by`
    the version that wrote it, if recorded.

    Raises:
        UserError: The params may be valid for another version of ddpm.
        Corrupt: The params are invalid for every version.
    """
    sections = {key: _known(value, key) for key, value in given.items() if key in fields_of(Config)}
    needed = {key: value for key, value in sections.items() if key in NEEDED}
    if unknown := list(_unknown(needed, Config)):
        raise other_version_error(name, f"has unknown settings: {', '.join(unknown)}.", made_by)
    try:
        return validate(sections, name)
    except UserError as error:
        if made_by in (None, __version__):
            raise Corrupt(f"{error!s:.1000}") from error
        raise other_version_error(name, f"is invalid for this version: {error}", made_by) from error


def other_version_error(name: str, what: str, made_by: str | None) -> UserError:
    """Return the error for an intact file that this version cannot use."""
    other = f"ddpm {made_by}" if made_by and made_by != __version__ else "another version of ddpm"
    return UserError(
        f"{name} {what:.1000}\nIt was written by {other}; this is {__version__}. Install that "
        "version to use it."
    )


def _known(section: Any, name: str) -> Any:
    """Return a section outside NEEDED without its unknown keys, and any other unchanged."""
    model = section_of(fields_of(Config)[name])
    if model is None or name in NEEDED or not isinstance(section, dict):
        return section
    return {key: value for key, value in section.items() if key in fields_of(model)}


def _unknown(given: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """Yield the dotted names of keys that no section has."""
    for key, value in given.items():
        field = fields_of(model).get(key)
        if field is None:
            yield f"{prefix}{key}"
        elif isinstance(value, dict) and (section := section_of(field)):
            yield from _unknown(value, section, f"{prefix}{key}.")
