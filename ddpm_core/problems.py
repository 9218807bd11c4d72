"""What pydantic found wrong with settings, requests and files, as `Problem` objects."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ddpm_core.errors import Invalid, Problem, got


def problems_of(error: ValidationError, model: type[Any], described: bool = False) -> list[Problem]:
    """Return every problem of a ValidationError of `model`, a section or a pydantic dataclass.

    With `described`, the description of a field with a pattern says in words what matches it.
    """
    found: list[Problem] = []
    allowed: dict[tuple[str, str], list[str]] = {}  # of unions: one expectation per arm
    for item in error.errors(include_url=False):
        path, section = _locate(item["loc"], model)
        cause = item.get("ctx", {}).get("error")
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            found.append(_unknown(str(item["loc"][-1]), path, section, model))
        elif item["type"] == "missing":
            found.append(Problem(path, "missing (required)"))
        elif item["type"] == "model_type":
            keys = ", ".join(fields_of(section))
            found.append(Problem(path, got(item["input"]), f"must be a section with {keys}"))
        elif isinstance(cause, Invalid):
            found += [problem.below(path) if path else problem for problem in cause.problems]
        else:
            arms = allowed.setdefault((path or "params", got(item["input"])), [])
            field = fields_of(section).get(path.rpartition(".")[2])
            arms.append(_expected(item, field.description if field and described else None))
    for (path, given), arms in allowed.items():
        found.append(Problem(path, given, f"must be {', or '.join(dict.fromkeys(arms))}"))
    return found


def fields_of(model: type[Any]) -> dict[str, FieldInfo]:
    """Return the fields of a section by the name that they have in a params file."""
    return {field.alias or name: field for name, field in model.__pydantic_fields__.items()}


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field contains, None if it contains a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _section_of_items(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that each item of a list contains, None if the field is no such list."""
    kind = next(iter(get_args(field.annotation)), None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _locate(location: tuple[int | str, ...], model: type[Any]) -> tuple[str, type[Any]]:
    """Return the dotted path of a location and its section.

    pydantic adds the names of the arms of a union to a location. The path does not contain them.
    """
    path = ""
    for index, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        field = fields_of(model).get(part)
        if field is None:
            if not path or (part.replace("_", "").isalnum() and part == location[-1]):
                path += f".{part}" if path else part
            break
        path += f".{part}" if path else part
        section = section_of(field) or _section_of_items(field)
        if section is None:
            below = location[index + 1 :]
            if get_origin(field.annotation) is dict:
                return ".".join([path, *map(str, below[:1])]), model
            return path + "".join(f"[{p}]" for p in below if isinstance(p, int)), model
        model = section
    return path, model


def _unknown(key: str, path: str, section: type[Any], model: type[Any]) -> Problem:
    """Return the problem of a key that does not exist, with the most likely intention."""
    paths = list(_paths(model))
    first, *below = key.split(".")
    if below and key in paths:  # a dotted path, as after -S
        lines = "".join(f", below it `{name}:`" for name in below)
        return Problem(key, "a path is not a key", hint=f"in a file, write `{first}:`{lines}")
    parent, _, key = path.rpartition(".")
    close = difflib.get_close_matches(key, fields_of(section), n=1) or _elsewhere(
        key, parent, paths
    )
    if key.isdecimal():  # {steps: 20,000} are two keys
        hint = "write a number without commas, as in 20_000"
    elif close:
        hint = f"did you mean {close[0]}?"
    else:
        hint = f"known keys: {', '.join(fields_of(section))}"
    return Problem(path, f"unknown key in {parent}" if parent else "unknown key", hint=hint)


def _elsewhere(key: str, parent: str, paths: Iterable[str]) -> list[str]:
    """Return the one path of a key in another section, preferably in one below `parent`."""
    found = [path for path in paths if path.rpartition(".")[2] == key]
    below = [path for path in found if path.startswith(f"{parent}.")]
    return (below or found) if len(below or found) == 1 else []


def _paths(model: type[Any], prefix: str = "") -> Iterable[str]:
    """Yield the dotted path of every setting and section."""
    for name, field in fields_of(model).items():
        yield prefix + name
        if section := section_of(field):
            yield from _paths(section, f"{prefix}{name}.")


# Expectations by pydantic's type of error, with the values of its context.
_EXPECTED = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_too_long": "a text of at most {max_length} characters",
    "string_too_short": "a text that is not empty",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "dict_type": "a mapping of names to texts",
}


def _expected(item: Any, pattern: str | None) -> str:
    """Return what a setting may be. `pattern` says in words what matches its pattern."""
    kind, given = item["type"], item["input"]
    if kind == "string_pattern_mismatch" and pattern:
        return pattern
    if kind in _EXPECTED:
        bounds = {name: _short(bound) for name, bound in item.get("ctx", {}).items()}
        return _EXPECTED[kind].format(**bounds)
    if kind == "string_type":
        if given is None:
            return "a text; quote a text that is null or begins with #"
        return "a text" if isinstance(given, list | dict) else "a text in quotes"
    if kind == "bool_type":
        quoted = isinstance(given, str) and given.lower() in ("true", "false")
        return "true or false without quotes" if quoted else "true or false"
    if kind == "tuple_type":
        return f"a list, as in [{given}]" if isinstance(given, str | int | float) else "a list"
    if kind in ("int_type", "float_type"):
        return ("an integer" if kind == "int_type" else "a number") + _number_format(given)
    return f"valid ({item['msg']})"


def _short(bound: Any) -> Any:
    """Return 1024 for 1024.0, which both arms of int | float are then limited by."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _number_format(given: Any) -> str:
    """Return how to write a number that was given as a text."""
    text = given if isinstance(given, str) else ""
    if re.fullmatch(r"[-+]?0[0-9_]+", text):
        return " that does not begin with 0"  # in YAML 1.1 it would be an octal number
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+", text):
        return f" without commas, as in {text.replace(',', '_')}"
    return " without quotes" if re.fullmatch(r"[-+]?\d+(\.\d*)?", text) else ""
