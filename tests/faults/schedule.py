"""Draw a fault and its time from a seed, so that it can be replayed."""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPS = 40
SNAPSHOT_EVERY = 5

# Kinds after which torchrun's agent restarts the run with as many workers.
ELASTIC = ("kill-worker", "kill-first", "term-one", "hang", "hang-for-good", "kill-in-snapshot")
# Kinds after which the run ends, and a new start may use another number of workers.
ENDED = ("kill-agent", "resize", "truncated", "flipped", "missing", "disk-full")
# Kinds that do not interrupt training.
SERVERS = ("mlflow-down", "s3-down")
KINDS = (*ELASTIC, *ENDED, *SERVERS, "nodes")


@dataclass(frozen=True)
class Schedule:
    """One run and its fault.

    `worlds` are the numbers of workers before and after a new start. The fault hits rank `victim`,
    `delay` seconds after a step of `at` is logged. `chance`, in [0, 1), is for other choices of a
    kind.
    """

    seed: int
    kind: str
    start: str  # forked | torchrun | ddpm: see attempt
    worlds: tuple[int, int]
    at: tuple[int, int]
    delay: float
    victim: int
    chance: float

    def __str__(self) -> str:
        first, second = self.worlds
        world = f"{first} workers" if first == second else f"{first}, then {second} workers"
        return (
            f"seed {self.seed}: {self.kind}, {world} ({self.start}), rank {self.victim}, "
            f"{self.delay * 1000:.0f} ms after step {self.at[0]}"
            + (f" and {self.at[1]}" if self.kind == "mlflow-down" else "")
            + f", chance {self.chance:.3f}; replay: {self.replay}"
        )

    @property
    def replay(self) -> str:
        return f"python tests/faults --seed {self.seed} --kind {self.kind}"


def draw(seed: int, kind: str | None = None) -> Schedule:
    """Return the schedule of a seed; by default the seed also determines the kind, in turn."""
    kind = kind or KINDS[seed % len(KINDS)]
    dice = random.Random(f"{kind} {seed}")
    first = dice.choice((1, 2, 2, 2, 3, 3, 4))
    if kind in ("hang", "hang-for-good"):  # it takes a second worker to notice
        first = max(2, first)
    second = first
    if kind == "resize" or (kind in ENDED and dice.random() < 0.5):
        second = dice.choice([n for n in (1, 2, 3, 4) if n != first])
    start = dice.choices(("forked", "torchrun", "ddpm"), (12, 1, 1))[0]
    if kind == "kill-agent":  # forked workers have another parent and would not notice
        start = dice.choice(("torchrun", "ddpm"))
    if kind == "s3-down":
        start = "forked"
    if kind == "nodes":
        first, second, start = dice.choice((1, 2)), dice.choice((1, 2)), "forked"
    if first == 1 and start == "ddpm":
        start = "torchrun"
    early = dice.randrange(2 * SNAPSHOT_EVERY + 1, STEPS // 2)
    late = dice.randrange(STEPS // 2, STEPS - SNAPSHOT_EVERY)
    return Schedule(
        seed=seed,
        kind=kind,
        start=start,
        worlds=(first, second),
        at=(early, late),
        delay=dice.random() * 0.05,
        victim=0 if kind in ("kill-first", "kill-in-snapshot") else dice.randrange(first),
        chance=dice.random(),
    )
