"""YAML that a person wrote, as plain data: no key twice, 1e-3 a number, each mistake a sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ddpm_core.errors import UserError
from ddpm_core.storage.files import text_of

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
                raise _wrong(f"key {name!r} stands twice", pair[0])
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


# Numbers as people mean them. YAML 1.1, which PyYAML reads, takes 1e-3 for a text, 0123 for the
# octal 83 and 1:30 for 90 of base 60: here the first is a number, the others are texts.
_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$",
    "tag:yaml.org,2002:float": r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$"
    r"|[-+]?\d+[eE][-+]?\d+$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list("-+.0123456789"))


def read(path: Path, what: str, needed: str) -> dict[str, Any]:
    """The mapping in a file, empty where the file is.

    Errors call the file `what`, and what it does not hold `needed`. Raises UserError.
    """
    return parse(text(path, what), str(path), needed)


def text(path: Path, what: str) -> str:
    """The text of a file that errors call `what`. Raises UserError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read the {what} {path}: {error.strerror}.") from error
    return text_of(data, str(path))


def parse(content: str, name: str, needed: str) -> dict[str, Any]:
    """The mapping in a text that errors call by `name`; otherwise as `read`."""
    try:
        given = _load(content)
    except yaml.YAMLError as error:
        raise UserError(f"{name} is not valid YAML: {_told(error, content)}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UserError(f"{name} holds a {type(given).__name__}; {needed} are needed.")
    return given


# The beginning of what PyYAML says, and the same for people.
_PLAIN = {
    "expected <block end>": "its indentation does not suit the lines above it",
    "found unexpected end of stream": "a quote that nothing closes",
    "mapping values are not allowed": "a colon where none can be; a text that has one needs quotes",
}


def _told(error: yaml.YAMLError, content: str) -> str:
    """What is wrong with a text, and in which line."""
    if isinstance(error, yaml.reader.ReaderError):
        line = content.count("\n", 0, error.position) + 1
        return f"line {line}: the character {chr(error.character)!r} is not allowed."
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{error}."
    last = error.problem_mark.line
    first = error.context_mark.line if error.context_mark else last
    lines = content.splitlines()[first : last + 1]
    if lines and re.match(r"\s*\t", lines[-1]):
        return f"line {last + 1}: a tab; YAML takes spaces only."
    problem = str(error.problem)
    told = next((told for said, told in _PLAIN.items() if problem.startswith(said)), problem)
    since = f", {error.context} that begins in line {first + 1}" if first < last else ""
    told = f"line {last + 1}: {told}{since}."
    colors = re.findall(r"[:,\[{]\s*(#[0-9a-fA-F]{3,8})\b", "\n".join(lines))
    return f"{told} After # all is a comment: quote {colors[0]!r}." if colors else told


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
