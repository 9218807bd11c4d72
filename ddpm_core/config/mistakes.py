"""What is wrong with settings, in sentences: the path, what was given, what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ddpm_core.config import Config


def sentences(error: ValidationError) -> Iterable[str]:
    """A line for each mistake that pydantic found in a Config."""
    allowed: dict[tuple[str, str], list[str]] = {}
    for item in error.errors(include_url=False):
        path, model = _path(item["loc"])
        if item["type"] == "extra_forbidden":
            yield _dotted(str(item["loc"][-1])) or _unknown(path, model)
        elif item["type"] == "missing":
            yield f"{path}: absent; it is needed"
        elif item["type"] == "model_type":
            keys = ", ".join(fields_of(model))
            yield f"{path}: {_show(item['input'])} given; a section with {keys} is needed"
        elif item["type"] == "value_error":
            yield from _own_sentences(path, str(item["msg"]))
        else:
            arms = allowed.setdefault((path or "params", _show(item["input"])), [])
            field = fields_of(model).get(path.rpartition(".")[2])
            arms.append(_allowed(item, field.description if field else None))
    for (path, given), arms in allowed.items():
        yield f"{path}: {given} given; {', or '.join(dict.fromkeys(arms))} is needed"


def _path(location: tuple[int | str, ...]) -> tuple[str, type[BaseModel]]:
    """The dotted path of a mistake, without the names pydantic adds for the arms of a union."""
    model: type[BaseModel] = Config
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        field = fields_of(model).get(part)
        if field is None:
            if not path or (part.replace("_", "").isalnum() and part == location[-1]):
                path += f".{part}" if path else part
            break
        path += f".{part}" if path else part
        if section := section_of(field):
            model = section
        else:
            rest = [f"[{p}]" for p in location[location.index(part) + 1 :] if isinstance(p, int)]
            return path + "".join(rest), model
    return path, model


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section by the name they have in a params file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _dotted(key: str) -> str | None:
    """What to do with a key that is the path of a setting, as after -S."""
    first, *below = key.split(".")
    if not below or key not in _paths(Config):
        return None
    return f"{key}: in a file, write `{first}:`" + "".join(f", below it `{k}:`" for k in below)


def _unknown(path: str, model: type[BaseModel]) -> str:
    parent, _, key = path.rpartition(".")
    names = list(fields_of(model))
    close = difflib.get_close_matches(key, names, n=1) or _elsewhere(key, parent)
    hint = f"did you mean {close[0]}?" if close else f"known here are {', '.join(names)}"
    if re.fullmatch("[0-9]+", key):  # {steps: 20,000} are two keys
        hint = "write a number without commas, as in 20_000"
    return f"{path}: unknown key{f' in {parent}' if parent else ''}; {hint}"


def _elsewhere(key: str, parent: str) -> list[str]:
    """The dotted path of the same key in another section, rather in one below `parent`."""
    found = [path for path in _paths(Config) if path.rpartition(".")[2] == key]
    below = [path for path in found if path.startswith(f"{parent}.")]
    return (below or found) if len(below or found) == 1 else []


def _paths(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in fields_of(model).items():
        yield prefix + name
        if section := section_of(field):
            yield from _paths(section, f"{prefix}{name}.")


def _own_sentences(path: str, message: str) -> Iterable[str]:
    for line in message.removeprefix("Value error, ").splitlines():
        yield f"{path}.{line}" if path else line


def _allowed(item: Any, description: str | None) -> str:
    """What a setting may be; a pattern is for programs, so people read the field's description."""
    kind, given = item["type"], item["input"]
    if "pattern" in kind:
        return description or f"a text that matches {item['ctx']['pattern']}"
    if kind == "too_short":
        return f"a list of at least {item['ctx']['min_length']}"
    if kind == "too_long":
        return f"a list of at most {item['ctx']['max_length']}"
    if kind == "string_too_long":
        return f"a text of at most {item['ctx']['max_length']} characters"
    if kind == "string_too_short":
        return "a text that is not empty"
    if kind == "string_type":
        if given is None:
            return "a text in quotes, where it is null or begins with #,"
        return "a text" if isinstance(given, list | dict) else "a text in quotes"
    if kind == "bool_type":
        bare = isinstance(given, str) and given.lower() in ("true", "false")
        return "true or false, without quotes," if bare else "true or false"
    if kind == "tuple_type" and isinstance(given, str | int | float):
        return f"a list, as in [{given}],"
    message = str(item["msg"]).removeprefix("Input should be ").replace("a valid tuple", "a list")
    how = _number_is(given) if kind in ("int_type", "float_type") else ""
    return message[0].lower() + message[1:] + how


def _number_is(given: Any) -> str:
    """How a number is written that was given as a text."""
    text = str(given) if isinstance(given, str) else ""
    if re.fullmatch(r"[-+]?0[0-9_]+", text):
        return " that does not begin with 0"  # YAML 1.1 takes it for an octal one
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+", text):
        return f" without commas, as in {text.replace(',', '_')},"
    return " without quotes" if re.fullmatch(r"[-+]?\d+(\.\d*)?", text) else ""


def _show(value: Any) -> str:
    """A value as a person may have written it."""
    named = {None: "null", True: "true", False: "false"}
    text = named[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
