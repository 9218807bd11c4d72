"""YAML files are read as people mean them, or refused with the line and the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpm_core.config import load as params
from ddpm_core.config import yaml_text
from ddpm_core.errors import UserError


def parse(text: str) -> dict[str, Any]:
    return yaml_text.parse(text, "params.yaml", "sections")


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(levels):
        lines.append(f"a{level + 1}: &a{level + 1} [{', '.join([f'*a{level}'] * 10)}]")
    return "\n".join(lines)


INVALID = [
    ("workspace: 2024-02-30", "line 1: '2024-02-30' is not a valid timestamp"),
    ("seed: 0x_", "'0x_' is not a valid int"),
    ("a: 1\nseed: !!int abc", "line 2: 'abc' is not a valid int"),
    ("seed: !!bool abc", "'abc' is not a valid bool"),
    ("seed: !!timestamp abc", "'abc' is not a valid timestamp"),
    ("seed: !!float abc", "'abc' is not a valid float"),
    ("seed: " + "9" * 6000, "'9{60}' is not a valid int"),
    ("seed: 0x" + "f" * 6000, "too many digits"),
    ("? 0x" + "f" * 6000 + "\n: 1", "too many digits"),
    ("a: &a [*a]", "an alias inside the value that it refers to"),
    ("a: &a {b: {c: *a}}", "an alias inside the value that it refers to"),
    ("a: &a {<<: *a}", "an alias inside the value that it refers to"),
    ("a: " + "[" * 1000, "nested too deeply"),
    ("a: " + "[" * 1000 + "]" * 1000, "nested too deeply"),
    ("a: " + "{b: " * 1000 + "}" * 1000, "nested too deeply"),
    (bomb(9), "more than 100,000 values"),
    ("a: 1\n'a': 2", "line 2: duplicate key 'a'"),
    ("a: {1: x, '1': y}", "duplicate key '1'"),
    ("a: {? [x] : 1}", "a key must be a single value"),
    ("<<: 3", "<< requires a mapping"),
    ("a: !!python/name:os.system", "unsupported tag .*python/name:os.system"),
    ("a:\n\tb: 1", r"line 2: a tab; indent with spaces\.$"),
    ("a:\n  b: 1\n c: 2", "line 3: its indentation does not match the lines above it"),
    ("a: b: c", "line 1: unexpected colon; quote a text that contains one"),
    ("a: 'b", "line 1: a quote that is not closed"),
    ("a: \x01", "line 1: the character '.x01' is not allowed"),
    ("a: {b: #ffffff, c: 1}\nd: 2", "# starts a comment: quote '#ffffff'"),
    ("a: {b: #fff}", "quote '#fff'"),
]


@pytest.mark.parametrize(("text", "message"), INVALID, ids=range(len(INVALID)))
def test_invalid_yaml_names_line_and_reason(text: str, message: str) -> None:
    with pytest.raises(
        UserError, match=rf"params\.yaml is not valid YAML: .*({message})"
    ) as caught:
        parse(text)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "value",
    [
        "2024-02-30",
        "0x_",
        "!!int abc",
        "!!bool x",
        "9" * 6000,
        "0x" + "f" * 6000,
        "&a [*a]",
        "[" * 1000,
        bomb(9),
    ],
    ids=range(9),
)
def test_invalid_yaml_after_S_names_the_setting(value: str) -> None:
    with pytest.raises(UserError, match=r"(?s)-S seed: .*is not a YAML value$"):
        params.load(None, [f"seed={value}"])


@pytest.mark.parametrize("number", ["010000", "0123", "1:30", "1:30.5", "-012", "00", "0_7"])
def test_octal_and_base_60_numbers_are_texts(number: str) -> None:
    assert parse(f"a: {number}") == {"a": number}
    with pytest.raises(UserError, match=rf"train.steps: got '{number}'; must be an integer"):
        params.load(None, [f"train.steps={number}"])


def test_number_formats_are_recognized() -> None:
    given = "[0, -1, +2, 1_000, 0.5, .5, 1., 1e3, -2.5E-1, 0x10, 200_000, -.inf]"
    meant = [0, -1, 2, 1000, 0.5, 0.5, 1.0, 1e3, -0.25, 16, 200_000, float("-inf")]
    assert yaml_text.value(given) == meant
    assert [type(one) for one in yaml_text.value(given)] == [type(one) for one in meant]


@pytest.mark.parametrize("word", ["yes", "on", "True", "no", "Off", "FALSE"])
def test_yes_and_no_are_truth_values(word: str) -> None:
    assert yaml_text.value(word) is (word in ("yes", "on", "True"))


def test_merge_keys_are_defaults_of_a_mapping() -> None:
    text = """
    base: &b {x: 1, y: 2}
    more: &m {y: 3, z: 4}
    own: {<<: *b, y: 9}
    both: {<<: [*m, *b]}
    nested: {deep: {deeper: &d {<<: *b, x: 7}}}
    again: {<<: *d, y: 8}
    """
    given = parse(text)
    assert given["own"] == {"x": 1, "y": 9}
    assert given["both"] == {"x": 1, "y": 3, "z": 4}
    assert given["nested"]["deep"]["deeper"] == {"x": 7, "y": 2}
    assert given["again"] == {"x": 7, "y": 8}
    assert parse("a: {<<: {x: 1}, x: 2}") == {"a": {"x": 2}}
    with pytest.raises(UserError, match="duplicate key 'y'"):
        parse("base: &b {x: 1}\nown: {<<: *b, y: 9, y: 8}")


def test_aliases_are_independent_copies() -> None:
    given = parse("a: &a {x: [1]}\nb: *a\nc: {d: *a}")
    given["a"]["x"].append(2)
    assert given["b"] == {"x": [1]} and given["c"] == {"d": {"x": [1]}}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_mark_selects_the_encoding(tmp_path: Path, encoding: str) -> None:
    """`ddpm params > params.yaml` in Windows PowerShell writes UTF-16."""
    file = tmp_path / "params.yaml"
    file.write_text("source: caf\u00e9\n", encoding=encoding)
    assert yaml_text.read(file, "params file", "sections") == {"source": "caf\u00e9"}
    file.write_bytes(b"source: caf\xe9\n")
    with pytest.raises(UserError, match=r"params\.yaml is not UTF-8 text: .* at byte 11\. Save it"):
        yaml_text.read(file, "params file", "sections")
