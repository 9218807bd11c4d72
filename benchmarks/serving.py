"""Measure how many requests `ddpm serve` answers: python -m benchmarks.serving --json FILE.

    python -m benchmarks.serving -p params.yaml --json serving.json [--clients 64] [--rounds N]

Starts the server with the champion of the params. One client asks for one image after the other;
then many clients ask for one image each at the same time, and the server draws them in shared
batches. Both take turns. `ratio` is that of the requests a second, the median over rounds, and
`cpu_ratio` that of the server's processor time, which other programs on the machine change less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.peers import processor

ALONE = 16  # requests one by one in a round


@dataclass(frozen=True)
class Server:
    """A running `ddpm serve`."""

    url: str
    process: psutil.Process

    def cpu(self) -> float:
        """Return the processor time that it has used, in seconds."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def serving(params: Path) -> Iterator[Server]:
    """Start `ddpm serve`, and wait until its champion is loaded."""
    command = [sys.executable, "-m", "ddpm_core.cli", "serve", "-p", str(params.resolve())]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--port", "0"], cwd=params.resolve().parent, stdout=log, stderr=log
        )
        try:
            while "serving" not in (said := _content(log)):
                if process.poll() is not None:
                    raise SystemExit(said)
                time.sleep(0.1)
            port = said.partition("port ")[2].partition(".")[0]
            yield Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait()


def _content(log: Any) -> str:
    return os.pread(log.fileno(), 2**20, 0).decode()


def get(url: str) -> Any:
    """Return the JSON at an address."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)


def ask(url: str, seed: int, **fields: Any) -> None:
    """Ask for one image. Raises HTTPError if the server does not draw it."""
    body = json.dumps({"n": 1, "seed": seed, **fields}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        assert len(json.load(response)["images"]) == 1


@dataclass(frozen=True)
class Speed:
    """What some requests took, each."""

    requests: float  # a second
    cpu: float  # seconds of the server's processor time per request


def measure(server: Server, seeds: Sequence[int], clients: int, fields: dict[str, Any]) -> Speed:
    """Ask for an image of each seed, from so many clients at the same time."""
    with ThreadPoolExecutor(clients) as pool:
        before, started = server.cpu(), time.perf_counter()
        list(pool.map(lambda seed: ask(server.url, seed, **fields), seeds))
        seconds, cpu = time.perf_counter() - started, server.cpu() - before
    return Speed(len(seeds) / seconds, cpu / len(seeds))


def rounds(server: Server, clients: int, count: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Return both speeds in each round, and the medians of their ratios."""
    ask(server.url, 0, **fields)
    alone, together = [], []
    for number in range(1, count + 1):
        seeds = range(1000 * number, 1000 * number + ALONE + clients)
        alone.append(measure(server, seeds[:ALONE], 1, fields))
        together.append(measure(server, seeds[ALONE:], clients, fields))
        one, many = alone[-1], together[-1]
        print(f"{one.requests:.2f} requests/s one by one, {many.requests:.2f} together")
    both = list(zip(alone, together, strict=True))
    return {
        "one_by_one": [asdict(speed) for speed in alone],
        "together": [asdict(speed) for speed in together],
        "ratio": median(many.requests / one.requests for one, many in both),
        "cpu_ratio": median(one.cpu / many.cpu for one, many in both),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-p", type=Path, required=True, help="params file")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fields", type=json.loads, default={}, help='as in {"guidance": 1}')
    given = parser.parse_args()
    with serving(given.p) as server:
        found = rounds(server, given.clients, given.rounds, given.fields)
        version = get(f"{server.url}/version")
    model = {name: version[name] for name in ("name", "version", "step")}
    facts = {"processor": processor(), "model": model, "clients": given.clients}
    given.json.write_text(json.dumps({**facts, "fields": given.fields, **found}, indent=1) + "\n")
    print(f"{found['ratio']:.1f} times the requests, {found['cpu_ratio']:.1f} with equal CPU time")


if __name__ == "__main__":
    main()
