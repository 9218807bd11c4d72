"""A name that all workers of one start agree on, and no earlier start knew.

torchrun's agent keeps one key-value store for all restarts of its workers (as in
https://github.com/pytorch/pytorch/issues/135712, and again in PyTorch 2.15). What a dead start left
there, such as the addresses that its workers listened at, is found by the next one, which then
connects to nobody. Below a name of its own a start finds only what is its own.
"""

from __future__ import annotations

import time
import uuid
from typing import Protocol

PAUSE = 0.005  # seconds between two looks at the store


class Store(Protocol):
    """What is needed of torch.distributed.Store; `get` waits for the key."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def agree(store: Store, rank: int, size: int, timeout: float) -> str:
    """The name, the same on every rank. Raises RuntimeError after `timeout` seconds.

    Rank 0 makes it. Each other rank asks under its own number, with a word that nobody used
    before: only rank 0 of this start can answer that word. What it asked is confirmed under the
    name, so that rank 0 knows that everybody is there, and whom a dead start asked for is not.
    """
    word = uuid.uuid4().hex
    if rank:
        store.set(f"asks/{rank}", word)
        name = store.get(f"answer/{word}").decode()
        store.set(f"{name}/{rank}", "")
        return name
    deadline = time.monotonic() + timeout
    missing = set(range(1, size))
    answered: set[str] = set()
    while missing:
        for rank_there in [r for r in missing if store.check([f"asks/{r}"])]:
            asked = store.get(f"asks/{rank_there}").decode()
            if asked not in answered:
                store.set(f"answer/{asked}", word)
                answered.add(asked)
            if store.check([f"{word}/{rank_there}"]):
                missing.remove(rank_there)
        if time.monotonic() > deadline:
            raise RuntimeError(f"Timed out waiting for the start of workers {sorted(missing)}")
        time.sleep(PAUSE)
    return word
