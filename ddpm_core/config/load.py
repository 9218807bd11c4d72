"""Reads params.yaml and `-S section.key=value` overrides into a Config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ddpm_core.config import Config, yaml_text
from ddpm_core.config.mistakes import fields_of, section_of, sentences
from ddpm_core.config.paths import output_path
from ddpm_core.errors import UserError
from ddpm_core.text import counted

_NEEDED = "sections such as `train:`"


def load(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    workspace: str | None = None,
    trained: bool = False,
) -> Config:
    """The Config of a params file; without one, the built-in defaults (the digits).

    `overrides` are `section.key=value`, the value in YAML or, where a text is wanted, as it stands.
    Raises UserError with every mistake; for what is `trained` already `sample` need not suit
    `model` and `diffusion`, which only train.
    """
    given = yaml_text.read(path, "params file", _NEEDED) if path is not None else {}
    origin = f" in {path}" if given else ""
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
    mistakes, options = list[str](), dict[str, str]()
    alone, given = not given, _filled(given, Config)
    for item in overrides:
        path = _new(given, item.partition("=")[0].strip())
        if mistake := override(given, item):
            mistakes.append(mistake)
        else:
            options[path] = "-S"
    if workspace is not None:
        given["workspace"], options["workspace"] = workspace, "-w"
    return _absolute(validate(given, origin, mistakes, trained, {} if alone else options))


def _new(given: Any, path: str) -> str:
    """The beginning of a dotted path that `given` does not have yet; all of it where it has."""
    keys = path.split(".")
    for number, key in enumerate(keys, 1):
        given = given.get(key) if isinstance(given, dict) else None
        if given is None:
            return ".".join(keys[:number])
    return path


def _filled(given: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """The same, with nothing where all settings of a section are commented out."""
    sections = {name: section for name, f in fields_of(model).items() if (section := section_of(f))}
    filled = dict(given)
    for name in sections.keys() & given.keys():
        below = {} if given[name] is None else given[name]
        filled[name] = _filled(below, sections[name]) if isinstance(below, dict) else below
    return filled


def validate(
    given: dict[str, Any],
    origin: str = "",
    mistakes: Sequence[str] = (),
    trained: bool = False,
    options: Mapping[str, str] | None = None,
) -> Config:
    """The Config of plain data, or a UserError that lists all mistakes, each with its path.

    `origin` is where they stand, as in " in params.yaml", apart from the paths that `options` set:
    {path: option}. `mistakes` were found before. Settings are compared with each other once each
    is right by itself, so what is wrong is left out for another look at the rest.
    """
    lines, left_out, rest = list(mistakes), list[str](), given
    while True:
        try:
            config = Config.model_validate(rest, context={"trained": trained})
        except ValidationError as error:
            lines += [line for line in sentences(error) if not _mentions(line, left_out)]
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
    raise UserError(_listed(list(dict.fromkeys(lines)), origin, options or {}))


def _listed(lines: list[str], origin: str, options: Mapping[str, str]) -> str:
    """All mistakes, and whether the file is to blame or an option."""
    if origin:
        marked = [_marked(line, options) for line in lines]
        elsewhere = all(a != b or a.startswith("-S ") for a, b in zip(lines, marked, strict=True))
        with_options = f" with {', '.join(sorted(set(options.values())))}" if options else ""
        lines, origin = marked, "" if elsewhere else origin + with_options
    return f"{counted(len(lines), 'mistake')}{origin}:\n" + "\n".join(f"  {line}" for line in lines)


def _marked(line: str, options: Mapping[str, str]) -> str:
    """A mistake, with the option that set what it begins with."""
    path = re.split(r"[:\[]", line, maxsplit=1)[0]
    by = [option for start, option in options.items() if f"{path}.".startswith(f"{start}.")]
    return f"{line} (given by {by[0]})" if by else line


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
        value = text.strip() if _literal(keys, text) else yaml_text.value(text)
    except ValueError as error:
        return f"-S {item}: {error}"
    node = given
    for key in keys[:-1]:
        if not isinstance(node.setdefault(key, {}), dict):
            return f"-S {item}: {key} is a value, not a section"
        node = node[key]
    node[keys[-1]] = value
    return None


def _literal(keys: Sequence[str], text: str) -> bool:
    """Whether a value is a text as it stands, so that #808080 is a color and no comment.

    null is none in quotes alone: elsewhere it means that there is nothing, here as in a file.
    """
    model: type[BaseModel] | None = Config
    for key in keys[:-1]:
        field = fields_of(model).get(key) if model else None
        model = section_of(field) if field else None
    field = fields_of(model).get(keys[-1]) if model else None
    if field is None or field.annotation is not str:
        return False
    return text.strip() != "null" and text.strip()[:1] not in ("'", '"')


def _absolute(config: Config) -> Config:
    """Make a relative SQLite store absolute, so that all experiments of a project share it."""
    prefix, uri = "sqlite:///", config.tracking.uri
    if not uri.startswith(prefix) or uri.startswith(f"{prefix}/") or uri == f"{prefix}:memory:":
        return config
    try:
        store = output_path(uri.removeprefix(prefix))
    except RuntimeError as error:  # ~ of a user that does not exist
        raise UserError(f"tracking.uri: {uri!r}: {error} Write the path in full.") from error
    tracking = config.tracking.model_copy(update={"uri": f"{prefix}{store}"})
    return config.model_copy(update={"tracking": tracking})
