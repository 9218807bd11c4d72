"""Reads params.yaml and `-S section.key=value` overrides into a Config, telling all mistakes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ddpm_core import yaml_text
from ddpm_core.config import Config
from ddpm_core.errors import UserError

_NEEDED = "sections such as `train:`"


def load(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    workspace: str | None = None,
    trained: bool = False,
) -> Config:
    """The Config of a params file; without one, the built-in defaults (the digits).

    `overrides` are `section.key=value`, the value in YAML. Raises UserError with every mistake;
    for what is `trained` already `sample` need not suit `model` and `diffusion`, which only train.
    """
    given = yaml_text.read(path, "params file", _NEEDED) if path is not None else {}
    origin = f" in {path}" if path is not None else ""
    return _resolve(given, overrides, workspace, origin, trained)


def load_text(
    text: str, name: str, overrides: Sequence[str] = (), workspace: str | None = None
) -> Config:
    """The Config of a params file's text, which errors call by `name`; otherwise as `load`."""
    return _resolve(yaml_text.parse(text, name, _NEEDED), overrides, workspace, f" in {name}")


def _resolve(
    given: dict[str, Any],
    overrides: Sequence[str],
    workspace: str | None,
    origin: str,
    trained: bool = False,
) -> Config:
    mistakes = [mistake for item in overrides if (mistake := override(given, item))]
    if workspace is not None:
        given["workspace"] = workspace
    return _absolute(validate(given, origin, mistakes, trained))


def validate(
    given: dict[str, Any], origin: str = "", mistakes: Sequence[str] = (), trained: bool = False
) -> Config:
    """The Config of plain data, or a UserError that lists all mistakes, each with its path.

    `mistakes` were found before. Settings are compared with each other once each is right by
    itself, so what is wrong is left out for another look at the rest.
    """
    lines, left_out, rest = list(mistakes), list[str](), given
    while True:
        try:
            config = Config.model_validate(rest, context={"trained": trained})
        except ValidationError as error:
            lines += [line for line in _sentences(error) if not _mentions(line, left_out)]
            paths = [path for item in error.errors() if (path := _leave_out(item["loc"], rest))]
        else:
            lines += _nameless(config)
            paths = []
        if not paths:
            break
        left_out += [".".join(path) for path in paths]
        for path in paths:
            rest = _without(rest, path)
    if not lines:
        return config
    lines = list(dict.fromkeys(lines))
    noun = "mistake" if len(lines) == 1 else "mistakes"
    raise UserError(f"{len(lines)} {noun}{origin}:\n" + "\n".join(f"  {line}" for line in lines))


def _leave_out(location: tuple[int | str, ...], given: dict[str, Any]) -> list[str]:
    """The keys that lead to the innermost value that a mistake's location names."""
    path: list[str] = []
    node: Any = given
    for part in location:
        if not isinstance(node, dict) or not isinstance(part, str) or part not in node:
            break
        path.append(part)
        node = node[part]
    return path


def _without(given: dict[str, Any], path: list[str]) -> dict[str, Any]:
    key, *below = path
    rest = {name: value for name, value in given.items() if name != key}
    if below and isinstance(given.get(key), dict):
        rest[key] = _without(given[key], below)
    return rest


def _mentions(line: str, paths: Iterable[str]) -> bool:
    return any(re.search(rf"\b{re.escape(path)}\b", line) for path in paths)


def _nameless(config: Config) -> Iterable[str]:
    """An empty path, such as a variable of the shell that is not set, is no current folder."""
    if not config.workspace.strip():
        yield "workspace: '' given; a directory is needed, or s3://bucket/prefix"
    if not config.prepare.source.strip():
        yield "prepare.source: '' given; digits, a directory or another source is needed"


