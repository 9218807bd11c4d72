"""Decode images in several processes, with a bounded number in transit.

`make_squares` and `inspect_images` are what the processes do. They start quickly because this
module and its imports need neither torch nor the settings.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ddpm_core.data.decode import (
    SquareRule,
    TooLarge,
    Undecodable,
    decode,
    decode_with_digest,
    make_square,
    stored_kind,
)
from ddpm_core.data.sources.base import Entry, Payload, Rejection
from ddpm_core.errors import UserError

CHUNK_IMAGES, CHUNK_BYTES = 64, 2**22
MAX_WORKERS = 8  # of `auto`: with more, reading the source is the bottleneck
# Fewer images than both are decoded before other processes could start.
SINGLE_IMAGES, SINGLE_BYTES = 4000, 2**24
_AHEAD, AHEAD_BYTES = 3, 2**24  # chunks in transit per worker, and bytes per chunk
_WHITE = (255, 255, 255)
_SMALLEST = 16  # pixels; as the default of prepare.image_size

Chunk = list[tuple[int, Payload]]  # positions and contents of images
Result = TypeVar("Result")

# Pixels that come from no file have the digest of this square. Its size must not change: the
# demo's digits would be split differently, and have other scores.
_DIGEST_RULE = SquareRule(16, "squash", _WHITE, 3)
SAMPLE_SIZE = 32  # pixels
_SAMPLE_RULE = SquareRule(SAMPLE_SIZE, "crop", _WHITE, 3)


@dataclass(frozen=True, slots=True)
class SquareBatch:
    """The squares of a chunk: `pixels` uint8 (k, S, S, C), and lists of length k.

    `digests` identify images by their content, whatever the SquareRule. A digest is empty if the
    image cannot be used; then `reasons` says why.
    """

    positions: list[int]
    pixels: NDArray[np.uint8]
    digests: list[bytes]
    gray: list[bool]
    reasons: list[str]


def make_squares(rule: SquareRule, chunk: Sequence[tuple[int, Payload]]) -> SquareBatch:
    """Decode the images of a chunk to squares. An unusable image does not stop the others."""
    shape = (len(chunk), rule.size, rule.size, rule.channels)
    batch = SquareBatch([], np.zeros(shape, np.uint8), [], [], [])
    for pixels, (position, payload) in zip(batch.pixels, chunk, strict=True):
        digest, reason = _fill(pixels, rule, payload)
        batch.positions.append(position)
        batch.reasons.append(reason)
        batch.digests.append(digest)
        batch.gray.append(bool((pixels == pixels[:, :, :1]).all()))
    return batch


def _fill(pixels: NDArray[np.uint8], rule: SquareRule, payload: Payload) -> tuple[bytes, str]:
    """Write a square into `pixels` (S, S, C). Return its digest, or an empty one and a reason."""
    if isinstance(payload, Rejection):
        return b"", payload.reason
    try:
        if isinstance(payload, np.ndarray):
            image = Image.fromarray(payload).convert("RGB")
            digest = hashlib.sha256(make_square(image, _DIGEST_RULE).tobytes()).digest()
        else:
            image, digest = decode_with_digest(payload, rule.background, rule.size)
        square = make_square(image, rule)
    except Undecodable as error:
        return b"", str(error)
    values = np.asarray(square if rule.channels == 3 else square.convert("L"))
    pixels[:] = values.reshape(pixels.shape)
    return digest, ""


@dataclass(frozen=True, slots=True)
class Inspected:
    """The size in pixels, format and content of an image, or the reason why it is unusable.

    `square` is its middle, uint8 (SAMPLE_SIZE, SAMPLE_SIZE, 3), if the image is in the sample.
    """

    position: int
    width: int = 0
    height: int = 0
    stored: str = ""
    digest: bytes = b""
    reason: str = ""
    square: NDArray[np.uint8] | None = None


def inspect_images(every: int, chunk: Sequence[tuple[int, Payload]]) -> list[Inspected]:
    """Decode the images of a chunk, which is the only way to find truncated files.

    Every `every`-th image of the source is in the sample; 0: none.
    """
    return [
        _inspect(position, payload, bool(every) and position % every == 0)
        for position, payload in chunk
    ]


def _inspect(position: int, payload: Payload, sampled: bool) -> Inspected:
    if isinstance(payload, Rejection):
        return Inspected(position, reason=payload.reason)
    if isinstance(payload, np.ndarray):
        height, width = payload.shape[:2]
        digest = hashlib.sha256(payload.tobytes()).digest()
        square = _sample(Image.fromarray(payload).convert("RGB")) if sampled else None
        return Inspected(position, width, height, "array", digest, square=square)
    try:
        return _inspect_file(position, payload, sampled)
    except Undecodable as error:
        return Inspected(position, reason=str(error))


def _sample(image: Image.Image) -> NDArray[np.uint8]:
    return np.asarray(make_square(image, _SAMPLE_RULE))


def _inspect_file(position: int, content: bytes | Path, sampled: bool) -> Inspected:
    """Return the facts of an encoded image. Raises Undecodable."""
    try:
        image = decode(content, _WHITE)
        stored, size = stored_kind(content)[0], image.size
    except TooLarge:  # at full size; prepare reduces a JPEG while it decodes it
        image = decode(content, _WHITE, smallest=_SMALLEST)
        stored, size = stored_kind(content)
        if (image.width < image.height) != (size[0] < size[1]):  # rotated by its EXIF orientation
            size = size[::-1]
    digest = hashlib.sha256(repr(size).encode() + image.tobytes()).digest()
    square = _sample(image) if sampled else None
    return Inspected(position, *size, stored, digest, square=square)


def workers_for(entries: Sequence[Entry], workers: int | str) -> int:
    """Return the number of processes to decode these images with.

    `workers` is prepare.workers; auto means one per available processor. Returns 1 for images that
    are decoded before other processes could start.
    """
    if len(entries) < SINGLE_IMAGES and sum(entry.size for entry in entries) < SINGLE_BYTES:
        return 1
    if isinstance(workers, int):
        return workers
    if hasattr(os, "sched_getaffinity"):
        return min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    return min(MAX_WORKERS, os.cpu_count() or 1)


def chunked(payloads: Iterable[tuple[int, Payload]], result_bytes: int) -> Iterator[Chunk]:
    """Yield chunks limited in images, in bytes read, and in bytes of their results."""
    limit = max(1, min(CHUNK_IMAGES, CHUNK_BYTES // max(1, result_bytes)))
    chunk: Chunk = []
    held = 0
    for position, payload in payloads:
        chunk.append((position, payload))
        held += _bytes_of([(position, payload)])
        if len(chunk) >= limit or held >= CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def map_chunks(
    work: Callable[..., Result], args: Sequence[Any], chunks: Iterable[Chunk], workers: int
) -> Iterator[Result]:
    """Yield `work(*args, chunk)` for every chunk, in any order, from `workers` processes.

    With 1 worker this process does the work. When the caller stops early, or on an exception, the
    processes are terminated.

    Raises:
        UserError: a process was killed.
    """
    if workers == 1:
        yield from (work(*args, chunk) for chunk in chunks)
        return
    # ProcessPoolExecutor cannot terminate its processes: those that are new here are its own.
    unrelated = set(multiprocessing.active_children())
    # Not fork: this process may have threads, which hold locks that a copy never releases.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_exit_with_parent)
    try:
        yield from _as_completed(pool, work, args, chunks, workers * _AHEAD)
    except BrokenProcessPool as error:
        raise UserError(
            "A process that decodes images was killed, probably because memory ran out. Set "
            f"prepare.workers to fewer than {workers}.",
            run=("prepare",),
        ) from error
    except BaseException:
        for process in set(multiprocessing.active_children()) - unrelated:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _as_completed(
    pool: ProcessPoolExecutor,
    work: Callable[..., Result],
    args: Sequence[Any],
    chunks: Iterable[Chunk],
    ahead: int,
) -> Iterator[Result]:
    """Yield results as they arrive, with at most `ahead` chunks in transit.

    A large image is the only one in its chunk, so the bytes in transit are limited too: to `ahead`
    x AHEAD_BYTES, or one chunk.
    """
    pending: dict[Future[Result], int] = {}
    for chunk in chunks:
        size = _bytes_of(chunk)
        while pending and size + sum(pending.values()) > ahead * AHEAD_BYTES:
            yield from _completed(pending)
        pending[_submit(pool, work, args, chunk)] = size
        # Wait before the next chunk is read: it would be in memory too.
        while len(pending) >= ahead:
            yield from _completed(pending)
    while pending:
        yield from _completed(pending)


def _completed(pending: dict[Future[Result], int]) -> Iterator[Result]:
    """Wait for at least one result; remove what has arrived from `pending` and yield it."""
    for future in wait(pending, return_when=FIRST_COMPLETED).done:
        del pending[future]
        yield future.result()


def _bytes_of(chunk: Chunk) -> int:
    """Return the bytes of a chunk in memory."""
    arrays = sum(payload.nbytes for _, payload in chunk if isinstance(payload, np.ndarray))
    return arrays + sum(len(payload) for _, payload in chunk if isinstance(payload, bytes))


def _submit(
    pool: ProcessPoolExecutor, work: Callable[..., Result], args: Sequence[Any], chunk: Chunk
) -> Future[Result]:
    """Submit a chunk. Processes started here ignore Ctrl-C and do not import the main script."""
    # The pool starts its processes while a chunk is submitted, so both must hold during this call.
    with _sigint_blocked(), _main_module_hidden():
        return pool.submit(work, *args, chunk)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT. Processes started here inherit the mask, so only this one gets Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Only for a moment: a signal that arrives meanwhile is delivered when the mask is restored.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Hide the main script from new processes, which would run it again.

    They need nothing from it. It may import torch, which is slow, or have no
    `if __name__ == "__main__"`, which would start processes without end.
    """
    main = sys.modules["__main__"].__dict__
    hidden: dict[str, Any] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main["__spec__"] = main["__file__"] = None
    try:
        yield
    finally:
        del main["__file__"], main["__spec__"]
        main.update(hidden)


def _exit_with_parent() -> None:
    """In a worker: exit when the parent process ends, even if it is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_and_exit, args=(parent,), daemon=True).start()


def _wait_and_exit(parent: Any) -> None:
    parent.join()
    os._exit(1)  # sys.exit would end this thread alone
