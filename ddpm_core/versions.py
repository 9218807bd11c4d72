"""Settings of a checkpoint that another version of ddpm may have written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from ddpm_core import __version__
from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.config.problems import fields_of, section_of
from ddpm_core.errors import Corrupt, UserError

NEEDED = ("model", "diffusion", "train", "sample")  # sections without which a network means nothing


def read_params(given: dict[str, Any], name: str, made: str | None) -> Config:
    """The Config of a checkpoint's params; keys of other sections than NEEDED may be unknown.

    `name` is the file's, `made` the version that wrote it, where it says so. Raises UserError for
    what another version means by it, and Corrupt for what none can.
    """
    sections = {key: _known(value, key) for key, value in given.items() if key in fields_of(Config)}
    needed = {key: value for key, value in sections.items() if key in NEEDED}
    if unknown := list(_unknown(needed, Config)):
        raise of_another_version(name, f"has settings unknown here: {', '.join(unknown)}.", made)
    try:
        return params.validate(sections, name)
    except UserError as error:
        if made in (None, __version__):
            raise Corrupt(f"{error!s:.1000}") from error
        raise of_another_version(name, f"can't be read here: {error}", made) from error


def of_another_version(name: str, what: str, made: str | None) -> UserError:
    """The error for a file that is whole, and not for this version to read."""
    other = f"ddpm {made}" if made and made != __version__ else "another ddpm"
    return UserError(
        f"{name} {what:.1000}\nIt was written by {other}, and this is {__version__}: install that "
        "one to use it."
    )


def _known(section: Any, name: str) -> Any:
    """A section without the keys that matter to no network and that are unknown here."""
    model = section_of(fields_of(Config)[name])
    if model is None or name in NEEDED or not isinstance(section, dict):
        return section
    return {key: value for key, value in section.items() if key in fields_of(model)}


def _unknown(given: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """The dotted names of keys that no section has."""
    for key, value in given.items():
        field = fields_of(model).get(key)
        if field is None:
            yield f"{prefix}{key}"
        elif isinstance(value, dict) and (section := section_of(field)):
            yield from _unknown(value, section, f"{prefix}{key}.")
