"""Requests for images: the fields of a row, their validation, and the resulting settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ddpm_core.config import Config, Sample
from ddpm_core.config.results import SamplerName
from ddpm_core.errors import UserError

MAX_IMAGES = 256  # in one response
MAX_PIXELS = 2**22  # in one response, which is built in memory
SHOWN = 60  # characters of a value in a message
EXACT = 2.0**53  # floats below this represent each integer exactly

TABLES = ("dataframe_records", "dataframe_split", "inputs", "instances")


def _integer(value: object) -> object:
    """Convert an integral float to an integer: tables store integers with gaps as floats."""
    exact = isinstance(value, float) and value.is_integer() and abs(value) < EXACT
    return int(value) if isinstance(value, float) and exact else value


def _unicode(text: str) -> str:
    """Reject half a surrogate pair, which JSON can express and UTF-8 cannot."""
    text.encode()
    return text


Integer = Annotated[int, BeforeValidator(_integer)]
Text = Annotated[str, AfterValidator(_unicode)]


class Request(BaseModel):
    """One row of a request. Omitted fields take the model's own settings.

    Error messages quote the description of a field, which says what is allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    n: Annotated[Integer, Field(ge=1, le=MAX_IMAGES)] = Field(
        description=f"an integer from 1 to {MAX_IMAGES}; `first` continues the numbering"
    )
    seed: Annotated[Integer, Field(ge=0, lt=2**63)] | None = Field(
        None,
        description="an integer from 0 to 2^63 - 1; integers of 2^53 or more lose precision as "
        "floats, so send an integer in every row",
    )
    first: Annotated[Integer, Field(ge=0, le=2**31)] = Field(
        0, description="an integer from 0 to 2^31, the number of the first image"
    )
    class_: Text | Integer | None = Field(
        None, alias="class", description="the name (a text) or the number of a class"
    )
    prompt: Text | None = Field(None, description="a text")
    sampler: SamplerName | None = Field(
        None, description=f"one of {', '.join(get_args(SamplerName))}"
    )
    steps: Annotated[Integer, Field(ge=1)] | None = Field(
        None, description="an integer of at least 1"
    )
    guidance: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="a finite number of at least 0"
    )
    format: Literal["png", "array"] = Field("png", description="png or array")


_FIELDS = {info.alias or name: info for name, info in Request.model_fields.items()}
FIELDS = tuple(_FIELDS)


@dataclass(frozen=True)
class Task:
    """The images to draw: their numbers, the settings of the sampler, and the encoding."""

    numbers: range
    settings: Sample
    format: str


def rows_of(payload: object) -> list[dict[str, Any]]:
    """Return the rows of a JSON body in one of the forms that MLflow's scoring server accepts.

    Raises UserError.
    """
    if not isinstance(payload, dict) or len(payload) != 1 or next(iter(payload)) not in TABLES:
        raise UserError(f"The body must be a JSON object with exactly one of {', '.join(TABLES)}.")
    [(kind, table)] = payload.items()
    rows = _split(table) if kind == "dataframe_split" else _records(table)
    if rows is None:
        raise UserError(f'{kind}: invalid table. Send for example {{"inputs": [{{"n": 4}}]}}.')
    return rows


def _records(table: object) -> list[dict[str, Any]] | None:
    """Return the rows of a list of rows, of a single row, or of equally long columns."""
    if isinstance(table, list):
        return table if all(isinstance(row, dict) for row in table) else None
    if not isinstance(table, dict):
        return None
    if not table or not all(isinstance(column, list) for column in table.values()):
        return [table]
    return _split({"columns": list(table), "data": list(_transposed(table.values()))})


def _transposed(columns: Iterable[list[Any]]) -> Iterable[list[Any]]:
    lists = list(columns)
    if len({len(column) for column in lists}) == 1:
        yield from (list(row) for row in zip(*lists, strict=True))
    else:
        yield []  # a row without values, which `_split` rejects


def _split(table: object) -> list[dict[str, Any]] | None:
    """Return the rows of {"columns": [...], "data": [[...], ...]}, or None if it is invalid."""
    if not isinstance(table, dict) or not {"columns", "data"} <= table.keys():
        return None
    columns, data = table["columns"], table["data"]
    if not isinstance(columns, list) or not isinstance(data, list):
        return None
    if not all(isinstance(row, list) and len(row) == len(columns) for row in data):
        return None
    return [dict(zip(map(str, columns), row, strict=True)) for row in data]


