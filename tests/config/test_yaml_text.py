"""What a person writes in YAML is read as meant, or refused in a sentence that says where."""

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


WRONG = [
    ("workspace: 2024-02-30", "line 1: '2024-02-30' is no timestamp"),
    ("seed: 0x_", "'0x_' is no int"),
    ("a: 1\nseed: !!int abc", "line 2: 'abc' is no int"),
    ("seed: !!bool abc", "'abc' is no bool"),
    ("seed: !!timestamp abc", "'abc' is no timestamp"),
    ("seed: !!float abc", "'abc' is no float"),
    ("seed: " + "9" * 6000, "'9{60}' is no int"),
    ("seed: 0x" + "f" * 6000, "too many digits"),
    ("? 0x" + "f" * 6000 + "\n: 1", "too many digits"),
    ("a: &a [*a]", "inside of what it stands for"),
    ("a: &a {b: {c: *a}}", "inside of what it stands for"),
    ("a: &a {<<: *a}", "inside of what it stands for"),
    ("a: " + "[" * 3000, "nested too deeply"),
    ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    ("a: " + "{b: " * 3000 + "}" * 3000, "nested too deeply"),
    (bomb(9), "more than 100,000 values"),
    ("a: 1\n'a': 2", "line 2: key 'a' stands twice"),
    ("a: {1: x, '1': y}", "key '1' stands twice"),
    ("a: {? [x] : 1}", "unhashable"),
    ("<<: 3", "<< needs a mapping"),
    ("a: !!python/name:os.system", "could not determine a constructor"),
    ("a:\n\tb: 1", r"line 2: a tab; YAML takes spaces only\.$"),
    ("a:\n  b: 1\n c: 2", "line 3: its indentation does not suit the lines above it"),
    ("a: b: c", "line 1: a colon where none can be"),
    ("a: 'b", "line 1: a quote that nothing closes"),
    ("a: \x01", "line 1: the character '.x01' is not allowed"),
    ("a: {b: #ffffff, c: 1}\nd: 2", "After # all is a comment: quote '#ffffff'"),
    ("a: {b: #fff}", "quote '#fff'"),
]


@pytest.mark.parametrize(("text", "told"), WRONG, ids=range(len(WRONG)))
def test_what_can_not_be_a_document_is_one_sentence(text: str, told: str) -> None:
    with pytest.raises(UserError, match=rf"params\.yaml is not valid YAML: .*({told})") as caught:
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
        "[" * 3000,
        bomb(9),
    ],
    ids=range(9),
)
def test_the_same_on_a_command_line_names_the_setting(value: str) -> None:
    with pytest.raises(UserError, match=r"(?s)-S seed=.*is not a YAML value$"):
        params.load(None, [f"seed={value}"])


@pytest.mark.parametrize("number", ["010000", "0123", "1:30", "1:30.5", "-012", "00", "0_7"])
def test_a_number_that_yaml_1_1_reads_as_another_is_a_text(number: str) -> None:
    assert parse(f"a: {number}") == {"a": number}
    with pytest.raises(UserError, match=rf"train.steps: '{number}' given; a valid integer"):
        params.load(None, [f"train.steps={number}"])


def test_numbers_are_what_people_mean() -> None:
    given = "[0, -1, +2, 1_000, 0.5, .5, 1., 1e3, -2.5E-1, 0x10, 200_000, -.inf]"
    meant = [0, -1, 2, 1000, 0.5, 0.5, 1.0, 1e3, -0.25, 16, 200_000, float("-inf")]
    assert yaml_text.value(given) == meant
    assert [type(one) for one in yaml_text.value(given)] == [type(one) for one in meant]


def test_a_mapping_is_merged_and_its_keys_are_defaults() -> None:
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
    with pytest.raises(UserError, match="key 'y' stands twice"):
        parse("base: &b {x: 1}\nown: {<<: *b, y: 9, y: 8}")


def test_aliases_are_values_of_their_own() -> None:
    given = parse("a: &a {x: [1]}\nb: *a\nc: {d: *a}")
    given["a"]["x"].append(2)
    assert given["b"] == {"x": [1]} and given["c"] == {"d": {"x": [1]}}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_is_read_by_its_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    """`ddpm params > params.yaml` in Windows PowerShell writes UTF-16."""
    file = tmp_path / "params.yaml"
    file.write_text("source: caf\u00e9\n", encoding=encoding)
    assert yaml_text.read(file, "params file", "sections") == {"source": "caf\u00e9"}
    file.write_bytes(b"source: caf\xe9\n")
    with pytest.raises(UserError, match=r"params\.yaml is not UTF-8 text: .* at byte 11\. Save it"):
        yaml_text.read(file, "params file", "sections")
