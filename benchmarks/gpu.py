"""Run every check that requires a GPU, in nine minutes: python -m benchmarks.gpu.

Writes a JSON file. The exit status is 1 if a check failed and 3 without a GPU. --device cpu tests
this program itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.peers import versions

ROOT = Path(__file__).parent.parent
STATES = {"skipped": "not reached", "failure": "fail", "error": "fail"}  # pytest's words -> ours
SCORING = 100.0  # seconds to sample and score the network that the preset trained
CIFAR = "train.compile=false train.ema=[.999] sample.count=2000 sample.sampler=ddim sample.steps=50"


class Checks:
    """Runs checks until the time is over, and writes all results after each."""

    def __init__(self, device: str, budget: float, file: Path, about: dict[str, Any]) -> None:
        self.device, self.file, self.about, self.results = device, file, about, list[Any]()
        self.end = self.until = time.monotonic() + budget  # of all checks, of the current one

    def add(self, check: str, state: str, why: Any = None, **facts: Any) -> None:
        """Record and print the result of a check: state "pass", "fail" or "not reached"."""
        self.results.append({"check": check, "state": state, "why": why, **facts})
        self.file.write_text(json.dumps({**self.about, "checks": self.results}, indent=1) + "\n")
        print(f"{state:>11}  {check}  {why or ''}"[:300], flush=True)

    def check(self, name: str, limit: float, work: Any, *given: Any) -> None:
        """Run work(*given) as a check of at most `limit` seconds; an exception fails it."""
        started, facts, why = time.monotonic(), None, None
        self.until = min(self.end, started + limit)
        try:
            state, facts = "pass", work(*given)
        except Exception as error:
            state, why = "not reached" if type(error) is TimeoutError else "fail", str(error)
        self.add(name, state, why, facts=facts, took=round(time.monotonic() - started, 1))

    def run(self, *command: str, cut: bool = False) -> None:
        """Run a module of Python to its end; `cut`: stop it when only the time to score is left."""
        end = max(time.monotonic() + 1, self.until - (SCORING if cut else 15))
        within = ["timeout", "-sINT", "-k10", f"{end - time.monotonic():.0f}", sys.executable, "-m"]
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            status = subprocess.call([*within, *command], stdout=output, stderr=output, cwd=ROOT)
            output.seek(0)
            if status and time.monotonic() < end - 1:
                raise RuntimeError(f"Status {status}: {output.read()[-1500:]}")
            if status and not cut:
                raise TimeoutError("Timed out before it finished.")

    def tests(self, report: Path) -> None:
        """Run the tests with the mark `cuda`; each of them is a check too."""
        report.write_text("<none/>")  # stays if pytest is killed
        os.environ["DDPM_TEST_GPU"] = self.device.partition(":")[0]
        files = [str(f) for f in ROOT.glob("tests/**/test_*.py") if "mark.cuda" in f.read_text()]
        try:
            self.run("pytest", *files, "-m", "cuda", f"--junitxml={report}")
        finally:
            for case in ElementTree.parse(report).iter("testcase"):
                bad = [(STATES[p.tag], p.get("message")) for p in case if p.tag in STATES]
                self.add(str(case.get("name")), *(bad or [("pass", None)])[0])

    def peers(self, folder: str, batch: int, *given: str) -> Any:
        """Compare with diffusers in bf16, on Ho's network (on a CPU: that of the digits)."""
        name = "digits" if self.device == "cpu" else "ho"
        where = ("--networks", name, "--device", self.device, "--json", f"{folder}/peers.json")
        which = ("--batch", str(batch), "--diffusers", "bf16", "--rounds", "8", *given)
        self.run("benchmarks.peers", *where, *which)
        return json.loads(Path(folder, "peers.json").read_text())

    def preset(self, folder: str, images: Path) -> Any:
        """Train the CIFAR-10 preset for the remaining time, then sample and score it."""
        if not images.exists() or self.until - time.monotonic() < SCORING + 60:
            raise TimeoutError(
                f"Requires {SCORING + 60:.0f} s and the images of CIFAR-10: --cifar10 {images}"
            )
        given = (f"prepare.source={images.absolute()}", "tracking.uri=", f"device={self.device}")
        options = ["-p", f"{ROOT}/presets/cifar10.yaml", "-w", f"{folder}/cifar10"]
        options += [part for one in (*given, *CIFAR.split()) for part in ("-S", one)]
        for verb in ("prepare", "train", "sample", "evaluate"):
            self.run("ddpm_core.cli", verb, *options, cut=verb == "train")
        return json.loads(Path(folder, "cifar10/metrics.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--budget", type=float, default=530.0, help="seconds for all checks")
    parser.add_argument("--json", type=Path, help="default: docs/results/gpu-CARD.json")
    parser.add_argument("--cifar10", type=Path, default=ROOT / "../shared/data/cifar10-jpeg.zip")
    given = parser.parse_args()
    if given.device != "cpu" and not torch.cuda.is_available():
        print("CUDA finds no GPU on this machine. No check was run.", file=sys.stderr)
        return 3
    card = "cpu" if given.device == "cpu" else torch.cuda.get_device_name(given.device)
    file = given.json or ROOT / f"docs/results/gpu-{'-'.join(card.lower().split())}.json"
    about = {"card": card, "versions": {**versions(), "cuda": torch.version.cuda}}
    checks, train = Checks(given.device, given.budget, file, about), "--train-only"
    with tempfile.TemporaryDirectory() as folder:
        checks.check("tests marked for CUDA", 180, checks.tests, Path(folder, "tests.xml"))
        checks.check("peers, B512", 170, checks.peers, folder, 512)
        checks.check("peers, B128", 120, checks.peers, folder, 128, train)
        checks.check("B512, any kernels", 120, checks.peers, folder, 512, train, "--any-kernels")
        checks.add("the whole step as one CUDA graph", "not reached", "ddpm does not support this.")
        checks.check("the CIFAR-10 preset", 1e9, checks.preset, folder, given.cifar10)
    return int(any(result["state"] == "fail" for result in checks.results))


if __name__ == "__main__":
    sys.exit(main())
