"""Reads params.yaml and `-S section.key=value` overrides into a Config, telling all mistakes."""

from __future__ import annotations

import difflib
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
    path: Path | None = None, overrides: Sequence[str] = (), workspace: str | None = None
) -> Config:
    """The Config of a params file; without one, the built-in defaults (the digits).

    `overrides` are `section.key=value`, the value in YAML. Raises UserError with every mistake.
    """
    given = yaml_text.read(path, "params file", _NEEDED) if path is not None else {}
    return _resolve(given, overrides, workspace, f" in {path}" if path is not None else "")


def load_text(
    text: str, name: str, overrides: Sequence[str] = (), workspace: str | None = None
) -> Config:
    """The Config of a params file's text, which errors call by `name`; otherwise as `load`."""
    return _resolve(yaml_text.parse(text, name, _NEEDED), overrides, workspace, f" in {name}")


def _resolve(
    given: dict[str, Any], overrides: Sequence[str], workspace: str | None, origin: str
) -> Config:
    mistakes = [mistake for item in overrides if (mistake := _override(given, item))]
    if mistakes:
        raise UserError("\n".join(mistakes))
    if workspace is not None:
        given["workspace"] = workspace
    return _absolute(validate(given, origin))


def validate(given: dict[str, Any], origin: str = "") -> Config:
    """The Config of plain data, or a UserError that lists all mistakes, each with its path."""
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        lines = list(dict.fromkeys(line for line in _sentences(error)))
    else:
        lines = list(_nameless(config))
        if not lines:
            return config
    noun = "mistake" if len(lines) == 1 else "mistakes"
    raise UserError(f"{len(lines)} {noun}{origin}:\n" + "\n".join(f"  {line}" for line in lines))


def _nameless(config: Config) -> Iterable[str]:
    """An empty path, such as a variable of the shell that is not set, is no current folder."""
    if not config.workspace.strip():
        yield "workspace: '' given; a directory is needed, or s3://bucket/prefix"
    if not config.prepare.source.strip():
        yield "prepare.source: '' given; digits, a directory or another source is needed"


def _override(given: dict[str, Any], item: str) -> str | None:
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
        elif item["type"] == "value_error":
            yield from _own_sentences(path, str(item["msg"]))
        else:
            arms = allowed.setdefault((path or "params", _show(item["input"])), [])
            arms.append(_allowed(item))
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
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
        else:
            rest = [f"[{p}]" for p in location[location.index(part) + 1 :] if isinstance(p, int)]
            return path + "".join(rest), model
    return path, model


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section by the name they have in a params file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _unknown(path: str, model: type[BaseModel]) -> str:
    parent, _, key = path.rpartition(".")
    names = list(_fields(model))
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known here are {', '.join(names)}"
    return f"{path}: unknown key{f' in {parent}' if parent else ''}; {hint}"


def _own_sentences(path: str, message: str) -> Iterable[str]:
    for line in message.removeprefix("Value error, ").splitlines():
        yield f"{path}.{line}" if path else line


def _allowed(item: Any) -> str:
    if "pattern" in item["type"]:
        return f"a text that matches {item['ctx']['pattern']}"
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
