"""An archive gives the same data as its folder, and a malicious one does no harm."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import stat
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.images import encoded, noise, prepared, rejected, write, write_classes

from ddpm_core.data.check import check_data
from ddpm_core.data.sources import base, limits
from ddpm_core.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = write_classes(tmp_path / "raw", ["cat", "dog"])
    write(root / "cat/000.txt", "a sleeping cat")
    return root


def zipped(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*"), reverse=True):
            archive.write(file, file.relative_to(folder))
    return path


def tarred(mode: str) -> Callable[[Path, Path], Path]:
    def pack(folder: Path, path: Path) -> Path:
        with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
            archive.add(folder, "./wrapped")
        return path

    return pack


FORMS = [zipped, tarred("w"), tarred("w:gz"), tarred("w:bz2"), tarred("w:xz")]


@pytest.mark.parametrize("pack", FORMS)
def test_archive_gives_the_same_data_as_its_folder(
    tmp_path: Path, folder: Path, pack: Callable[[Path, Path], Path]
) -> None:
    archive = pack(folder, tmp_path / "data.bin")
    expected = prepared(tmp_path / "a", folder)
    found = prepared(tmp_path / "b", archive)
    assert found.fingerprint == expected.fingerprint
    assert found.classes == ["cat", "dog"]
    assert found.manifest.source["sha256"]
    assert rejected(tmp_path / "b/workspace") == {}


def test_tar_that_ends_with_a_zip_is_read_as_tar(tmp_path: Path, folder: Path) -> None:
    with zipfile.ZipFile(tmp_path / "old.zip", "w") as inner:
        inner.writestr("emu/0.png", encoded(noise(99)))
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(folder, ".")
        archive.add(tmp_path / "old.zip", "old.zip")
    assert prepared(tmp_path, tmp_path / "x.tar").classes == ["cat", "dog"]


EVIL = ["../evil.png", "/evil.png", "a/../../evil.png", "C:/evil.png"]


@pytest.mark.parametrize("name", EVIL)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_path_out_of_an_archive_is_rejected(tmp_path: Path, kind: str, name: str) -> None:
    files, path = {"good.png": encoded(noise(1)), name: encoded(noise(2))}, tmp_path / f"x.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in files.items():
                archive.writestr(member, content)
    else:
        with tarfile.open(path, "w") as tar:
            for member, content in files.items():
                add(tar, member, content)
    assert_rejected(tmp_path, path, name, "leaves the archive")


def test_backslashes_in_a_zip_separate_folders(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("cat\\1.png", encoded(noise(1)))
        archive.writestr("dog\\1.png", encoded(noise(2)))
        archive.writestr("..\\evil.png", encoded(noise(3)))
    assert_rejected(tmp_path, tmp_path / "x.zip", "../evil.png", "leaves the archive", good=2)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_in_a_tar_are_rejected(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        add(archive, "good.png", encoded(noise(1)))
        member = tarfile.TarInfo("evil.png")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    assert_rejected(tmp_path, tmp_path / "x.tar", "evil.png", "only regular files")


def test_link_in_a_zip_is_rejected(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("good.png", encoded(noise(1)))
        link = zipfile.ZipInfo("evil.png")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    assert_rejected(tmp_path, tmp_path / "x.zip", "evil.png", "a link")


def assert_rejected(tmp_path: Path, archive: Path, name: str, reason: str, good: int = 1) -> None:
    before = {item.name for item in tmp_path.iterdir()} | {"workspace"}
    data = prepared(tmp_path, archive, max_rejected=1.0)
    assert len(data) == good
    assert reason in rejected(tmp_path / "workspace")[name]
    assert {item.name for item in tmp_path.iterdir()} == before


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def test_archive_that_unpacks_to_far_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BOMB_FLOOR", 2**20)
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(20):
            archive.writestr(f"{number}.bmp", bytes(2**20))
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as tar:
        for number in range(20):
            add(tar, f"{number}.bmp", bytes(2**20))
    for name in ("x.zip", "x.tgz"):
        with pytest.raises(UserError, match=r"unpacks to more than [\d,]+ bytes, too many"):
            prepared(tmp_path, tmp_path / name)


def test_large_file_in_an_archive_is_rejected_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "FILE_BYTES", 5000)
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("good.png", encoded(noise(1)))
        archive.writestr("large.png", bytes(5001))
    assert_rejected(tmp_path, tmp_path / "x.zip", "large.png", "at most 5,000")


def test_damaged_entry_of_a_zip_does_not_stop_others(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for number in range(3):
            archive.writestr(f"{number}.png", encoded(noise(number)))
    content = bytearray((tmp_path / "x.zip").read_bytes())
    position = content.index(encoded(noise(1))) + 80
    content[position] ^= 255
    (tmp_path / "x.zip").write_bytes(content)
    assert_rejected(tmp_path, tmp_path / "x.zip", "1.png", "cannot be unpacked", good=2)


@pytest.mark.parametrize("name", ["captions.jsonl", "0.txt"])
def test_damaged_captions_in_a_zip_are_an_error(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("0.png", encoded(noise(0)))
        archive.writestr(name, '{"file": "0.png", "caption": "a sleeping cat"}')
    content = (tmp_path / "x.zip").read_bytes().replace(b"sleeping", b"slipping")
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(UserError, match=f"The text {name}, .* cannot be read: Bad CRC-32"):
        prepared(tmp_path, tmp_path / "x.zip")


def test_encrypted_entry_is_rejected(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("0.png", encoded(noise(0)))
        archive.writestr("1.png", encoded(noise(1)))
    content = bytearray((tmp_path / "x.zip").read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    content[6] |= 1
    (tmp_path / "x.zip").write_bytes(content)
    assert_rejected(tmp_path, tmp_path / "x.zip", "0.png", "encrypted")


@pytest.mark.parametrize("pack", FORMS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_truncated_archive_is_refused(
    tmp_path: Path, folder: Path, pack: Callable[[Path, Path], Path], share: float
) -> None:
    archive = pack(folder, tmp_path / "whole")
    content = archive.read_bytes()
    # A tar ends with blocks of zeros, which may be missing without harm.
    last = len(content.rstrip(b"\0")) if content[257:262] == b"ustar" else len(content)
    (tmp_path / "cut").write_bytes(content[: int(last * share)])
    with pytest.raises(UserError, match="damaged"):
        prepared(tmp_path, tmp_path / "cut")


def test_file_that_is_not_an_archive_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.zip", "no archive")
    with pytest.raises(UserError, match="neither a zip nor a tar archive"):
        prepared(tmp_path, path)


def test_names_in_other_encodings_are_read_from_archives(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", encoding="utf-8", errors="surrogateescape") as tar:
        add(tar, "caf\udce9/1.png", encoded(noise(1)))
        add(tar, "bar/1.png", encoded(noise(2)))
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("bar/1.png", encoded(noise(2)))
        archive.writestr("cafX/1.png", encoded(noise(1)))
    raw = (tmp_path / "x.zip").read_bytes().replace(b"cafX", b"caf\xe9")
    (tmp_path / "x.zip").write_bytes(raw)
    of_tar, of_zip = (
        prepared(tmp_path / "t", tmp_path / "x.tar"),
        prepared(tmp_path / "z", tmp_path / "x.zip"),
    )
    assert of_tar.classes == of_zip.classes == ["bar", "caf\\xe9"]
    assert of_tar.fingerprint == of_zip.fingerprint


def test_last_of_two_entries_with_one_name_wins(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        add(archive, "0.png", encoded(noise(1)))
        add(archive, "0.png", encoded(noise(2)))
    write(tmp_path / "raw/0.png", noise(2))
    data = prepared(tmp_path / "a", tmp_path / "x.tar")
    assert (data.images[:] == prepared(tmp_path / "b", tmp_path / "raw").images[:]).all()
    assert len(data) == 1 and isinstance(data.images[0], np.ndarray)


# Damage that makes zipfile, tarfile and decompressors raise other exceptions


def test_damaged_lzma_entry_does_not_stop_others(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_LZMA) as archive:
        for number in range(3):
            archive.writestr(f"{number}.png", encoded(noise(number)))
        start = archive.infolist()[1].header_offset + 30 + len("1.png")
    content = bytearray((tmp_path / "x.zip").read_bytes())
    content[start + 4] = 255  # of the properties
    (tmp_path / "x.zip").write_bytes(content)
    assert_rejected(tmp_path, tmp_path / "x.zip", "1.png", "cannot be unpacked", good=2)


def test_entry_without_a_name_is_rejected(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("good.png", encoded(noise(1)))
        nameless = zipfile.ZipInfo("x")
        nameless.filename = ""
        with archive.open(nameless, "w") as file:
            file.write(encoded(noise(2)))
    assert_rejected(tmp_path, tmp_path / "x.zip", "", "without a name")


def patched(tmp_path: Path, at: int, value: bytes, flags: int = 0) -> Path:
    """Write a zip, and overwrite bytes of the first record in its directory."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("0.png", encoded(noise(0)))
    content = bytearray((tmp_path / "x.zip").read_bytes())
    start = content.index(b"PK\x01\x02")
    content[start + 9] |= flags
    content[start + at : start + at + len(value)] = value
    (tmp_path / "x.zip").write_bytes(content)
    return tmp_path / "x.zip"


