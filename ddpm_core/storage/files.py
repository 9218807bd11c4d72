"""Safe readers for untrusted files: text, JSON, npy and safetensors, and no other format.

No file can run code, and none takes more memory than its size on disk, whatever its header claims.
Every reader raises Corrupt, with the file's name, for a file that is damaged or forged.
"""

from __future__ import annotations

import codecs
import errno
import io
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddpm_core.errors import Corrupt, UserError
from ddpm_core.problems import problems_of
from ddpm_core.runtime.memory import shortage

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_JSON = 16 * 2**20  # bytes; Python objects take about twenty times as many
LARGEST_HEADER = 16 * 2**20  # bytes of a safetensors header
# UTF-32 comes first: its byte order mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_UNREADABLE = (errno.ELOOP, errno.EACCES, errno.ENXIO, errno.ENAMETOOLONG)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_NPY = b"\x93NUMPY\x01\x00"
# Plain numbers only: an object array (|O) would be unpickled.
_NPY_HEADER = re.compile(
    rb"\{'descr': '([<|][biuf][1248])', 'fortran_order': False, "
    rb"'shape': \(((?:\d{1,18}, ?){0,8}(?:\d{1,18})?)\), \} *\n"
)


class Schema(BaseModel):
    """The fields that a reader requires of a JSON object; types are strict."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


Model = TypeVar("Model", bound=Schema)
Count = Annotated[int, Field(ge=0, lt=2**53)]


def text_of(data: bytes, name: str) -> str:
    """Decode a user's text file, by its byte order mark or else as UTF-8.

    Raises UserError for any other encoding, because a wrong guess would silently change letters.
    """
    encoding = next((encoding for mark, encoding in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        reason = f"{error.reason} at byte {error.start:,}"
    else:
        if "\0" not in text:
            return text.removeprefix("\ufeff")
        reason = "it contains NUL characters, like UTF-16 without a byte order mark"
    raise UserError(
        f"{name} is not {encoding.upper()} text: {reason}. Save it as UTF-8; to convert it, use "
        "iconv -f ENCODING -t UTF-8."
    )


def parse_object(data: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises Corrupt."""
    if len(data) > LARGEST_JSON:
        raise Corrupt(f"{name} has {len(data):,} bytes; a JSON file may have {LARGEST_JSON:,}.")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{name} is damaged: it is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise Corrupt(f"{name} is damaged: it is a JSON {type(value).__name__}, not an object.")
    return value


def parse_model(data: bytes, schema: type[Model], name: str) -> Model:
    """Return the JSON object in `data` as a frozen model. Raises Corrupt."""
    return as_model(parse_object(data, name), schema, name)


