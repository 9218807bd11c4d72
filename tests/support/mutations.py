"""Random damage to files, as by a bad disk or on purpose. A seed determines it."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpm_core.storage import MANIFEST, sha256_of

DEEP = 3000
NUMBERS = [0, 1, -1, 2, 255, 2**16, 2**31, 2**40, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308]
TEXTS = ["", ".", "..", "../outside", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, "1e999", "null"]
HOSTILE: list[Any] = [
    *NUMBERS,
    *TEXTS,
    None,
    True,
    float("nan"),
    float("inf"),
    [],
    {},
    [0] * 1000,
    {"../outside/file": {"size": 1, "sha256": "0"}},
    [[1, 2], {"a": None}],
]


def flip(random_: random.Random, data: bytes) -> bytes:
    """Flip one to eight bits."""
    changed = bytearray(data)
    for _ in range(random_.randint(1, 8)):
        if changed:
            changed[random_.randrange(len(changed))] ^= 1 << random_.randrange(8)
    return bytes(changed)


def cut(random_: random.Random, data: bytes) -> bytes:
    return data[: random_.randint(0, len(data))]


def extend(random_: random.Random, data: bytes) -> bytes:
    extra = random_.choice([b"\0", b" ", b"}", b"\xff"]) * random_.choice([1, 7, 8, 1000])
    return data + extra if random_.random() < 0.7 else extra + data


def overwrite(random_: random.Random, data: bytes) -> bytes:
    at, size = random_.randint(0, len(data)), random_.choice([1, 4, 8, 64])
    return data[:at] + random_.randbytes(size) + data[at + size :]


def header_length(random_: random.Random, data: bytes) -> bytes:
    """Change the header length of a safetensors or npy file."""
    at, size = (8, 2) if data.startswith(b"\x93NUMPY") else (0, 8)
    claim = random_.choice([0, 1, 7, 2**15, 2**31, 2**40, 2**62, 2**64 - 1, len(data)])
    claim = random_.choice([claim, len(data) + random_.randint(-16, 16)])
    return data[:at] + (claim % 2 ** (8 * size)).to_bytes(size, "little") + data[at + size :]


def array_claim(random_: random.Random, data: bytes) -> bytes:
    """Change the shape, type or order in a npy header without changing its length."""
    changes = [
        (rb"\((\d*)", lambda m: b"(" + str(random_.choice([0, 7, 10**6, 10**9, 10**17])).encode()),
        (rb"'[<|][a-z]\d'", lambda m: random_.choice([b"'|O8'", b"'<f8'", b"'|V9'", b"'<i8'"])),
        (rb"False", lambda m: b"True "),
        (rb"\{", lambda m: b"__import__('os').getcwd(){"),
    ]
    pattern, replacement = random_.choice(changes)
    head, rest = data[:10], data[10:]
    changed = re.sub(pattern, replacement, rest, count=1)
    return head + changed[: len(rest)] if random_.random() < 0.5 else head + changed


def swap_json(random_: random.Random, data: bytes) -> bytes:
    """Change a value, a key or the nesting somewhere in a JSON text."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return data
    where = _places(document)
    if not where:
        return json.dumps(random_.choice(HOSTILE)).encode()
    holder, key = random_.choice(where)
    kind = random_.random()
    if kind < 0.12:
        del holder[key]
    elif kind < 0.2 and isinstance(holder, dict):
        holder[random_.choice(TEXTS)] = holder.pop(key)
    elif kind < 0.28:
        holder[key] = "@deep@"
        opened = random_.choice(["[", '{"a":'])
        closed = ("]" if opened == "[" else "}") * random_.choice([0, DEEP])
        text = json.dumps(document).replace('"@deep@"', opened * DEEP + "1" + closed)
        return text.encode()
    elif kind < 0.36:
        holder[key] = str(holder[key])
    else:
        holder[key] = random_.choice(HOSTILE)
    return json.dumps(document).encode()


def swap_header(random_: random.Random, data: bytes) -> bytes:
    """Do the same in the header of a safetensors file, and correct its length."""
    length = int.from_bytes(data[:8], "little")
    if data[8:9] != b"{" or length > len(data):
        return flip(random_, data)
    header = swap_json(random_, data[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every nested value."""
    places: list[tuple[Any, Any]] = []
    holders = [value]
    while holders:
        holder = holders.pop()
        if isinstance(holder, dict | list):
            for key, item in holder.items() if isinstance(holder, dict) else enumerate(holder):
                places.append((holder, key))
                holders.append(item)
    return places


Mutation = Callable[[random.Random, bytes], bytes]
BYTES: list[Mutation] = [flip, cut, extend, overwrite]


def fitting(name: str) -> list[Mutation]:
    """Return the mutations for a file of this name; the most effective ones occur several times."""
    if name.endswith(".safetensors"):
        return [*BYTES, header_length, swap_header, swap_header, swap_header]
    if name.endswith(".npy"):
        return [*BYTES, header_length, array_claim, array_claim]
    if name.endswith((".json", ".jsonl")):
        return [*BYTES, swap_json, swap_json, swap_json, swap_json, swap_json, swap_json]
    return BYTES


def replace_file(random_: random.Random, path: Path, outside: Path) -> str:
    """Replace a file by a link, a folder, nothing or another file; return which."""
    kind = random_.choice(["link out", "link to itself", "device", "folder", "gone", "swapped"])
    others = [item for item in path.parent.iterdir() if item.is_file() and item != path]
    path.unlink()
    if kind == "link out":
        path.symlink_to(outside / "secret")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "swapped" and others:
        shutil.copyfile(random_.choice(others), path)
    return kind


def reseal(folder: Path) -> None:
    """Update the sizes and checksums in a folder's manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        return
    manifest = json.loads(path.read_bytes())
    for name in manifest["files"]:
        file = folder / name
        if file.is_file() and not file.is_symlink():
            manifest["files"][name] = {"size": file.stat().st_size, "sha256": sha256_of(file)}
    path.write_text(json.dumps(manifest))