def test_unsupported_zip_is_a_user_error(tmp_path: Path) -> None:
    for archive in (patched(tmp_path, 6, b"\x63"), patched(tmp_path, 46, b"\xff\xff", flags=8)):
        for use in (check_data, lambda path: prepared(tmp_path, path)):
            with pytest.raises(
                UserError, match=r"is damaged or of an unsupported kind.* use the directory"
            ):
                use(archive)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_tar_truncated_inside_captions_is_a_user_error(tmp_path: Path, mode: str) -> None:
    lines = "".join(f'{{"file": "{n}.png", "caption": "{n}"}}\n' for n in range(9999)).encode()
    with tarfile.open(tmp_path / "x.tar", mode) as archive:  # type: ignore[call-overload]
        add(archive, "0.png", encoded(noise(0)))
        add(archive, "captions.jsonl", lines)
    content = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "x.tar").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="is damaged"):
        prepared(tmp_path, tmp_path / "x.tar")


def test_invalid_sparse_header_is_a_user_error(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("0.png")
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        member.size = 1000
        archive.addfile(member, io.BytesIO(bytes(1000)))
    with pytest.raises(UserError, match="is damaged"):
        prepared(tmp_path, tmp_path / "x.tar")


# Archives whose headers understate their content, in a process with limited memory

ROOM = 2**25  # bytes that the process may use beyond its imports
BOMB = ROOM + 2**23 + 12345

CHILD = """
import json, resource, sys
from pathlib import Path
from support.images import prepared
from ddpm_core.data.check import check_data
from ddpm_core.errors import UserError

size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[1]),) * 2)
for path in map(Path, sys.argv[2:]):
    try:
        found = [[item.name, item.reason] for item in check_data(path).rejected]
        assert len(prepared(path.parent, path, max_rejected=1.0)) == 1
    except UserError as error:
        found = str(error)
    print(json.dumps([path.name, found]), file=sys.stderr)
"""


def claiming(path: Path, method: int, claimed: int) -> Path:
    """Write a zip whose first entry has BOMB bytes, and fewer in its two headers."""
    with zipfile.ZipFile(path, "w", method) as archive:
        with archive.open("0.png", "w") as entry:
            entry.write(bytes(BOMB))
        archive.writestr("good.png", encoded(noise(1)))
    actual, false = struct.pack("<I", BOMB), struct.pack("<I", claimed)
    content = path.read_bytes()
    assert content.count(actual) == 2
    path.write_bytes(content.replace(actual, false))
    return path


def with_header(path: Path, kind: bytes, mode: str) -> Path:
    """Write a tar whose first header has BOMB bytes."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        member = tarfile.TarInfo("././@LongLink")
        member.type, member.size = kind, BOMB
        archive.addfile(member, Endless())
        add(archive, "good.png", encoded(noise(1)))
    return path


class Endless(io.RawIOBase):
    def read(self, count: int = -1) -> bytes:
        return b"0" * count


@pytest.mark.slow
def test_false_sizes_in_archives_do_not_exhaust_memory(tmp_path: Path) -> None:
    """check-data and prepare read all archives in one process."""
    unpacks = f"cannot be unpacked: it unpacks to more than {1000:,} bytes"
    headers = f"has an entry with headers of more than {2**20:,} bytes, too many"
    expected = {
        claiming(tmp_path / "bzip2.zip", zipfile.ZIP_BZIP2, 1000): [["0.png", unpacks]],
        claiming(tmp_path / "lzma.zip", zipfile.ZIP_LZMA, 1000): [["0.png", unpacks]],
        tmp_path
        / "text.zip": "The text 0.txt, which may contain captions, cannot be read: it unpacks",
        with_header(tmp_path / "long.tgz", tarfile.GNUTYPE_LONGNAME, "w:gz"): headers,
        with_header(tmp_path / "pax.txz", tarfile.XHDTYPE, "w:xz"): headers,
        tmp_path / "zeros.tbz": [],
    }
    text = (tmp_path / "bzip2.zip").read_bytes().replace(b"0.png", b"0.txt")
    (tmp_path / "text.zip").write_bytes(text)
    with tarfile.open(tmp_path / "zeros.tbz", "w:bz2") as archive:
        add(archive, "good.png", encoded(noise(1)))
        member = tarfile.TarInfo("large.bin")
        member.size = BOMB
        archive.addfile(member, Endless())
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOM), *map(str, expected)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(json.loads(line) for line in child.stderr.splitlines() if line[:1] == "[")
    for path, wanted in expected.items():
        assert matches(wanted, found[path.name]), (path.name, found[path.name])


def matches(wanted: str | list[list[str]], found: str | list[list[str]]) -> bool:
    if isinstance(wanted, str) or isinstance(found, str):
        return str(wanted) in str(found)
    pairs = zip(wanted, found, strict=True)
    return all(name == other and part in reason for (name, part), (other, reason) in pairs)


def test_tar_with_too_many_entries_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ENTRIES_FLOOR", 100)
    with tarfile.open(tmp_path / "x.tbz", "w:bz2") as archive:
        for number in range(400):
            add(archive, f"{number}.png", b"")
    limit = 100 + (tmp_path / "x.tbz").stat().st_size // limits.ENTRY_BYTES
    assert 100 < limit < 400
    with pytest.raises(UserError, match=f"has more than {limit} entries, too many"):
        check_data(tmp_path / "x.tbz")


def test_sparse_file_in_a_tar_is_rejected(tmp_path: Path) -> None:
    """Its holes may be of any size, and no image has holes."""
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        add(archive, "good.png", encoded(noise(1)))
        member = tarfile.TarInfo("sparse.png")
        member.pax_headers = {"GNU.sparse.map": "0,1,4000000000,1", "GNU.sparse.size": "4000000001"}
        member.size = 2
        archive.addfile(member, io.BytesIO(b"ab"))
    assert_rejected(tmp_path, tmp_path / "x.tar", "sparse.png", "a sparse file; only")


@pytest.mark.parametrize("packer", [gzip, bz2, lzma], ids=lambda packer: packer.__name__)
def test_tar_of_several_compressed_streams_is_read(
    tmp_path: Path, folder: Path, packer: ModuleType
) -> None:
    """Parallel compressors such as pbzip2 and pixz write several streams."""
    plain = tarred("w")(folder, tmp_path / "x.tar").read_bytes()
    half = len(plain) // 2
    packed = packer.compress(plain[:half]) + packer.compress(plain[half:])
    (tmp_path / "x.tar.packed").write_bytes(packed)
    found = prepared(tmp_path / "a", tmp_path / "x.tar.packed")
    assert found.fingerprint == prepared(tmp_path / "b", folder).fingerprint
