"""A damaged parquet file is an error that names it, and a malicious one exhausts nothing."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import mutations
from support.images import encoded, noise, prepared, write
from support.tables import class_label, images, write_parquet

from ddpm_core.data.check import check_data
from ddpm_core.data.sources import base, limits, parquet
from ddpm_core.data.sources.pages import page_sizes, row_groups
from ddpm_core.data.sources.parquet import Parquet
from ddpm_core.errors import UserError

ROOM = 2**30  # bytes of memory for the process that reads bombs
SEED = int(os.environ.get("FUZZ_SEED", "1"))
EACH = 150 * int(os.environ.get("FUZZ_ROUNDS", "1"))
PICTURES = [encoded(noise(seed, (4, 4))) for seed in range(6)]


def repeated(value: Any, count: int, kind: pa.DataType) -> pa.Array:
    """Return a column that stores a value once."""
    indices = pa.array(np.zeros(count, np.int32))
    return pa.DictionaryArray.from_arrays(indices, pa.array([value], kind))


def bombs(root: Path) -> dict[str, str]:
    """Write files of a few kilobytes; return the error of each."""
    megabyte, unpacks = 2**20, r"unpacks to more than [\d,]+ bytes, too many"
    dictionary = repeated(bytes(megabyte), 1000, pa.binary())
    delta = [bytes(megabyte)] * 150
    text = repeated("x" * megabyte, 1000, pa.string())
    write_parquet(root / "dictionary.parquet", {"image": dictionary}, compression="zstd")
    write_parquet(
        root / "delta.parquet",
        {"image": delta},
        use_dictionary=False,
        column_encoding={"image": "DELTA_BYTE_ARRAY"},
        compression="zstd",
    )
    write_parquet(
        root / "zeros.parquet",
        {"image": [bytes(2**26 + 2**25)]},
        compression="zstd",
        use_dictionary=False,
    )
    small = repeated(b"abc", 1000, pa.binary())
    write_parquet(root / "text.parquet", {"image": small, "text": text})
    write_parquet(root / "label.parquet", {"image": small, "label": text})
    rows = repeated(b"abc", 2_000_000, pa.binary())
    write_parquet(root / "rows.parquet", {"image": rows})
    return {path.name: unpacks for path in root.iterdir()} | {
        "rows.parquet": "has 2,000,000 rows, too many"
    }


CHILD = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from ddpm_core.data.check import check_data
from ddpm_core.data.sources import limits
from ddpm_core.errors import UserError
limits.BOMB_FLOOR = 2**26
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
for path in sys.argv[2:]:
    try:
        check_data(Path(path))
        print(Path(path).name, "read")
    except UserError as error:
        print(Path(path).name, error)
"""


@pytest.mark.slow
def test_parquet_bombs_do_not_exhaust_memory(tmp_path: Path) -> None:
    expected = bombs(tmp_path)
    assert all(path.stat().st_size < 2**21 for path in tmp_path.iterdir())
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOM), *(str(tmp_path / name) for name in expected)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(line.split(" ", 1) for line in child.stdout.splitlines())
    for name, error in expected.items():
        with pytest.raises(UserError, match=error):
            raise UserError(found[name])


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("size", [1, 2**20])
def test_page_sizes_are_those_in_the_footer(
    tmp_path: Path, compression: str, version: str, size: int
) -> None:
    """The footer's size also has the headers of the pages, which are never compressed."""
    path = write_parquet(
        tmp_path / "x.parquet",
        {"image": [encoded(noise(seed)) for seed in range(40)]},
        compression=compression,
        data_page_version=version,
        data_page_size=size,
        write_batch_size=8,
        write_page_checksum=True,
    )
    chunk = pq.read_metadata(path).row_group(0).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    with path.open("rb") as file:
        pages = list(page_sizes(file, start, chunk.total_compressed_size))
    headers = chunk.total_uncompressed_size - sum(pages)
    assert len(pages) == (2 if size > 1 else 6)
    assert 10 * len(pages) < headers < 3000 * len(pages)


