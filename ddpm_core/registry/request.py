"""Requests for images: the fields of a row, their validation, and the resulting settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ddpm_core.config import Config, Sample
from ddpm_core.config.results import SamplerName
from ddpm_core.errors import MAX_SHOWN, Invalid, Problem, UserError, got, invalid
from ddpm_core.problems import fields_of, problems_of

if TYPE_CHECKING:
    from ddpm_core.diffusion.editing import Original

MAX_IMAGES = 256  # in one response
MAX_PIXELS = 2**22  # in one response, which is built in memory
MAX_UNKNOWN = 3  # unknown keys in a message
EXACT = 2.0**53  # floats below this represent each integer exactly

TABLES = ("dataframe_records", "dataframe_split", "inputs", "instances")


def _integer(value: object) -> object:
    """Convert an integral float to an integer: tables store integers with gaps as floats."""
    if not isinstance(value, float) or not value.is_integer():
        return value
    if abs(value) >= EXACT:
        hint = "floats of 2^53 or more are not exact, so send an integer in every row"
        raise Invalid([Problem("", got(value), "must be an integer", hint)])
    return int(value)


def _unicode(text: str) -> str:
    """Reject half a surrogate pair, which JSON can express and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Invalid([Problem("", got(text), "must be valid Unicode")]) from None
    return text


Integer = Annotated[int, BeforeValidator(_integer)]
Text = Annotated[str, AfterValidator(_unicode)]


class Request(BaseModel):
    """One row of a request. Omitted fields take the model's own settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    n: Annotated[Integer, Field(ge=1, le=MAX_IMAGES)]
    seed: Annotated[Integer, Field(ge=0, lt=2**63)] | None = None
    first: Annotated[Integer, Field(ge=0, le=2**31)] = 0  # the number of the first image
    class_: Text | Integer | None = Field(None, alias="class")  # its name or its number
    prompt: Text | None = None
    sampler: SamplerName | None = None
    steps: Annotated[Integer, Field(ge=1)] | None = None
    guidance: Annotated[float, Field(ge=0.0)] | None = None
    format: Literal["png", "array"] = "png"


FIELDS = tuple(fields_of(Request))
AnyRequest = TypeVar("AnyRequest", bound=Request)
# Settings that a request changes, and its fields that do so.
_FIELD_OF = {f"sample.{name}": name for name in ("seed", "sampler", "steps", "guidance")}
_FIELD_OF |= {"sample.classes": "class", "sample.prompts": "prompt"}


@dataclass(frozen=True)
class Task:
    """The images of a row of a request.

    Attributes:
        numbers: The numbers of the images.
        settings: How to draw them.
        format: Their encoding.
        toward: A second seed. All images then have the first number, and go from one seed to the
            other.
        original: The image that they start from.
        recipe: What images must have in common to be drawn in one batch.
    """

    numbers: range
    settings: Sample
    format: str
    toward: int | None = None
    original: Original | None = None
    recipe: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings.model_copy(update={"seed": 0, "classes": None, "prompts": None})
        original = self.original
        edit = original and (original.strength, original.redrawn is None, original.passes)
        object.__setattr__(self, "recipe", (settings, edit))

    @property
    def passes(self) -> int:
        """How often each update is made, at most: several times under a mask."""
        original = self.original
        return 1 if original is None or original.redrawn is None else original.passes


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
    """Validate one row. Raises UserError with every invalid field of the row."""
    return parse_as(Request, row)


def parse_as(model: type[AnyRequest], row: Mapping[str, Any]) -> AnyRequest:
    """Validate one row. None and NaN, the gaps of a table, count as omitted.

    Raises:
        UserError: with every invalid field of the row.
    """
    fields = fields_of(model).keys()
    given = {key: value for key, value in row.items() if key in fields and not _is_gap(value)}
    # Only some unknown keys, and cut: finding similar names takes time, and an answer is short.
    for key in sorted(row.keys() - fields)[:MAX_UNKNOWN]:
        given[repr(key[:MAX_SHOWN])[1:-1]] = None  # JSON may contain what UTF-8 cannot express
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise invalid(problems_of(error, model), "the request") from None


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
    conditioning = config.model.conditioning
    if request.class_ is not None:
        by_class = conditioning == "class"
        name = _class(request.class_, classes) if by_class else str(request.class_)
        changed["classes"] = (name,)
    if request.prompt is not None:
        changed["prompts"] = (request.prompt,)
    settings = config.sample.model_copy(update=changed)
    found = settings.problems(conditioning, config.diffusion.timesteps, config.train.label_drop)
    if found:
        problems = [replace(p, path=_FIELD_OF.get(p.path, p.path)) for p in found]
        raise invalid(problems, "the request")
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
    work = sum(
        len(task.numbers) * pixels * task.settings.evaluations * task.passes for task in tasks
    )
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
    expected = f"must be one of {listed}, or a number from 0 to {len(classes) - 1}"
    raise invalid([Problem("class", got(value), expected)], "the request")


def _is_gap(value: object) -> bool:
    """Return whether a value is None, or the NaN that represents None in a table."""
    return value is None or (isinstance(value, float) and value != value)
