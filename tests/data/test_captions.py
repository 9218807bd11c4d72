"""Captions are read from lists, texts and class names, and in several encodings."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.images import noise, prepared, write, write_classes

from ddpm_core.data.captions import encode
from ddpm_core.data.check import check_data
from ddpm_core.data.sources.folder import Directory
from ddpm_core.errors import UserError


def test_captions_from_list_then_text_then_class(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["polar_bear"])
    lines = [{"file": "polar_bear/000.png", "caption": "a bear\non ice"}]
    write(root / "captions.jsonl", "\n".join(json.dumps(line) for line in lines) + "\n\n")
    write(root / "polar_bear/000.txt", "not this one")
    write(root / "polar_bear/001.txt", "a bear asleep\n")
    captions = prepared(tmp_path, root, max_rejected=0.0).captions
    assert captions is not None and captions.shape == (3, 64)
    assert [bytes(row).rstrip(b"\0").decode() for row in captions] == [
        "a bear on ice",
        "a bear asleep",
        "a photo of a polar bear",
    ]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_captions_from_hugging_face_metadata(tmp_path: Path, kind: str) -> None:
    root = write_classes(tmp_path / "raw/train", ["."])
    rows = [{"file_name": f"00{n}.png", "text": f'"{n}", a\ncat', "more": n} for n in range(3)]
    if kind == "jsonl":
        write(root / "metadata.jsonl", "\n".join(json.dumps(row) for row in rows))
    else:
        quoted = "".join(f'00{n}.png,"""{n}"", a\ncat",{n}\r\n' for n in range(3))
        write(root / "metadata.csv", "\ufefffile_name,text,more\r\n" + quoted)
    assert captions_of(tmp_path, root.parent) == [f'"{n}", a cat'.encode() for n in range(3)]
    write(root / "captions.jsonl", json.dumps({"file": "000.png", "caption": "ours"}))
    assert captions_of(tmp_path, root.parent)[:2] == [b"ours", b'"1", a cat']


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        (
            "metadata.jsonl",
            '{"file_name": "a", "text": "x"}\n{"file_name": "a"}',
            "line 2: got \"{'file_name': 'a'}\"; must be {\"file_n",
        ),
        (
            "metadata.jsonl",
            "{",
            'line 1: got \'{\'; must be {"file_name": "...", "text": "..."}',
        ),
        (
            "metadata.csv",
            "file_name,text\na,x\nb\n",
            "line 3: got \"{'file_name': 'b', 'text': None}\"; must be {\"file_name",
        ),
        ("metadata.csv", 'file_name,text\na,"x\n', "invalid CSV: unexpected end"),
        ("metadata.csv", b"file_name,text\na,\xff\n", "is not UTF-8 text: invalid start byte at"),
        ("metadata.csv", "id,n\n1,2\n".encode("utf-16-le"), "is not UTF-8 text: it contains NUL"),
        ("metadata.jsonl", b'{"file_name": "a", "text": "\xe9"}', "is not UTF-8 text: invalid"),
        ("captions.jsonl", b'{"file": "a", "caption": "\xe9"}', "is not UTF-8 text: invalid"),
    ],
)
def test_error_for_invalid_metadata_names_the_line(
    tmp_path: Path, name: str, content: Any, error: str
) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    write(root / "cat" / name, content)
    with pytest.raises(UserError, match=rf"^cat/{re.escape(name)}.*{re.escape(error)}"):
        prepared(tmp_path, root)


def test_unrelated_metadata_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_classes(tmp_path / "raw", ["cat"], each=1)
    write(root / "metadata.csv", "id;breed\n1;tabb\xff\n".encode("latin-1"))
    write(root / "metadata.jsonl", '{"file_name": "cat/000.png", "label": 3}')
    assert captions_of(tmp_path, root) == [b"a photo of a cat"]
    printed = capsys.readouterr().err
    start = "so no captions are read from it. Its columns are"
    assert f"metadata.csv has no file_name and text, {start} id, breed." in printed
    hint = "file_name, label; to use one for captions, set prepare.caption_column."
    assert f"metadata.jsonl has no text, {start} {hint}" in printed