def read_object(path: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises Corrupt, FileNotFoundError, other OSErrors."""
    return parse_object(read_bytes(path, name, LARGEST_JSON), name)


def read_bytes(path: Path, name: str, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises Corrupt, OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise Corrupt(f"{name} has {size:,} bytes; at most {most:,} are allowed.")
        return file.read(size)


def as_model(value: dict[str, Any], schema: type[Model], name: str) -> Model:
    """Return a JSON object as a frozen model. Raises Corrupt with the first wrong field."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        first = problems_of(error, schema)[0]
        raise Corrupt(f"{name} is damaged: {first!s:.300}.") from error
    except RecursionError as error:
        raise Corrupt(f"{name} is damaged: it is nested too deeply.") from error


def is_plain(name: str) -> bool:
    """Return whether an untrusted name is a simple relative path below a folder."""
    path = PurePosixPath(name)
    parts = path.parts
    if not name.isprintable() or str(path) != name or not 0 < len(parts) < 9:
        return False
    short = all(len(part.encode()) < 256 for part in parts)
    return short and not path.is_absolute() and not {".", ".."} & {name, *parts}


def must_be_inside(folder: str, name: str) -> None:
    """Raise Corrupt unless `is_plain(name)`."""
    if not is_plain(name):
        raise Corrupt(f"{folder} refers to a file outside it or an invalid name: {name[:200]!r}.")


def inside(folder: Path, name: str) -> Path:
    """Return the path of an untrusted name in a folder.

    Raises Corrupt if the path, after links are resolved, is outside the folder.
    """
    must_be_inside(folder.name, name)
    path = folder / name
    try:
        within = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:  # for example a link to itself
        raise Corrupt(f"{folder.name}/{name} cannot be resolved: {error}.") from error
    if not within:
        raise Corrupt(f"{folder.name}/{name} is a link to a file outside the folder.")
    return path


@dataclass(frozen=True)
class ArrayHead:
    """The header of a .npy file. All bytes after `offset` are the rows, in C order."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


def array_head(path: Path) -> ArrayHead:
    """Read the header of a .npy file of plain numbers. Raises Corrupt.

    NumPy evaluates the header as Python; here it must match a pattern, and the file must have
    exactly as many bytes as the shape requires.
    """
    try:
        with open_regular(path) as file:
            start = file.read(len(_NPY) + 2)
            length = int.from_bytes(start[len(_NPY) :], "little")
            found = _NPY_HEADER.fullmatch(file.read(length))
            size, offset = os.fstat(file.fileno()).st_size, len(start) + length
        if not start.startswith(_NPY) or found is None:
            raise Corrupt(f"{path.name} is not an array of plain numbers.")
        dtype = np.dtype(found[1].decode())
    except (OSError, TypeError) as error:
        raise Corrupt(f"{path.name} cannot be read as an array: {error}.") from error
    shape = tuple(int(number) for number in re.findall(rb"\d+", found[2]))
    wanted = offset + math.prod(shape) * dtype.itemsize
    if size != wanted or math.prod(max(1, number) for number in shape) > 2**48:
        raise Corrupt(f"{path.name} has {size:,} bytes; its shape {shape} requires {wanted:,}.")
    return ArrayHead(shape, dtype, offset)


def open_array(path: Path) -> NDArray[Any]:
    """Return the array in a .npy file, memory-mapped and read-only. Raises Corrupt."""
    head = array_head(path)
    if 0 in head.shape:
        return np.empty(head.shape, head.dtype)
    try:
        return np.memmap(path, head.dtype, "r", head.offset, head.shape)
    except (OSError, ValueError) as error:  # the file was truncated after its header was read
        raise Corrupt(f"{path.name} cannot be read as an array: {error}.") from error


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file. Raises OSError.

    Corrects two habits of safetensors: it reports a full disk as a format error, and creates files
    that only the owner can read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, dict(metadata) if metadata else None)
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))  # the only place where safetensors keeps it
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(mode)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU. Raises Corrupt."""
    return read_tensors_and_metadata(path)[0]


def read_tensors_and_metadata(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Raises Corrupt, also for a value that is not finite: ddpm never writes one, and a network with
    one generates black images.
    """
    from safetensors import safe_open

    name = f"{path.parent.name}/{path.name}"
    try:
        with open_regular(path) as file:
            header = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
        if header > min(size - 8, LARGEST_HEADER):
            raise Corrupt(
                f"{name} is damaged: its header claims {header:,} bytes, which it does not have."
            )
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        _must_be_finite(tensors, name)
        return tensors, metadata
    except Corrupt:
        raise
    except Exception as error:  # safetensors and torch raise their own types
        if shortage(error):  # out of memory: the file may be fine
            raise
        if isinstance(error, OSError):
            raise Corrupt(f"{name} cannot be read: {error.strerror}.") from error
        raise Corrupt(f"{name} is damaged: {error!s:.300}.") from error


def _must_be_finite(tensors: Mapping[str, Tensor], name: str) -> None:
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise Corrupt(
                f"{name} is damaged: {key[:200]} has values that are not finite (NaN or infinity). "
                "All values must be finite. Restore the file, or use another checkpoint."
            )


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. Raises Corrupt for pipes and devices, which never end."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        raise Corrupt(f"{path.name} cannot be opened: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Corrupt(f"{path.name} is not a regular file.")
    return io.BufferedReader(io.FileIO(descriptor))
