"""Load params.yaml and `-S section.key=value` overrides into a Config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ddpm_core.config import Config, yaml_text
from ddpm_core.config.paths import output_path
from ddpm_core.errors import Problem, invalid
from ddpm_core.problems import fields_of, problems_of, section_of

_NEEDED = "sections such as `train:`"


def load(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    workspace: str | None = None,
    trained: bool = False,
) -> Config:
    """Return the Config of a params file, or the built-in defaults (the digits) without one.

    `overrides` are `section.key=value`. The value is YAML, except for settings that contain a text,
    which is taken literally. With `trained`, the section `sample` does not have to fit `model` and
    `diffusion`, because only training uses those.

    Raises:
        UserError: the file cannot be read, or its settings are invalid. Lists every problem.
    """
    given = yaml_text.read(path, "params file", _NEEDED) if path is not None else {}
    return _resolve(given, overrides, workspace, str(path) if given else "", trained)


def load_text(
    text: str, name: str, overrides: Sequence[str] = (), workspace: str | None = None
) -> Config:
    """Return the Config of the text of a params file, which errors call `name`. See `load`."""
    return _resolve(yaml_text.parse(text, name, _NEEDED), overrides, workspace, name)


def _resolve(
    given: dict[str, Any],
    overrides: Sequence[str],
    workspace: str | None,
    origin: str,
    trained: bool = False,
) -> Config:
    problems, options = list[Problem](), dict[str, str]()
    no_file, given = not given, _with_empty_sections(given, Config)
    for item in overrides:
        path = _new_part(given, item.partition("=")[0].strip())
        if problem := override(given, item):
            problems.append(problem)
        else:
            options[path] = "-S"
    if workspace is not None:
        given["workspace"], options["workspace"] = workspace, "-w"
    config = validate(given, origin, problems, trained, {} if no_file else options)
    return _with_absolute_store(config)


def _new_part(given: Any, path: str) -> str:
    """Return the part of a dotted path up to the first key that is missing in `given`."""
    keys = path.split(".")
    for number, key in enumerate(keys, 1):
        given = given.get(key) if isinstance(given, dict) else None
        if given is None:
            return ".".join(keys[:number])
    return path


def _with_empty_sections(given: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return settings with {} for sections that are null: all their lines are commented out."""
    sections = {name: section for name, f in fields_of(model).items() if (section := section_of(f))}
    filled = dict(given)
    for name in sections.keys() & given.keys():
        below = {} if given[name] is None else given[name]
        is_section = isinstance(below, dict)
        filled[name] = _with_empty_sections(below, sections[name]) if is_section else below
    return filled


def validate(
    given: dict[str, Any],
    origin: str = "",
    problems: Sequence[Problem] = (),
    trained: bool = False,
    options: Mapping[str, str] | None = None,
) -> Config:
    """Return the Config of plain data. Raises UserError that lists every problem.

    `origin` is the file that contains the settings, apart from the paths that `options` set, as
    {path: option}. `problems` are listed first.

    Pydantic compares settings with each other only when each is valid by itself. So this function
    removes the invalid ones and validates the rest, until nothing is invalid or nothing can be
    removed. Comparisons that involve a removed setting are not reported.
    """
    found, removed, rest = list(problems), list[str](), given
    while True:
        try:
            config = Config.model_validate(rest, context={"trained": trained})
        except ValidationError as error:
            found += [
                p for p in problems_of(error, Config, described=True) if not _involves(p, removed)
            ]
            paths = [path for item in error.errors() if (path := _innermost(item["loc"], rest))]
        else:
            break
        if not paths:
            break
        removed += [".".join(path) for path in paths]
        for path in paths:
            rest = _without(rest, path)
    if not found:
        return config
    found = [_with_option(problem, options or {}) for problem in dict.fromkeys(found)]
    if all(problem.option for problem in found):
        origin = ""  # the file itself is valid
    elif origin and options:
        origin += f" with {', '.join(sorted(set(options.values())))}"
    raise invalid(found, origin)


def _with_option(problem: Problem, options: Mapping[str, str]) -> Problem:
    """Return a problem with the option that set its path."""
    for path, option in options.items():
        if is_below(problem.path, path):
            return replace(problem, option=option)
    return problem


def is_below(path: str, start: str) -> bool:
    """Return whether a dotted path is `start` or below it, as are `start.key` and `start[0]`."""
    return path == start or path.startswith((f"{start}.", f"{start}["))


def _involves(problem: Problem, paths: Sequence[str]) -> bool:
    return any(is_below(part, path) for part in (problem.path, *problem.involves) for path in paths)


def _innermost(location: tuple[int | str, ...], given: dict[str, Any]) -> list[str]:
    """Return the keys that lead to the innermost value that pydantic's location names."""
    path: list[str] = []
    node: Any = given
    for part in location:
        if not isinstance(node, dict) or not isinstance(part, str) or part not in node:
            break
        path.append(part)
        node = node[part]
    return path


def _without(given: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """Return settings without the value at a path."""
    key, *below = path
    rest = {name: value for name, value in given.items() if name != key}
    if below and isinstance(given.get(key), dict):
        rest[key] = _without(given[key], below)
    return rest


def override(given: dict[str, Any], item: str) -> Problem | None:
    """Set one `section.key=value` in `given`. Returns the problem if that is impossible."""
    path, equals, text = item.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        expected = "must be section.key=value, as in train.steps=2000"
        return Problem(item, "invalid override", expected, option="-S")
    try:
        value = text.strip() if _is_literal(keys, text) else yaml_text.value(text)
    except ValueError as error:
        return Problem(path.strip(), str(error), option="-S")
    node = given
    for key in keys[:-1]:
        if not isinstance(node.setdefault(key, {}), dict):
            return Problem(path.strip(), f"{key} is a value, not a section", option="-S")
        node = node[key]
    node[keys[-1]] = value
    return None


def _is_literal(keys: Sequence[str], text: str) -> bool:
    """Return whether a value is a literal text, so that #808080 is a color and not a comment.

    A text in quotes is YAML, and so is null, which means no value here as in a file.
    """
    model: type[BaseModel] | None = Config
    for key in keys[:-1]:
        field = fields_of(model).get(key) if model else None
        model = section_of(field) if field else None
    field = fields_of(model).get(keys[-1]) if model else None
    if field is None or field.annotation is not str:
        return False
    return text.strip() != "null" and text.strip()[:1] not in ("'", '"')


def _with_absolute_store(config: Config) -> Config:
    """Make a relative SQLite store absolute, so that all experiments of a project share it."""
    prefix, uri = "sqlite:///", config.tracking.uri
    if not uri.startswith(prefix) or uri.startswith(f"{prefix}/") or uri == f"{prefix}:memory:":
        return config
    store = output_path(uri.removeprefix(prefix))
    tracking = config.tracking.model_copy(update={"uri": f"{prefix}{store}"})
    return config.model_copy(update={"tracking": tracking})