def saved(text: str, encoding: str) -> bytes:
    """Encode text as editors do: with a byte order mark if the encoding has one."""
    return ("\ufeff" if encoding.startswith("utf") else "").encode(encoding) + text.encode(encoding)


MARKED = ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("encoding", MARKED)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("000.txt", "un caf\u00e9"),
        ("000.caption", "un caf\u00e9"),
        ("metadata.csv", "file_name,text\r\n000.png,un caf\u00e9\r\n"),
        ("metadata.jsonl", '{"file_name": "000.png", "text": "un caf\u00e9"}\n'),
        ("captions.jsonl", '{"file": "000.png", "caption": "un caf\u00e9"}\r\n'),
    ],
)
def test_captions_are_decoded_by_their_byte_order_mark(
    tmp_path: Path, encoding: str, name: str, content: str
) -> None:
    root = write_classes(tmp_path, ["raw"], each=1) / "raw"
    write(root / name, saved(content, encoding))
    assert captions_of(tmp_path, root) == ["un caf\u00e9".encode()]


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16-le", "shift-jis"])
def test_captions_in_other_encodings_are_counted_in_the_error(
    tmp_path: Path, encoding: str
) -> None:
    root = write_classes(tmp_path / "raw", ["cat"], each=4)
    for number, text in enumerate(["chat", "a cat", "\xe9\xe9", "\xe9t\xe9"]):
        if encoding == "shift-jis":
            text = text.replace("\xe9", "\u732b")
        write(root / f"cat/{number:03d}.txt", text.encode(encoding if number else "utf-8"))
    write(root / "cat/readme.txt", b"caf\xe9, not a caption")
    count, first = (3, "001") if encoding == "utf-16-le" else (2, "002")
    error = (
        rf"{count} captions cannot be read; the first: cat/{first}\.txt is not UTF-8 text: .*iconv"
    )
    with pytest.raises(UserError, match=error):
        prepared(tmp_path, root)
    assert re.search(error, " ".join(check_data(root).failures))


def test_txt_file_has_priority_over_caption_file(tmp_path: Path) -> None:
    root = write_classes(tmp_path, ["raw"], each=2) / "raw"
    for name in ("000.txt", "000.caption", "001.CAPTION"):
        write(root / name, f"from {name}")
    assert captions_of(tmp_path, root) == [b"from 000.txt", b"from 001.CAPTION"]


@pytest.mark.parametrize("separator", [",", ", ", ";", "\t", "|"])
def test_captions_from_a_chosen_column(tmp_path: Path, separator: str) -> None:
    root = write_classes(tmp_path, ["raw"], each=2) / "raw"
    rows = [["id", "file_name", "prompt"], ["1", "000.png", '"a; b, c|d"'], ["2", "001.png", "e"]]
    write(root / "metadata.csv", "\n".join(separator.join(row) for row in rows))
    found = prepared(tmp_path, root, caption_column="prompt").captions
    assert found is not None
    assert [bytes(row).rstrip(b"\0") for row in found] == [b"a; b, c|d", b"e"]
    (note,) = check_data(root).notes
    assert "Its columns are id, file_name, prompt; to use one" in note


def test_missing_caption_column_is_refused(tmp_path: Path) -> None:
    root = write_classes(tmp_path, ["raw"], each=1) / "raw"
    error = "prepare.caption_column: got 'prompt', but the source has no metadata.csv"
    with pytest.raises(UserError, match=error):
        prepared(tmp_path, root, caption_column="prompt")
    write(root / "metadata.jsonl", '{"file_name": "000.png", "caption": "x"}')
    error = "but metadata.jsonl has no prompt; its columns are file_name, caption"
    with pytest.raises(UserError, match=error):
        prepared(tmp_path, root, caption_column="prompt")


