"""What a run of the pipeline keeps in its workspace: the settings, and what became of each step.

KFP stores each input of a task several times, so tasks get a reference to the settings. It has no
field for the cause of a failure, so each step writes its error where `finish` reads it:

    pipeline/RUN/settings.json   the complete configuration, from `prepare`
    pipeline/RUN/steps/STEP.json while a step runs, and after it failed
    pipeline/RUN/outcome.json    what was registered, or why nothing was, after the last step
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import Any

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_core.storage.files import Schema
from ddpm_core.storage.workspace import Workspace, fingerprint

FOLDER = "pipeline"
RUNNING = ""  # the error of a step that has not ended


class _Settings(Schema):
    config: dict[str, Any]


class _Step(Schema):
    step: str
    error: str


class _Outcome(Schema):
    text: str


@dataclass(frozen=True)
class Run:
    """The records of one run of the pipeline. Methods raise UserError and OSError."""

    workspace: Workspace
    run_id: str

    def _key(self, name: str) -> str:
        return f"{FOLDER}/{re.sub('[^A-Za-z0-9_-]', '-', self.run_id)}/{name}"

    def save(self, config: Config) -> str:
        """Write the settings, and return the reference to them that components pass on."""
        settings = config.dump()
        self.workspace.write_json(self._key("settings.json"), {"config": settings})
        reference = {"workspace": self.workspace.uri, "run": self.run_id}
        return json.dumps({**reference, "settings": fingerprint(settings)})

    def begin(self, step: str) -> None:
        """Record that a step runs."""
        self.fail(step, RUNNING)

    def fail(self, step: str, error: str) -> None:
        """Record the error of a step."""
        self.workspace.write_json(self._step(step), {"step": step, "error": error})

    def succeed(self, step: str) -> None:
        """Remove the record of a step that has succeeded."""
        with contextlib.suppress(FileNotFoundError):
            self.workspace.storage.remove(self._step(step))

    def _step(self, step: str) -> str:
        return self._key(f"steps/{re.sub('[^a-z0-9]+', '-', step)}.json")

    def end(self, text: str) -> None:
        """Record what was registered, or why nothing was."""
        self.workspace.write_json(self._key("outcome.json"), {"text": text})

    def unfinished(self) -> dict[str, str]:
        """Return the error of each step that has not succeeded; RUNNING: it was stopped."""
        names = self.workspace.storage.names(self._key("steps"))
        found = (self.workspace.read_model(self._key(f"steps/{name}"), _Step) for name in names)
        return {one.step: one.error for one in found if one}

    def outcome(self) -> str:
        """Return what `end` recorded; empty if the last step has not succeeded."""
        outcome = self.workspace.read_model(self._key("outcome.json"), _Outcome)
        return outcome.text if outcome else ""


def open_run(reference: str) -> tuple[Config, Run]:
    """Return what `Run.save` wrote. Raises UserError if it is missing or was changed."""
    named = json.loads(reference)
    run = Run(Workspace.open(named["workspace"]), named["run"])
    key = run._key("settings.json")
    settings = run.workspace.read_model(key, _Settings)
    if settings is None or fingerprint(settings.config) != named["settings"]:
        raise UserError(
            f"{run.workspace.shown(key)} is missing or was changed. `prepare` wrote it for this "
            "run: submit the pipeline again."
        )
    return params.validate(settings.config), run
