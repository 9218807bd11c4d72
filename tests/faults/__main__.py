"""python tests/faults: play schedules of faults, and report how each ended."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/, as in pytest
# Workers are forked from this process, so set it before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

from faults.play import Stage, play
from faults.schedule import KINDS, draw


def main() -> int:
    parser = argparse.ArgumentParser("python tests/faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--count", type=int, default=1, help="how many, of seeds in a row")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these; else in turn")
    parser.add_argument("--list", action="store_true", help="print the schedules, play none")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.count)
    kinds = [given.kind[i % len(given.kind)] if given.kind else None for i in range(len(seeds))]
    schedules = [draw(seed, kind) for seed, kind in zip(seeds, kinds, strict=True)]
    if given.list:
        print(*schedules, sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which runs the clean-up
    stage, failed = Stage(Path(tempfile.mkdtemp(prefix="ddpm-faults-"))), 0
    for schedule in schedules:
        print(schedule, flush=True)
        started = time.monotonic()
        try:
            play(schedule, stage)
            print(f"  held, {time.monotonic() - started:.1f} s", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"  FAILED, {time.monotonic() - started:.1f} s\n{error}", flush=True)
    print(f"{len(schedules) - failed} of {len(schedules)} schedules held.")
    if not failed:
        shutil.rmtree(stage.root)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
