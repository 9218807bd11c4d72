"""The five verbs in order: whether each is up to date, running the others, waiting for output.

The code of a verb is imported only when it is used. Waiting for data or training therefore needs
a tenth of the memory that torch would take, and `ddpm status` works where torch is not installed.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from ddpm_core.config import Config
from ddpm_core.config.durations import in_words
from ddpm_core.console import printable, say
from ddpm_core.errors import UserError
from ddpm_core.storage import Unreachable
from ddpm_core.storage.workspace import DATA, REPORT, SAMPLES, SNAPSHOTS, Workspace

# Returns the reason why a verb has work to do, None if its output is complete and matches the
# config.
Check = Callable[[Config, Workspace], str | None]

MAX_PAUSE = 60.0  # seconds; also the interval between progress messages
CHECK_SHARE = 0.1  # at most about this share of the waiting time goes into checks, slow on S3


def _prepare() -> Check:
    from ddpm_core.data.prepare import stale

    return stale


def _train() -> Check:
    from ddpm_core.training.identity import stale

    return stale


def _sample() -> Check:
    from ddpm_core.sampling.freshness import stale

    return stale


def _evaluate() -> Check:
    from ddpm_core.evaluation.freshness import stale

    return stale


def _register() -> Check:
    from ddpm_core.registry.freshness import stale

    return stale


# In their order; each value imports the check of a verb and returns it.
CHECKS: dict[str, Callable[[], Check]] = {
    "prepare": _prepare,
    "train": _train,
    "sample": _sample,
    "evaluate": _evaluate,
    "register": _register,
}


def run(
    config: Config, workspace: Workspace, environment: Mapping[str, str], arguments: Sequence[str]
) -> None:
    """Run every verb that is not up to date, in order.

    `arguments` are those of the command line. The workers of a training get them too.
    """
    from ddpm_core.data.prepare import prepare
    from ddpm_core.evaluation.evaluate import evaluate
    from ddpm_core.registry.register import register
    from ddpm_core.runtime.distributed import world
    from ddpm_core.sampling.run import sample
    from ddpm_core.training.launch import train

    def sample_here() -> None:
        with world(config.device, environment) as this_process:
            sample(config, workspace, this_process)

    actions: dict[str, Callable[[], object]] = {
        "prepare": lambda: prepare(config, workspace),
        "train": lambda: train(config, environment, ["train", *arguments[1:]]),
        "sample": sample_here,
        "evaluate": lambda: evaluate(config, workspace),
        "register": lambda: register(config, workspace),
    }
    for verb, load_check in CHECKS.items():
        reason = load_check()(config, workspace)
        if reason is None:
            say(f"{verb}: up to date.")
        elif verb == "register" and not config.tracking.uri:
            say(f"{verb}: skipped, because {reason}.")
        else:
            say(f"{verb}: {reason.rstrip('.')}.")
            actions[verb]()
    command = shlex.join(["ddpm", "status", *arguments[1:]])
    say(f"Done. Look at {workspace.shown(REPORT)}, or run: {command}")


def status(config: Config, workspace: Workspace) -> str:
    """Return a table of the verbs (up to date, or why not), the stored steps, and held-out loss."""
    from ddpm_core.tracking.validation import sentence

    table = Table("verb", "state")
    blocked = False
    for verb, load_check in CHECKS.items():
        try:
            reason = "waits for the verb above" if blocked else load_check()(config, workspace)
        except UserError as error:
            reason = str(error)
        blocked = blocked or reason is not None
        table.add_row(verb, "up to date" if reason is None else printable(reason))
    snapshots, samples = workspace.steps(SNAPSHOTS), workspace.steps(SAMPLES)
    heading = f"workspace {printable(workspace.uri)}"  # not in the table, which would cut it
    if not snapshots and not workspace.storage.names(DATA):
        heading += "\nThis workspace is empty; -w selects another one."
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
        console.print(f"snapshots: {_listed(snapshots)}; samples: {_listed(samples)}")
        if found := sentence(config, workspace):
            console.print(found)
    return f"{heading}\n{capture.get().rstrip()}"


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def wait(config: Config, verb: str, timeout: float, interval: float) -> None:
    """Block until `verb` and every verb before it are up to date.

    All jobs of a pipeline start together, and each waits for its inputs. The verbs' own checks
    decide, so output from an earlier run with different settings does not count. They run every
    `interval` seconds, or less often if they are slow. Prints the reason for waiting at the start,
    whenever it changes, and once a minute.

    Raises:
        UserError: `verb` is unknown, or `timeout` seconds have passed.
    """
    if verb not in CHECKS:
        raise UserError(f"ddpm wait: got {verb!r}; must be one of {', '.join(CHECKS)}.")
    checker = Checker(config, verb)
    start = time.monotonic()
    printed, printed_at = "", start
    while True:
        reason = checker.reason()
        now = time.monotonic()
        waited = in_words(now - start)
        if reason is None:
            say(f"wait: {verb} is up to date in {config.workspace}, after {waited}.")
            return
        left = start + timeout - now
        if left <= 0:
            raise UserError(
                f"Timed out after {in_words(timeout)} waiting for `ddpm {verb}` in "
                f"{config.workspace}: {reason}. Check its job, or raise --limit."
            )
        if reason != printed or now - printed_at >= MAX_PAUSE:
            say(f"wait: for {verb} in {config.workspace}, {waited} so far: {reason}.")
            printed, printed_at = reason, now
        time.sleep(min(left, max(interval, min(checker.took / CHECK_SHARE, MAX_PAUSE))))


class Checker:
    """Repeats the checks up to one verb, and skips the verbs that were already up to date."""

    def __init__(self, config: Config, verb: str) -> None:
        verbs = list(CHECKS)
        self._config = config
        self._verbs = verbs[: verbs.index(verb) + 1]
        self._workspace: Workspace | None = None
        self._done = 0  # leading verbs that were up to date
        self.took = 0.0  # seconds of the latest checks, without their imports

    def reason(self) -> str | None:
        """Return why the first verb is not up to date, as `VERB: REASON`; None if all are.

        A workspace that is unreachable, or changes during a check, is a reason too. Raises
        UserError if the URI of the workspace is invalid.
        """
        self.took = 0.0
        try:
            self._workspace = self._workspace or Workspace.open(self._config.workspace)
        except Unreachable as error:
            return str(error).rstrip(".")
        while self._done < len(self._verbs):
            if reason := self._check(self._workspace, self._verbs[self._done]):
                return reason
            self._done += 1
        # The output of a verb that was skipped may have been replaced or deleted since.
        self._done = 0
        reasons = (self._check(self._workspace, verb) for verb in self._verbs)
        return next(filter(None, reasons), None)

    def _check(self, workspace: Workspace, verb: str) -> str | None:
        check = CHECKS[verb]()
        start = time.monotonic()
        try:
            reason = check(self._config, workspace)
        except (UserError, OSError) as error:
            reason = str(error)
        self.took += time.monotonic() - start
        return f"{verb}: {reason.rstrip('.')}" if reason else None
