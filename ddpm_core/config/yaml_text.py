"""Read YAML that a person wrote, as plain data with text keys.

ruamel.yaml parses the text. In addition, this module limits the number of values, because aliases
can turn a short text into a huge document, and reads numbers as people mean them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver, implicit_resolvers

from ddpm_core.errors import UserError
from ddpm_core.storage.files import text_of

MAX_VALUES = 100_000  # in one document, with aliases expanded
MAX_BITS = 1024  # of an integer; Python refuses to print one with thousands of digits
_TAG = "tag:yaml.org,2002:"

# 1e-3 is a number; 0123 (octal in YAML 1.1) and 1:30 (90 in base 60) are texts. yes, no, on and off
# are truth values, as in YAML 1.1.
_PATTERNS = {
    "int": (r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$", "-+0123456789"),
    "float": (
        r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$"
        r"|[-+]?\d+[eE][-+]?\d+$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$",
        "-+.0123456789",
    ),
    "bool": (
        "(yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$",
        "yYnNtTfFoO",
    ),
}


def _resolvers() -> dict[str, list[tuple[str, Any]]]:
    """Return the tags and patterns of unquoted values by the first character of the value."""
    rules: list[tuple[str, Any, Any]] = [
        (_TAG + name, re.compile(pattern), first) for name, (pattern, first) in _PATTERNS.items()
    ]
    own = {tag for tag, _, _ in rules}
    for versions, tag, pattern, first in implicit_resolvers:
        if (1, 2) in versions and tag not in own:
            rules.append((tag, pattern, first))
    characters = {character for _, _, first in rules for character in first}
    return {c: [(tag, p) for tag, p, first in rules if c in first] for c in characters}


class _Resolver(VersionedResolver):
    """Decides whether an unquoted value is a number, a truth value, a date or a text."""

    versioned_resolver = _resolvers()


class _Constructor(SafeConstructor):
    """Builds plain data; refuses duplicate keys, recursive aliases and huge documents."""

    def construct_document(self, node: Node) -> Any:
        self._count = 0
        self._open: set[Node] = set()
        return self._plain(node)

    def _plain(self, node: Node) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _error(f"more than {MAX_VALUES:,} values, with aliases expanded", node)
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            raise _error(f"unsupported tag {node.tag}", node)
        if node in self._open:
            raise _error("an alias inside the value that it refers to", node)
        self._open.add(node)
        if isinstance(node, MappingNode):
            value: Any = self._mapping(node)
        else:
            value = [self._plain(item) for item in node.value]
        self._open.remove(node)
        return value

    def _scalar(self, node: ScalarNode) -> Any:
        kind = str(node.tag).rpartition(":")[2]
        if node.tag not in self.yaml_constructors:
            raise _error(f"unsupported tag {node.tag}", node)
        try:
            value = self.construct_non_recursive_object(node)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, YAMLError):
            raise _error(f"{str(node.value)[:60]!r} is not a valid {kind}", node) from None
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise _error("a number with too many digits", node)
        return value

    def _mapping(self, node: MappingNode) -> dict[str, Any]:
        """Return a mapping; its own keys override those that `<<: *base` merges into it."""
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == f"{_TAG}merge":
                for base in value.value if isinstance(value, SequenceNode) else [value]:
                    if not isinstance(base, MappingNode):
                        raise _error("<< requires a mapping or a list of mappings", base)
                    merged = {**self._plain(base), **merged}  # the first of several bases wins
                continue
            if not isinstance(key, ScalarNode):
                raise _error("a key must be a single value, not a list or a mapping", key)
            name = str(self._plain(key))
            if name in own:
                raise _error(f"duplicate key {name!r}", key)
            own[name] = self._plain(value)
        return {**own, **{name: value for name, value in merged.items() if name not in own}}


def _error(problem: str, node: Node) -> YAMLError:
    return MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _load(content: str) -> Any:
    """Return the value of a YAML text. Raises YAMLError."""
    loader = YAML(typ="safe", pure=True)
    loader.Resolver, loader.Constructor = _Resolver, _Constructor
    try:
        return loader.load(content)
    except RecursionError as error:
        raise YAMLError("it is nested too deeply") from error


def value(content: str) -> Any:
    """Return the value of a YAML text from the command line. Raises ValueError."""
    try:
        return _load(content)
    except YAMLError as error:
        shown = content if len(content) <= 60 else content[:57] + "..."
        raise ValueError(f"{shown!r} is not a YAML value") from error


def read(path: Path, what: str, needed: str) -> dict[str, Any]:
    """Return the mapping in a file; an empty file is an empty mapping.

    Error messages call the file `what` and its expected content `needed`. Raises UserError.
    """
    return parse(text(path, what), str(path), needed)


def text(path: Path, what: str) -> str:
    """Return the text of a file, which error messages call `what`. Raises UserError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read the {what} {path}: {error.strerror}.") from error
    return text_of(data, str(path))


def parse(content: str, name: str, needed: str) -> dict[str, Any]:
    """Return the mapping in a text, which error messages call `name`; otherwise like `read`."""
    try:
        given = _load(content)
    except YAMLError as error:
        raise UserError(f"{name} is not valid YAML: {_message(error, content)}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UserError(f"{name} contains a {type(given).__name__}; must contain {needed}.")
    return given


# The beginnings of messages of ruamel.yaml, which has no error codes, in terms of the text.
_PLAIN = {
    "expected <block end>": "its indentation does not match the lines above it",
    "found unexpected end of stream": "a quote that is not closed",
    "mapping values are not allowed": "unexpected colon; quote a text that contains one",
}


def _message(error: YAMLError, content: str) -> str:
    """Return what is wrong with a text, and in which line."""
    if isinstance(error, ReaderError):
        line = content.count("\n", 0, error.position) + 1
        return f"line {line}: the character {chr(error.character)!r} is not allowed."
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return f"{error}."
    last = error.problem_mark.line
    first = error.context_mark.line if error.context_mark else last
    lines = content.splitlines()[first : last + 1]
    if lines and re.match(r"\s*\t", lines[-1]):
        return f"line {last + 1}: a tab; indent with spaces."
    problem = str(error.problem)
    problem = next((plain for start, plain in _PLAIN.items() if problem.startswith(start)), problem)
    since = f", {error.context} that begins in line {first + 1}" if first < last else ""
    message = f"line {last + 1}: {problem}{since}."
    # A colour such as #808080 is read as a comment, which then hides the closing bracket.
    colors = re.findall(r"[:,\[{]\s*(#[0-9a-fA-F]{3,8})\b", "\n".join(lines))
    return f"{message} # starts a comment: quote {colors[0]!r}." if colors else message