def override(given: dict[str, Any], item: str) -> str | None:
    """Set one `a.b=value` in `given`; the mistake in it, if there is one."""
    path, equals, text = item.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return f"-S {item}: section.key=value is needed, as in -S train.steps=2000"
    try:
        value = yaml_text.value(text)
    except ValueError as error:
        return f"-S {item}: {error}"
    node = given
    for key in keys[:-1]:
        if not isinstance(node.setdefault(key, {}), dict):
            return f"-S {item}: {key} is a value, not a section"
        node = node[key]
    node[keys[-1]] = value
    return None


def _sentences(error: ValidationError) -> Iterable[str]:
    allowed: dict[tuple[str, str], list[str]] = {}
    for item in error.errors(include_url=False):
        path, model = _path(item["loc"])
        if item["type"] == "extra_forbidden":
            yield _unknown(path, model)
        elif item["type"] == "missing":
            yield f"{path}: absent; it is needed"
        elif item["type"] == "model_type":
            keys = ", ".join(_fields(model))
            yield f"{path}: {_show(item['input'])} given; a section with {keys} is needed"
        elif item["type"] == "value_error":
            yield from _own_sentences(path, str(item["msg"]))
        else:
            arms = allowed.setdefault((path or "params", _show(item["input"])), [])
            field = _fields(model).get(path.rpartition(".")[2])
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
        field = _fields(model).get(part)
        if field is None:
            if not path or (part.replace("_", "").isalnum() and part == location[-1]):
                path += f".{part}" if path else part
            break
        path += f".{part}" if path else part
        if section := _section(field):
            model = section
        else:
            rest = [f"[{p}]" for p in location[location.index(part) + 1 :] if isinstance(p, int)]
            return path + "".join(rest), model
    return path, model


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section by the name they have in a params file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _unknown(path: str, model: type[BaseModel]) -> str:
    parent, _, key = path.rpartition(".")
    names = list(_fields(model))
    close = difflib.get_close_matches(key, names, n=1) or _elsewhere(key, parent)
    hint = f"did you mean {close[0]}?" if close else f"known here are {', '.join(names)}"
    return f"{path}: unknown key{f' in {parent}' if parent else ''}; {hint}"


def _elsewhere(key: str, parent: str) -> list[str]:
    """The dotted path of the same key in another section, rather in one below `parent`."""
    found = [path for path in _paths(Config) if path.rpartition(".")[2] == key]
    below = [path for path in found if path.startswith(f"{parent}.")]
    return (below or found) if len(below or found) == 1 else []


def _paths(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in _fields(model).items():
        yield prefix + name
        if section := _section(field):
            yield from _paths(section, f"{prefix}{name}.")


def _own_sentences(path: str, message: str) -> Iterable[str]:
    for line in message.removeprefix("Value error, ").splitlines():
        yield f"{path}.{line}" if path else line


def _allowed(item: Any, description: str | None) -> str:
    """What a setting may be; a pattern is for programs, so people read the field's description."""
    if "pattern" in item["type"]:
        return description or f"a text that matches {item['ctx']['pattern']}"
    if item["type"] == "too_short":
        return f"a list of at least {item['ctx']['min_length']}"
    message = str(item["msg"]).removeprefix("Input should be ").replace("a valid tuple", "a list")
    return message[0].lower() + message[1:]


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _absolute(config: Config) -> Config:
    """Make a relative SQLite store absolute.

    `dvc exp run --queue` runs in a copy of the repository below .dvc/tmp/exps, where a relative
    store would be thrown away with the copy: it then means the repository's own.
    """
    prefix, uri = "sqlite:///", config.tracking.uri
    if not uri.startswith(prefix) or uri.startswith(f"{prefix}/") or uri == f"{prefix}:memory:":
        return config
    home = Path.cwd()
    parts = home.parts
    for index in range(len(parts) - 2):
        if parts[index : index + 3] == (".dvc", "tmp", "exps"):
            home = Path(*parts[:index])
            break
    tracking = config.tracking.model_copy(
        update={"uri": f"{prefix}{home / uri.removeprefix(prefix)}"}
    )
    return config.model_copy(update={"tracking": tracking})
