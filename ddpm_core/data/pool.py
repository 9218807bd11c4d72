"""Decoding in several processes, with a bounded number of pictures on their way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from ddpm_core.data.sources.base import Entry, Payload
from ddpm_core.errors import UserError

CHUNK_BYTES = 2**22
CHUNK_PICTURES = 64
MOST_WORKERS = 8  # what `auto` takes at most: beyond, reading is what limits
ALONE_PICTURES, ALONE_BYTES = 4000, 2**24
_AHEAD, AHEAD_BYTES = 3, 2**24  # chunks on their way for each worker, and bytes for each of them

Chunk = list[tuple[int, Payload]]
Result = TypeVar("Result")


def worker_count(workers: int | str) -> int:
    """The processes of prepare.workers; auto: one for each processor this process may use."""
    if isinstance(workers, int):
        return workers
    if hasattr(os, "sched_getaffinity"):
        return min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    return min(MOST_WORKERS, os.cpu_count() or 1)


def workers_for(entries: Sequence[Entry], workers: int | str) -> int:
    """One for what is decoded before other processes have started, else `worker_count`."""
    if len(entries) < ALONE_PICTURES and sum(entry.size for entry in entries) < ALONE_BYTES:
        return 1
    return worker_count(workers)


def chunked(payloads: Iterable[tuple[int, Payload]], result_bytes: int) -> Iterator[Chunk]:
    """Cut a stream into chunks bounded in number, in bytes read and in bytes of their results."""
    most = max(1, min(CHUNK_PICTURES, CHUNK_BYTES // max(1, result_bytes)))
    chunk: Chunk = []
    held = 0
    for position, payload in payloads:
        chunk.append((position, payload))
        held += len(payload) if isinstance(payload, bytes) else 0
        if len(chunk) >= most or held >= CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def spread(
    work: Callable[..., Result], args: Sequence[Any], chunks: Iterable[Chunk], workers: int
) -> Iterator[Result]:
    """`work(*args, chunk)` of every chunk, in any order, by `workers` processes (1: none extra).

    When the caller stops early, or an exception passes, the processes are ended.
    """
    if workers == 1:
        yield from (work(*args, chunk) for chunk in chunks)
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_outlive_nobody)
    try:
        yield from _in_order_of_completion(pool, work, args, chunks, workers * _AHEAD)
    except BrokenProcessPool as error:
        raise UserError(
            "A process that decodes pictures was killed, most often because memory ran out: "
            f"set prepare.workers to fewer than {workers}, and run prepare again."
        ) from error
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order_of_completion(
    pool: ProcessPoolExecutor,
    work: Callable[..., Result],
    args: Sequence[Any],
    chunks: Iterable[Chunk],
    ahead: int,
) -> Iterator[Result]:
    """At most `ahead` chunks are on their way. Large images are a chunk each: of them, as many as
    fit into `ahead` times AHEAD_BYTES, and at least one."""
    pending: dict[Future[Result], int] = {}
    for chunk in chunks:
        size = _bytes_of(chunk)
        while len(pending) >= ahead or (
            pending and size + sum(pending.values()) > ahead * AHEAD_BYTES
        ):
            yield from _completed(pending)
        pending[_submit(pool, work, args, chunk)] = size
    while pending:
        yield from _completed(pending)


def _completed(pending: dict[Future[Result], int]) -> Iterator[Result]:
    for future in wait(pending, return_when=FIRST_COMPLETED).done:
        del pending[future]
        yield future.result()


def _bytes_of(chunk: Chunk) -> int:
    return sum(len(payload) for _, payload in chunk if isinstance(payload, bytes))


def _submit(
    pool: ProcessPoolExecutor, work: Callable[..., Result], args: Sequence[Any], chunk: Chunk
) -> Future[Result]:
    """Submit; the processes that this may start see neither SIGINT nor the running script."""
    with _interrupts_held_back(), _main_unseen():
        return pool.submit(work, *args, chunk)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """New processes inherit the mask, so Ctrl-C reaches this process alone, which ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _main_unseen() -> Iterator[None]:
    """A new process would run the script anew that runs here, though it needs nothing of it: slow
    where it imports torch, without end where it has no `if __name__ == "__main__"`."""
    main = sys.modules["__main__"].__dict__
    seen: dict[str, Any] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main["__spec__"] = main["__file__"] = None
    try:
        yield
    finally:
        del main["__file__"], main["__spec__"]
        main.update(seen)


def _outlive_nobody() -> None:
    """In a worker: end when the parent has ended, however that happened."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