def test_false_size_of_a_page_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The footer still has the true size."""
    monkeypatch.setattr(limits, "BOMB_FLOOR", 2**24)
    options = {"compression": "zstd", "use_dictionary": False}
    path = write_parquet(tmp_path / "x.parquet", {"image": [bytes(2**21)]}, **options)
    size = pq.read_metadata(path).row_group(0).column(0)
    true, false = (varint(2 * number) for number in (2**21 + 4 + 6, 2**27 - 1))
    content = path.read_bytes()
    start = content[size.data_page_offset : size.data_page_offset + 8]
    assert start[2:3] == b"\x15" and start[3:7][-1] < 128 and len(true) == len(false) == 4
    at = size.data_page_offset + 3
    path.write_bytes(content[:at] + false + content[at + 4 :])
    assert pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size < 2**22
    with pytest.raises(UserError, match="unpacks to more than 16,"):
        check_data(path)


def varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


HEADERS = {
    b"": "has no complete header",
    b"\x15\x00\x15\x02\x15": "has no complete header",
    b"\x15\x00\x15\x01\x15\x02\x00": "has no valid sizes",
    b"\x15\x00\x00": "has no valid sizes",
    b"\x1f\x00": "unknown type 15",
    b"\x1c" * 40: "nested too deeply",
    b"\x15" + b"\xff" * 12: "more than 10 bytes",
    b"\x19\xf8\xff\xff\xff\xff\x0f": "has no complete header",
}


@pytest.mark.parametrize("header", HEADERS)
def test_damaged_page_header_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match=HEADERS[header]):
        list(page_sizes(io.BytesIO(header), 0, 1))


def test_page_header_with_all_types_is_read() -> None:
    """Sizes are 3 and 0; the fields around them have a value of every other type."""
    skipped = b"\x13\x05\x14\x02\x16\x02\x17" + bytes(8) + b"\x18\x02ab\x11\x12"
    nested = b"\x19\x25\x02\x04\x1a\x11\x01\x1b\x01\x55\x02\x04\x1b\x00\x1c\x15\x02\x00"
    header = b"\x25\x06\x15\x00" + skipped + nested + b"\x00"
    assert list(page_sizes(io.BytesIO(header), 0, len(header))) == [3]


def test_large_image_in_a_parquet_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "FILE_BYTES", 5000)
    path = write_parquet(tmp_path / "x.parquet", {"image": [PICTURES[0], bytes(5001)]})
    assert [item.reason for item in check_data(path).rejected] == [
        "5,001 bytes; at most 5,000 are read"
    ]


def test_large_footer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "FOOTER_FLOOR", 10)
    path = write_parquet(tmp_path / "x.parquet", {"image": PICTURES[:1]})
    with pytest.raises(UserError, match=r"x.parquet has a footer of [\d,]+ bytes; at most"):
        check_data(path)


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    for number in range(2):
        write_parquet(tmp_path / f"raw/{number}.parquet", {"image": PICTURES})
    path = tmp_path / "raw/1.parquet"
    write(path, path.read_bytes()[:-20])
    error = (
        r"The parquet file .*/raw: 1.parquet is damaged .* it has no footer, so it is incomplete"
    )
    with pytest.raises(UserError, match=error):
        prepared(tmp_path, tmp_path / "raw")


def test_damage_found_while_reading_is_an_error(tmp_path: Path) -> None:
    options = {"compression": "none", "use_dictionary": False}
    path = write_parquet(tmp_path / "x.parquet", {"image": PICTURES}, **options)
    source = Parquet(path, "x")
    entries = source.listing().images
    content = path.read_bytes()
    middle = content.index(PICTURES[3])
    path.write_bytes(content[: middle - 4] + b"\xff\xff\xff\x7f" + content[middle:])
    with pytest.raises(UserError, match="The parquet file x is damaged or of an unsupported kind"):
        list(source.read(entries))


def test_footer_is_read_as_pyarrow_reads_it(tmp_path: Path) -> None:
    columns = {"image": images(PICTURES), "label": [0, 1] * 3, "text": list("abcdef")}
    path = write_parquet(tmp_path / "x.parquet", columns, {}, row_group_size=4)
    content, expected = path.read_bytes(), pq.read_metadata(path)
    footer = content[-8 - int.from_bytes(content[-8:-4], "little") : -8]
    for number, group in enumerate(row_groups(footer)):
        facts = expected.row_group(number)
        chunks = [facts.column(leaf) for leaf in range(facts.num_columns)]
        assert group.rows == facts.num_rows
        assert group.columns == [
            (chunk.dictionary_page_offset, chunk.total_compressed_size) for chunk in chunks
        ]
    for end in range(len(footer)):
        with pytest.raises(ValueError, match=r"footer is damaged|unknown type|negative"):
            row_groups(footer[:end])


def test_footer_that_aborts_pyarrow_is_an_error(tmp_path: Path) -> None:
    """`ParquetFile.metadata.row_group(0).column(1)` ends the process for such a file."""
    path = write_parquet(tmp_path / "x.parquet", {"image": PICTURES, "text": list("abcdef")})
    content = path.read_bytes()
    optional, required = b"\x25\x02\x18\x04text", b"\x25\x00\x18\x04text"
    assert content.count(optional) == 1
    path.write_bytes(content.replace(optional, required))
    with pytest.raises(UserError, match="histogram size mismatch"):
        check_data(path)


def test_columns_that_share_bytes_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"image": [bytes(2**20)]}, compression="none")
    content = path.read_bytes()
    length = pq.read_metadata(path).row_group(0).column(0).total_compressed_size
    true, false = varint(2 * length), varint(2 * (2**21 - 1))
    assert content.count(b"\x16" + true) >= 1 and len(true) == len(false)
    path.write_bytes(content.replace(b"\x16" + true, b"\x16" + false))
    with pytest.raises(UserError, match="its columns are larger than the file"):
        check_data(path)


def seeds() -> list[bytes]:
    columns = {"image": images(PICTURES), "label": [0, 1] * 3, "text": list("abcdef")}
    found = []
    for options in ({}, {"compression": "zstd", "row_group_size": 4}, {"compression": "none"}):
        stream = io.BytesIO()
        table = pa.table(columns).replace_schema_metadata(None)
        pq.write_table(table, stream, **options)  # type: ignore[arg-type]
        found.append(stream.getvalue())
    return found


def damaged(random_: random.Random, data: bytes) -> bytes:
    """Damage a file, most often its footer, where a byte has the most effects."""
    for _ in range(random_.choice([1, 1, 2, 4])):
        footer = int.from_bytes(data[-8:-4], "little")
        if random_.random() < 0.3 or not 0 < footer < len(data):
            data = random_.choice(mutations.BYTES)(random_, data)
            continue
        at = random_.randrange(len(data) - 8 - footer, len(data))
        byte = random_.choice([0, 255, 0x80, 0x7F, random_.randrange(256)])
        data = data[:at] + bytes([byte]) + data[at + 1 :]
    return data


def test_damaged_parquet_is_read_or_a_user_error(tmp_path: Path) -> None:
    path, files = tmp_path / "x.parquet", seeds()
    found: Counter[str] = Counter()
    for number in range(EACH):
        random_ = random.Random(f"{SEED} parquet {number}")
        write(path, damaged(random_, random_.choice(files)))
        try:
            source = Parquet(path, "x")
            found["rows"] += len(list(source.read(source.listing().images)))
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
            found["refused"] += 1
    assert found["rows"] > EACH // 5 and found["refused"] > EACH // 3


def test_class_label_with_hostile_names_is_safe(tmp_path: Path) -> None:
    features = {"label": class_label("../../x", "\x1b[31m\n")}
    path = write_parquet(tmp_path / "x.parquet", {"image": PICTURES[:2], "label": [0, 1]}, features)
    assert prepared(tmp_path, path).classes == ["\x1b[31m", "../../x"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["workspace", "x.parquet"]
