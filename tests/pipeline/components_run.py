"""Call the components one after another in this process, with artifacts in a folder.

They are the functions that KFP runs in pods.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "pipelines")]

from kfp.dsl import PipelineTaskFinalStatus  # noqa: E402

from components.evaluate import evaluate  # noqa: E402
from components.finish import finish  # noqa: E402
from components.plan import plan  # noqa: E402
from components.prepare import prepare  # noqa: E402
from components.register import register  # noqa: E402
from components.sample import sample  # noqa: E402
from components.train import train  # noqa: E402


@dataclass
class Chain:
    """One pass over a workspace; `made` has the artifacts of each component's last call."""

    root: Path  # a folder for artifacts
    inputs: dict[str, Any]
    worst: float = 0.0
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    settings: str = ""

    def run(self) -> str:
        """Return the result of register, or why it did not run."""
        self.prepare()
        self.train()
        return self.score()

    def prepare(self) -> None:
        given = {"params": "", "overrides": [], "source": "", "tracking": "", **self.inputs}
        self.settings = self._call(prepare, **given, run_id="here")

    def train(self) -> None:
        data = self.made["prepare"]["data"]
        self._call(
            train, settings=self.settings, backend="process", job={}, patience="15m", data=data
        )

    def draw(self) -> list[Any]:
        """Sample all parts, and return their artifacts."""
        self.parts = self._call(plan, settings=self.settings, model=self.made["train"]["model"])
        samples = []
        for part in self.parts:
            self._call(sample, settings=self.settings, part=part)
            samples.append(self.made["sample"]["samples"])
        return samples

    def score(self) -> str:
        verdict = self._call(
            evaluate, settings=self.settings, worst=self.worst, samples=self.draw()
        )
        return str(self._call(register, settings=self.settings) if verdict == "pass" else verdict)

    def finish(self, state: str) -> str:
        """Return the summary of the run, which ended with this state in KFP."""
        status = PipelineTaskFinalStatus(state, "", "", None, None)
        given = {"params": "", "overrides": [], "source": "", "tracking": "", **self.inputs}
        self._call(finish, status=status, backend="process", run_id="here", **given)
        return Path(self.made["finish"]["summary"].path).read_text()

    def _call(self, component: Any, **given: Any) -> Any:
        """Call the component's function with new artifacts for its outputs."""
        number = next(_numbers)
        made = {}
        for name, annotation in component.python_func.__annotations__.items():
            if name not in given and name != "return":
                path = self.root / f"{number}-{component.name}" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                made[name] = annotation.__origin__(name=name, uri=str(path))
        self.made[component.name] = made
        before = {name: artifact.uri for name, artifact in made.items()}
        returned = component.python_func(**given, **made)
        assert {name: artifact.uri for name, artifact in made.items()} == before
        return returned


_numbers = itertools.count()
