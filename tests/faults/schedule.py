"""What happens in a schedule, and when: all drawn from its seed, so that it can be replayed."""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPS = 40
SNAPSHOT_EVERY = 5

# Kinds whose run is started again by torchrun's agent, with as many workers.
ELASTIC = ("kill-worker", "kill-first", "term-one", "hang", "hang-for-good", "kill-in-snapshot")
# Kinds whose run ends, and is started again with as many workers or another number.
ENDED = ("kill-agent", "resize", "truncated", "flipped", "missing", "disk-full")
# Kinds that training goes on through.
SERVERS = ("mlflow-down", "s3-down")
KINDS = (*ELASTIC, *ENDED, *SERVERS, "nodes")


@dataclass(frozen=True)
class Schedule:
    """One run and what is done to it.

    `worlds` are the workers at first and after the run is started again; `at` the logged steps
    after which something happens, `delay` the seconds that pass then; `victim` the rank it
    happens to; `chance` a number in [0, 1) for what else a kind has to choose.
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
    """The schedule of a seed; without a kind, kinds come in turn so that all are played."""
    kind = kind or KINDS[seed % len(KINDS)]
    dice = random.Random(f"{kind} {seed}")
    first = dice.choice((1, 2, 2, 2, 3, 3, 4))
    if kind in ("hang", "hang-for-good"):  # one worker alone has nobody who could notice
        first = max(2, first)
    second = first
    if kind == "resize" or (kind in ENDED and dice.random() < 0.5):
        second = dice.choice([n for n in (1, 2, 3, 4) if n != first])
    start = dice.choices(("forked", "torchrun", "ddpm"), (12, 1, 1))[0]
    if kind == "kill-agent":  # only workers that the agent itself forked can miss it
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