def test_class_caption_uses_the_template(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    captions = prepared(tmp_path, root, caption="{class}!").captions
    assert captions is not None and bytes(captions[0]).rstrip(b"\0") == b"cat!"


def test_captions_without_classes_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "raw/0.png", noise(1))
    write(tmp_path / "raw/0.txt", "dawn")
    write(tmp_path / "raw/1.png", noise(2))
    captions = prepared(tmp_path, tmp_path / "raw").captions
    assert captions is not None
    assert [bytes(row).rstrip(b"\0") for row in captions] == [b"dawn", b""]


@pytest.mark.parametrize("text", ["é" * 40, "a" + "é" * 40, "🐈" * 20, "x" * 64])
def test_long_caption_is_cut_between_characters(text: str) -> None:
    row = bytes(encode([text])[0])
    kept = row.rstrip(b"\0").decode("utf-8")
    assert text.startswith(kept)
    assert 64 - len(kept.encode()) < len(text[:1].encode()) + 4


WRONG = ["{", "[]", '{"file": "a.png"}', "3", '"x"', "[" * 100_000]
WRONG += ['{"file": "cat/000.png", "caption": ' + x + "}" for x in ("null", "3", '["a"]', "{}")]
WRONG += ['{"file": 7, "caption": "x"}', '{"file": null, "caption": "x"}']


@pytest.mark.parametrize("line", WRONG, ids=range(len(WRONG)))
def test_error_for_invalid_caption_names_the_line(tmp_path: Path, line: str) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    good = json.dumps({"file": "cat/000.png", "caption": "x"})
    write(root / "captions.jsonl", f"{good}\n{line}\n")
    with pytest.raises(UserError, match=r"captions\.jsonl, line 2"):
        prepared(tmp_path, root)
    notes = check_data(root).failures
    assert [note for note in notes if note.startswith("captions.jsonl, line 2")]


def test_captions_of_missing_images_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    write(root / "captions.jsonl", json.dumps({"file": "cat/999.png", "caption": "x"}))
    prepared(tmp_path, root)
    assert "1 caption in captions.jsonl ignored: no such image" in capsys.readouterr().err


def test_images_without_caption_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_classes(tmp_path, ["raw"], each=5) / "raw"
    prepared(tmp_path / "none", root)
    assert "no caption" not in capsys.readouterr().err
    write(root / "captions.jsonl", json.dumps({"file": "000.png", "caption": "x"}))
    prepared(tmp_path, root)
    assert "4 of 5 images have no caption" in capsys.readouterr().err


def test_unreadable_captions_are_an_error(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    line = json.dumps({"file": "cat/000.png", "caption": "x"})
    write(root / "captions.jsonl", line)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", forbidden)
        error = r"The text captions\.jsonl, which may contain captions, cannot be read: Permission"
        with pytest.raises(UserError, match=error):
            Directory(root, "x").listing()


def forbidden(*_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def captions_of(tmp_path: Path, root: Path) -> list[bytes]:
    captions = prepared(tmp_path, root, max_rejected=0.0).captions
    assert captions is not None
    return [bytes(row).rstrip(b"\0") for row in captions]


def test_extension_of_a_caption_text_may_be_upper_case(tmp_path: Path) -> None:
    write(tmp_path / "raw/0.JPG", noise(1), kind="JPEG")
    write(tmp_path / "raw/0.TXT", "dawn")
    assert captions_of(tmp_path, tmp_path / "raw") == [b"dawn"]


@pytest.mark.parametrize("on_disk", ["caf\u00e9", "cafe\u0301"])
@pytest.mark.parametrize("written", ["caf\u00e9", "cafe\u0301"])
def test_a_composed_name_is_the_decomposed_one_to_captions(
    tmp_path: Path, on_disk: str, written: str
) -> None:
    root = tmp_path / "raw"
    write(root / on_disk / f"{on_disk}1.png", noise(1))
    write(root / on_disk / f"{on_disk}2.png", noise(2))
    write(root / on_disk / f"{written}2.txt", "two")
    line = {"file": f"{written}/{written}1.png", "caption": "one"}
    write(root / "captions.jsonl", json.dumps(line, ensure_ascii=False))
    assert captions_of(tmp_path, root) == [b"one", b"two"]
