"""A request to a served model: what may stand in it, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ddpm_core import params
from ddpm_core.config import Config, Sample
from ddpm_core.errors import UserError

LARGEST = 256  # images in one answer
FORMATS = ("png", "array")
EXACT = 2.0**53  # below it each whole number is a float of its own
SHOWN = 60  # characters of a value in a message

FIELDS = {
    "n": f"how many images, 1 to {LARGEST}",
    "seed": "which images; the same seed gives the same ones",
    "first": "the number of the first image, 0 if none is given",
    "class": "a class, by name (text) or number, for a model with classes",
    "prompt": "a text, for a model of texts",
    "sampler": "ddpm, ddim or dpmpp",
    "steps": "of the sampler",
    "guidance": "classifier-free guidance; 1: none",
    "format": "png (base64 text) or array (rows of pixels of 1 or 3 channels, 0 to 255)",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """Images `numbers` under `settings`, as `format`."""

    numbers: range
    settings: Sample
    format: str


def read(given: Mapping[str, Any], config: Config, classes: list[str]) -> Request:
    """A request, with what it leaves out taken from the model's own settings.

    `config` is the model's, `classes` the names of its classes. Raises UserError with the mistake.
    """
    row = {key: value for key, value in given.items() if not _absent(value)}
    if unknown := [key for key in row if key not in FIELDS]:
        raise UserError(f"{_shown(unknown[0])} is unknown here; known are {', '.join(FIELDS)}.")
    count = _take(row, "n", _whole, 1)
    first = _take(row, "first", _whole, 0)
    if not 1 <= count <= LARGEST:
        raise UserError(
            f"n: {_shown(count)} given; 1 to {LARGEST} is needed (`first` draws further ones)."
        )
    if not 0 <= first <= 2**31:
        raise UserError(f"first: {_shown(first)} given; 0 to 2^31 is needed.")
    form = _take(row, "format", _text, "png")
    if form not in FORMATS:
        raise UserError(f"format: {_shown(form)} given; {' or '.join(FORMATS)} is needed.")
    return Request(range(first, first + count), _settings(row, config, classes), form)


def _settings(row: Mapping[str, Any], config: Config, classes: list[str]) -> Sample:
    own = config.sample
    changed: dict[str, Any] = {
        "seed": _take(row, "seed", _whole, own.seed),
        "sampler": _take(row, "sampler", _text, str(own.sampler)),
        "steps": _take(row, "steps", _whole, own.steps),
        "guidance": _take(row, "guidance", _number, own.guidance),
    }
    conditioning = config.model.conditioning
    if "class" in row:
        if conditioning != "class":
            raise UserError("class: given, but this model was trained without classes.")
        changed["classes"] = (_class(row["class"], classes),)
    if "prompt" in row:
        if conditioning != "text":
            raise UserError("prompt: given, but this model was not trained on texts.")
        changed["prompts"] = (_take(row, "prompt", _text, ""),)
    plain = config.dump()
    try:
        return params.validate({**plain, "sample": {**plain["sample"], **changed}}).sample
    except UserError as error:
        mistakes = [line.strip() for line in str(error).splitlines()[1:]]
        raise UserError("; ".join(m.removeprefix("sample.") for m in mistakes) + ".") from error


def _class(given: Any, classes: list[str]) -> str:
    """The class of a name, or of a number."""
    if isinstance(given, str):
        if given in classes:
            return given
    else:
        number = _whole("class", given)
        if 0 <= number < len(classes):
            return classes[number]
    listed = ", ".join(classes[:20]) + (", ..." if len(classes) > 20 else "")
    raise UserError(
        f"class: {_shown(given)} given; a name of {listed}, or 0 to {len(classes) - 1} is needed."
    )


def _take(row: Mapping[str, Any], name: str, read: Callable[[str, Any], T], default: T) -> T:
    return read(name, row[name]) if name in row else default


def _whole(name: str, value: Any) -> int:
    if type(value) is int:
        return value
    if not isinstance(value, float) or not value.is_integer():
        raise UserError(f"{name}: {_shown(value)} given; a whole number is needed.")
    # Rows that lack a field make floats of the others' integers; large ones change in silence.
    if abs(value) >= EXACT:
        raise UserError(
            f"{name}: {value!r} given; from 2^53 on whole numbers must not have a point, nor stand "
            f"beside rows without {name}, which make floats of them: give {name} in every row."
        )
    return int(value)


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or abs(value) >= EXACT:
        raise UserError(f"{name}: {_shown(value)} given; a number is needed.")
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name}: {_shown(value)} given; a text is needed.")
    return value


def _shown(value: Any) -> str:
    """What was given, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _absent(value: Any) -> bool:
    """None, or the NaN that stands for it in a table."""
    return value is None or (isinstance(value, float) and value != value)
