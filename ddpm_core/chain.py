"""The five verbs in a row, and what each still has to do."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from ddpm_core.config import Config
from ddpm_core.console import printable, say
from ddpm_core.data import prepare as data
from ddpm_core.errors import UserError
from ddpm_core.evaluation import evaluate as evaluation
from ddpm_core.freshness import CHECKS, check
from ddpm_core.registry import register as registry
from ddpm_core.runtime.distributed import world
from ddpm_core.sampling import run as generate
from ddpm_core.storage.workspace import DATA, REPORT, SAMPLES, SNAPSHOTS, Workspace
from ddpm_core.training import launch as launcher

VERBS = {verb: check(verb) for verb in CHECKS}


def run(
    config: Config, workspace: Workspace, environment: Mapping[str, str], arguments: Sequence[str]
) -> None:
    """Do all that is not up to date, in order."""

    def draw() -> None:
        with world(config.device, environment) as here:
            generate.sample(config, workspace, here)

    actions: dict[str, Callable[[], object]] = {
        "prepare": lambda: data.prepare(config, workspace),
        "train": lambda: launcher.train(config, environment, ["train", *arguments[1:]]),
        "sample": draw,
        "evaluate": lambda: evaluation.evaluate(config, workspace),
        "register": lambda: registry.register(config, workspace),
    }
    for verb, action in actions.items():
        reason = VERBS[verb](config, workspace)
        if reason is None:
            say(f"{verb}: up to date.")
        elif verb == "register" and not config.tracking.uri:
            say(f"{verb}: left out, since {reason}.")
        else:
            say(f"{verb}: {reason.rstrip('.')}.")
            action()
    ask = shlex.join(["ddpm", "status", *arguments[1:]])
    say(f"Done. Look at {workspace.shown(REPORT)}, or run: {ask}")


def status(config: Config, workspace: Workspace) -> str:
    """A table of the verbs: up to date, or why not; and what is stored."""
    table = Table("verb", "state")
    blocked = False
    for verb, stale in VERBS.items():
        try:
            reason = "waits for the above" if blocked else stale(config, workspace)
        except UserError as error:
            reason = str(error)
        blocked = blocked or reason is not None
        table.add_row(verb, "up to date" if reason is None else printable(reason))
    snapshots, samples = workspace.steps(SNAPSHOTS), workspace.steps(SAMPLES)
    where = f"workspace {printable(workspace.uri)}"  # above the table, which would cut it
    if not snapshots and not workspace.storage.names(DATA):
        where += "\nNothing of a run is there yet; -w names another workspace."
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
        console.print(f"snapshots: {_listed(snapshots)}; samples: {_listed(samples)}")
    return f"{where}\n{capture.get().rstrip()}"


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
