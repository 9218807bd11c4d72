"""A damaged archive is read or raises a UserError; a damaged entry does not stop the others.

FUZZ_SEED selects other damage, and FUZZ_ROUNDS more of it.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support import mutations
from support.images import encoded, noise

from ddpm_core.config import Prepare
from ddpm_core.data.captions import read_captions
from ddpm_core.data.layout import find_layout
from ddpm_core.data.sources.archive import open_archive
from ddpm_core.data.sources.open import recognise
from ddpm_core.errors import UserError

SEED = int(os.environ.get("FUZZ_SEED", "1"))
EACH = 200 * int(os.environ.get("FUZZ_ROUNDS", "1"))
IMAGES = {f"{'ab'[n % 2]}/{n} \u00e9.png": encoded(noise(n, (4, 4))) for n in range(4)}
FILES = {
    **IMAGES,
    "a/captions.jsonl": b'{"file": "0.png", "caption": "a cat"}\n' * 20,
    "b/1.txt": b"a dog",
    f"{'long' * 30}/0.png": IMAGES["a/0 \u00e9.png"],
}


def zipped(method: int) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    return stream.getvalue()


def tarred(form: int, headers: dict[str, str] | None = None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for name, content in FILES.items():
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = len(content), headers or {}
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


SPARSE = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,60,99,10"}
SPARSE = SPARSE | {"GNU.sparse.size": "200", "GNU.sparse.name": "s.png", "mtime": "1.5"}
SEEDS = {
    "zip": zipped(zipfile.ZIP_DEFLATED),
    "zip of lzma": zipped(zipfile.ZIP_LZMA),
    "zip of bz2": zipped(zipfile.ZIP_BZIP2),
    "ustar": tarred(tarfile.USTAR_FORMAT),
    "gnu": tarred(tarfile.GNU_FORMAT),
    "pax": tarred(tarfile.PAX_FORMAT, {"comment": "x"}),
    "sparse": tarred(tarfile.PAX_FORMAT, SPARSE),
}
PACKERS: list[Callable[[bytes], bytes]] = [bytes, bytes, gzip.compress, bz2.compress, lzma.compress]


def read(path: Path) -> Counter[str]:
    """Do all that prepare does with an archive except decoding; return counts of content types."""
    source, listing = recognise(open_archive(path, "x"), Prepare())
    find_layout(listing)
    read_captions(listing, "text", [])
    return Counter(type(payload).__name__ for _, payload in source.read(listing.images))


def places(data: bytes) -> list[int]:
    """Return where the headers of entries begin, because damage there has the most effects."""
    if data.startswith(b"PK"):
        marks = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06")
        return [at for at in range(len(data)) if data[at : at + 4] in marks]
    return [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]


def damaged(random_: random.Random, data: bytes) -> bytes:
    for _ in range(random_.choice([1, 1, 2, 4, 10])):
        if random_.random() < 0.3:
            data = random_.choice(mutations.BYTES)(random_, data)
        elif where := places(data):
            at = random_.choice(where) + random_.randrange(60 if data.startswith(b"PK") else 560)
            byte = random_.choice([0, 255, 0x80, 0x7F, ord("-"), ord("9"), random_.randrange(256)])
            data = data[:at] + bytes([byte]) + data[at + 1 :]
    return data


@pytest.mark.parametrize("kind", SEEDS)
def test_damaged_archive_is_read_or_a_user_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "archive"
    path.write_bytes(SEEDS[kind])
    assert read(path)["bytes"] >= (0 if kind == "sparse" else 4)  # sparse files are refused
    found: Counter[str] = Counter()
    for number in range(EACH):
        random_ = random.Random(f"{SEED} {kind} {number}")
        data = damaged(random_, SEEDS[kind])
        if not kind.startswith("zip"):
            data = random_.choice(PACKERS)(data)
            data = mutations.flip(random_, data) if random_.random() < 0.1 else data
        path.write_bytes(data)
        try:
            read(path)
            found["read"] += 1
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
            found["refused"] += 1
        except Exception as error:
            raise AssertionError(f"input {number} of seed {SEED}") from error
    assert found["read"] > EACH / 20 and found["refused"] > EACH / 20
