"""Waiting until a verb's output is in the workspace, whole and of these settings.

The jobs of a chain start at once, and each waits for what it needs: with the verbs' own checks, so
that what an earlier run with other settings left satisfies nobody.
"""

from __future__ import annotations

import time

from ddpm_core.config import Config
from ddpm_core.config.durations import in_words
from ddpm_core.console import say
from ddpm_core.errors import UserError
from ddpm_core.freshness import CHECKS, check
from ddpm_core.storage import Unreachable
from ddpm_core.storage.workspace import Workspace

REMIND = 60.0  # seconds after which what is waited for is said again; no pause is longer
EASE = 10.0  # pauses are so many times as long as a look took, where that is more than `interval`


def wait(config: Config, verb: str, limit: float, interval: float) -> None:
    """Return once `verb` and all before it are up to date, looked at every `interval` seconds.

    Says what it waits for at once, at each change, and once a minute. Raises UserError after
    `limit` seconds.
    """
    if verb not in CHECKS:
        raise UserError(f"wait {verb}: one of {', '.join(CHECKS)} is needed.")
    looker = Looker(config, verb)
    start = time.monotonic()
    told, told_at = "", start
    while True:
        reason = looker.reason()
        now = time.monotonic()
        if reason is None:
            say(f"wait: {verb} is up to date in {config.workspace}, after {in_words(now - start)}.")
            return
        left = start + limit - now
        if left <= 0:
            raise UserError(
                f"After {in_words(limit)} {config.workspace} still lacks what `ddpm {verb}` makes: "
                f"{reason}. See what became of its job, or give more time with --limit."
            )
        if reason != told or now - told_at >= REMIND:
            say(
                f"wait: for {verb} in {config.workspace}, {in_words(now - start)} so far: {reason}."
            )
            told, told_at = reason, now
        time.sleep(min(left, max(interval, min(EASE * looker.took, REMIND))))


class Looker:
    """Looks at the workspace again and again; verbs found up to date are passed over meanwhile."""

    def __init__(self, config: Config, verb: str) -> None:
        verbs = list(CHECKS)
        self._config = config
        self._verbs = verbs[: verbs.index(verb) + 1]
        self._workspace: Workspace | None = None
        self._passed = 0
        self.took = 0.0  # seconds of the latest look, without what was imported for it

    def reason(self) -> str | None:
        """What is still lacking, `VERB: REASON`; None once nothing is.

        A place that does not answer, or changes while it is looked at, is a reason too: only what
        can never be a workspace raises UserError.
        """
        self.took = 0.0
        try:
            self._workspace = self._workspace or Workspace.open(self._config.workspace)
        except Unreachable as error:
            return str(error).rstrip(".")
        while self._passed < len(self._verbs):
            if reason := self._lacking(self._verbs[self._passed]):
                return reason
            self._passed += 1
        # What was passed long ago may have been made anew, or gone, meanwhile.
        self._passed = 0
        return next(filter(None, map(self._lacking, self._verbs)), None)

    def _lacking(self, verb: str) -> str:
        assert self._workspace is not None
        stale = check(verb)
        began = time.monotonic()
        try:
            reason = stale(self._config, self._workspace)
        except (UserError, OSError) as error:
            reason = str(error)
        self.took += time.monotonic() - began
        return f"{verb}: {reason.rstrip('.')}" if reason else ""
