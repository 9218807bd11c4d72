"""YAML that a person wrote, as plain data: no key twice, 1e-3 a number, each mistake a sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ddpm_core.errors import UserError


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would keep the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.MarkedYAMLError(
                problem=f"key {twice[0]!r} stands twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML reads, takes 1e-3 for a text: a number here needs no dot.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read(path: Path, what: str, needed: str) -> dict[str, Any]:
    """The mapping in a file, empty where the file is.

    Errors call the file `what`, and what it does not hold `needed`. Raises UserError.
    """
    return parse(text(path, what), str(path), needed)


def text(path: Path, what: str) -> str:
    """The text of a file that errors call `what`. Raises UserError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot read the {what} {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}).") from error


def parse(content: str, name: str, needed: str) -> dict[str, Any]:
    """The mapping in a text that errors call by `name`; otherwise as `read`."""
    try:
        given = yaml.load(content, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UserError(f"{name} holds a {type(given).__name__}; {needed} are needed.")
    named: dict[str, Any] = _named(given)
    return named


def value(content: str) -> Any:
    """A value as a command line gives it. Raises ValueError."""
    try:
        return _named(yaml.load(content, Loader=_Loader))
    except yaml.YAMLError as error:
        raise ValueError(f"{content!r} is not a YAML value") from error


def _named(given: Any) -> Any:
    """The same with texts as keys, as in JSON."""
    if isinstance(given, dict):
        return {str(key): _named(item) for key, item in given.items()}
    return [_named(item) for item in given] if isinstance(given, list) else given
