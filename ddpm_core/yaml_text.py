"""YAML that a person wrote, as plain data: no key twice, 1e-3 a number, each mistake a sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ddpm_core.errors import UserError

MOST = 100_000  # values, aliases followed
_BITS = 1024  # of a whole number; Python writes none of many thousand digits
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would keep the last in silence, and
    aliases that make a small text a large document."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            self._weigh(node, {})
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A value that its type does not allow, such as a 30 February, is told with its line."""
        try:
            made = super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = node.tag.rpartition(":")[2]
            raise _wrong(f"{str(node.value)[:60]!r} is no {kind}", node) from error
        if isinstance(made, int) and made.bit_length() > _BITS:
            raise _wrong("a number has too many digits", node)
        return made

    def _weigh(self, node: yaml.Node, known: dict[yaml.Node, int]) -> int:
        """How many values a node holds; 0 in `known` for those in which this one lies."""
        if node in known:
            if not known[node]:
                raise _wrong("an alias stands inside of what it stands for", node)
            return known[node]
        known[node] = 0
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        size = 1 + sum([self._weigh(part, known) for part in parts])
        if size > MOST:
            raise _wrong(f"there are more than {MOST:,} values, aliases followed", node)
        if isinstance(node, yaml.MappingNode):
            self._merge(node)
        known[node] = size
        return size

    def _merge(self, node: yaml.MappingNode) -> None:
        """Put the keys of `<<: *base` among the node's own, which count where both have one."""
        own = [pair for pair in node.value if pair[0].tag != _MERGE]
        named: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for pair in own:
            if (name := self._name(pair[0])) in named:
                raise _wrong(f"key {name!r} stands twice", node)
            named[name] = pair
        for _, given in [pair for pair in node.value if pair[0].tag == _MERGE]:
            for base in given.value if isinstance(given, yaml.SequenceNode) else [given]:
                if not isinstance(base, yaml.MappingNode):
                    raise _wrong("<< needs a mapping or a list of them", base)
                for pair in base.value:
                    named.setdefault(self._name(pair[0]), pair)
        node.value = list(named.values())

    def _name(self, key: yaml.Node) -> str:
        return str(self.construct_object(key, deep=True))


def _wrong(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


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
        given = _load(content)
    except yaml.YAMLError as error:
        raise UserError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UserError(f"{name} holds a {type(given).__name__}; {needed} are needed.")
    return given


def value(content: str) -> Any:
    """A value as a command line gives it. Raises ValueError."""
    try:
        return _load(content)
    except yaml.YAMLError as error:
        shown = content if len(content) <= 60 else content[:57] + "..."
        raise ValueError(f"{shown!r} is not a YAML value") from error


def _load(content: str) -> Any:
    """Raises yaml.YAMLError."""
    try:
        return _named(yaml.load(content, Loader=_Loader))
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error


def _named(given: Any) -> Any:
    """The same with texts as keys, as in JSON."""
    if isinstance(given, dict):
        return {str(key): _named(item) for key, item in given.items()}
    return [_named(item) for item in given] if isinstance(given, list) else given