def parse(row: Mapping[str, Any]) -> Request:
    """Validate one row. None and NaN, the gaps of a table, count as omitted.

    Raises:
        UserError: with every invalid field of the row.
    """
    if unknown := row.keys() - FIELDS:
        more = f" and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
        raise UserError(
            f"Unknown field {_shown(min(unknown))}{more}. Known fields: {', '.join(FIELDS)}."
        )
    try:
        return Request.model_validate({key: row[key] for key in row if not _is_gap(row[key])})
    except ValidationError as error:
        names = dict.fromkeys(str(item["loc"][0]) for item in error.errors(include_url=False))
        raise UserError(" ".join(_problem(name, row) for name in names)) from None


def _problem(name: str, row: Mapping[str, Any]) -> str:
    got = "missing" if _is_gap(row.get(name)) else f"got {_shown(row[name])}"
    return f"{name}: {got}; must be {_FIELDS[name].description}."


def resolve(request: Request, config: Config, classes: list[str]) -> Task:
    """Return the task of a request to a model.

    Args:
        request: A validated row.
        config: The settings of the model.
        classes: The names of its classes.

    Raises:
        UserError: the model cannot draw such images.
    """
    fields = {name: getattr(request, name) for name in ("seed", "sampler", "steps", "guidance")}
    changed = {name: value for name, value in fields.items() if value is not None}
    conditioning, timesteps = config.model.conditioning, config.diffusion.timesteps
    if request.class_ is not None:
        if conditioning != "class":
            raise UserError("class: this model was trained without classes. Omit it.")
        changed["classes"] = (_class(request.class_, classes),)
    if request.prompt is not None:
        if conditioning != "text":
            raise UserError("prompt: this model was not trained on texts. Omit it.")
        changed["prompts"] = (request.prompt,)
    if request.steps is not None and request.steps > timesteps:
        raise UserError(f"steps: got {_shown(request.steps)}; must be 1 to {timesteps}.")
    settings = config.sample.model_copy(update=changed)
    if "guidance" in changed and settings.guidance_lacks(conditioning, config.train.label_drop):
        raise UserError(
            f"guidance: got {request.guidance:g}; must be 1, because this model was not trained "
            "for guidance."
        )
    numbers = range(request.first, request.first + request.n)
    return Task(numbers, settings, request.format)


def check_size(tasks: list[Task], pixels: int, max_work: int | None) -> None:
    """Raise UserError if the tasks are too large for one response.

    Args:
        tasks: The tasks of one request.
        pixels: The pixels of an image.
        max_work: The limit for images x pixels x evaluations of the network. It does not apply to a
            single image.
    """
    count = sum(len(task.numbers) for task in tasks)
    work = sum(len(task.numbers) * pixels * task.settings.evaluations for task in tasks)
    limit = min(MAX_IMAGES, max(1, MAX_PIXELS // pixels))
    if not 1 <= count <= limit:
        raise UserError(
            f"The request asks for {count} images; 1 to {limit} images of {pixels:,} pixels are "
            "allowed. Send several requests; `first` continues the numbering."
        )
    if max_work is not None and count > 1 and work > max_work:
        raise UserError(
            f"The request needs {work:,} images x pixels x evaluations; at most {max_work:,} are "
            "allowed. Ask for fewer images or steps; `first` continues the numbering."
        )


def _class(value: str | int, classes: list[str]) -> str:
    """Return the name of the class with a name or a number."""
    if value in classes:
        return str(value)
    if isinstance(value, int) and 0 <= value < len(classes):
        return classes[value]
    listed = ", ".join(classes[:20]) + (", ..." if len(classes) > 20 else "")
    raise UserError(
        f"class: got {_shown(value)}; must be one of {listed}, or a number from 0 to "
        f"{len(classes) - 1}."
    )


def _shown(value: object) -> str:
    """Format a value for a message, and cut it if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; nested lists
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _is_gap(value: object) -> bool:
    """Return whether a value is None, or the NaN that represents None in a table."""
    return value is None or (isinstance(value, float) and value != value)
