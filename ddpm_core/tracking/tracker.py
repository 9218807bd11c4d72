"""What MLflow is told of a run, from a thread of its own, whether MLflow is there or not.

log.jsonl is the record and MLflow a follower: rows beyond the last step that the server has are
sent, each once, also after the server was away or this process was killed.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from ddpm_core import __version__, console
from ddpm_core.config import Config
from ddpm_core.errors import UserError, not_installed
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.workspace import DATA, LOG, RUN, Workspace
from ddpm_core.text import counted, masked
from ddpm_core.tracking.client import is_active
from ddpm_core.tracking.errors import is_refusal, may_pass, reason
from ddpm_core.tracking.logtail import Log
from ddpm_core.tracking.run import MlflowRun

INTERVAL = 1.0  # seconds between two looks at the log
LONGEST_PAUSE = 30.0  # seconds between two attempts to reach a server that is away

Entry = list[Any]  # [method of MlflowRun, *arguments], plain data
SENDS = ("artifact", "report")  # methods that send a file, whose path is their first argument
SENT = ("params", "tags", "metrics", "scores", "dataset", *SENDS)  # that entries may name


class Tracker:
    """The MLflow run of a workspace. No call blocks, and none raises."""

    def __init__(self, config: Config, workspace: Workspace, identity: str | None) -> None:
        self._uri = config.tracking.uri
        self._experiment = config.tracking.experiment
        self._workspace = workspace
        self._identity = identity
        self._log = Log(workspace.path(LOG))
        self._copied_from = original(workspace)
        self._queue: deque[Entry] = deque(_sendable(self._known().get("unsent"), workspace.uri))
        self._run: MlflowRun | None = None
        self._outage = console.Outage()
        self._silent = self._quiet = False
        self.trouble = ""  # why MLflow cannot be used at present
        self._record: Callable[[Tracker], None] | None = None
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(
        cls,
        config: Config,
        workspace: Workspace,
        identity: str | None = None,
        record: Callable[[Tracker], None] | None = None,
        log: Path | None = None,
        quiet: bool = False,
    ) -> Tracker:
        """Begin to tell what the workspace's log holds, and what the methods below are given.

        The MLflow run is the one noted in run.json, unless that belongs to another server, to the
        workspace that this one was copied from or, by `identity` (the training's fingerprint,
        where the caller knows it), to another training.
        `record` tells, by the methods below, what a run has been told by earlier commands; it is
        asked where the run has nothing, as it was made anew. `log`: the workspace's, where it is
        written now. `quiet`: the caller reports `trouble`.
        """
        tracker = cls(config, workspace, identity)
        tracker._quiet = quiet
        tracker._record = record
        tracker._log = Log(log) if log else tracker._log
        if not config.tracking.uri:
            return tracker
        if find_spec("mlflow") is None:
            console.warn(f"No tracking. {not_installed('mlflow', 'tracking')}")
            return tracker
        tracker._thread = threading.Thread(target=tracker._work, name="tracking", daemon=True)
        tracker._put_data()
        tracker._thread.start()
        return tracker

    @classmethod
    def catch_up(cls, config: Config, workspace: Workspace, identity: str | None) -> None:
        """Send what an earlier command could not, where there is any."""
        known = workspace.read_json(RUN).get("mlflow")
        if isinstance(known, dict) and (known.get("unsent") or known.get("behind")):
            cls.open(config, workspace, identity).close()

    def params(self, params: Mapping[str, Any]) -> None:
        """Nested params; a later value of one that is known becomes the tag `changed.NAME`."""
        self._put("params", dict(params))

    def tags(self, tags: Mapping[str, Any]) -> None:
        self._put("tags", dict(tags))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Values that are not in log.jsonl, at the step they belong to."""
        self._put("metrics", step, int(time.time() * 1000), dict(values))

    def scores(self, evidence: Mapping[str, Any], step: int, values: Mapping[str, float]) -> None:
        """What was measured of the checkpoint of a step; each evidence has a run of its own."""
        self._put("scores", dict(evidence), step, int(time.time() * 1000), dict(values))

    def report(self, path: Path, folder: str | None, evidence: Mapping[str, Any]) -> None:
        """A file about scores of this evidence, read when it is sent."""
        self._put("report", str(path), folder, dict(evidence))

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """A file, read when it is sent."""
        self._put("artifact", str(path), folder)

    def close(self, timeout: float = 30.0, status: str = "FINISHED") -> None:
        """Send what is left, for at most `timeout` seconds, and end the MLflow run.

        What could not be sent is told, kept in the workspace, and sent by its next command.
        """
        if self._thread is None:
            return
        self._queue.append(["end", status])
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout)
        if self._thread.is_alive() and not self._run:
            self.trouble = reason(TimeoutError())
        self._silent = True
        left = list(self._queue)
        unsent = [entry for entry in left if entry[0] != "end"]
        lacking = self._log.remaining()
        try:
            # With entries left, and be it the end alone, the run is still RUNNING there.
            self._note(unsent=unsent, behind=bool(lacking or left))
        except (OSError, UserError) as error:
            console.warn(f"What MLflow lacks could not be noted in {RUN}: {error}")
        if (lacking or unsent) and not (self._quiet and self.trouble):
            rows = f"{counted(lacking, 'row')} of {self._log.path.name}"
            entries = f"{counted(len(unsent), 'entry')} such as settings, scores and files"
            what = [rows] * bool(lacking) + [entries] * bool(unsent)
            console.warn(
                f"MLflow at {masked(self._uri)} still lacks {' and '.join(what)}. The next "
                "command on this workspace sends what is missing."
            )
        self._thread = None

    def _put(self, *entry: Any) -> None:
        if self._thread is not None:
            self._queue.append(list(entry))
            self._wake.set()

    def _put_data(self) -> None:
        """Which data the run is about: in the UI, and as tags to search for."""
        manifest = self._workspace.read_json(f"{DATA}/{MANIFEST}")
        if "fingerprint" in manifest:
            source = manifest["source"] if isinstance(manifest.get("source"), dict) else {}
            data = str(manifest["fingerprint"])
            self._put("dataset", str(source.get("uri") or "data"), data, source)
            self.tags({"data": data, **{f"source.{key}": v for key, v in source.items()}})
        if self._identity:
            self.tags({"training": self._identity, "ddpm": __version__})

    def _work(self) -> None:
        pause = INTERVAL
        while True:
            last = self._closing.is_set()
            try:
                self._send()
                self._has_answered()
                pause = INTERVAL
            except Exception as error:
                self._run = None
                if not may_pass(error):
                    self._gives_up(error)
                    return
                self._has_failed(error)
                pause = min(LONGEST_PAUSE, pause * 2)
            if last:
                return
            # While the server is away only closing hurries the next attempt.
            (self._closing if self._outage.on else self._wake).wait(pause)
            self._wake.clear()

    def _send(self) -> None:
        """Send all that there is by now."""
        run = self._run = self._run or self._open()
        while True:
            rows, end = self._log.peek()
            run.rows(rows)
            if end == self._log.offset:
                break
            self._log.offset = end
        while self._queue:
            method, *arguments = self._queue[0]
            try:
                getattr(run, method)(*arguments)
            except Exception as error:
                if is_refusal(error) and is_active(run.client, run.run_id):
                    console.warn(f"MLflow refuses an entry, which is left out: {reason(error)}")
                elif may_pass(error):
                    raise
                else:
                    console.warn(
                        f"Skipped an invalid {method!r} entry for MLflow ({_named(error)})."
                    )
            self._queue.popleft()

    def _open(self) -> MlflowRun:
        known = self._known()
        name = Path(self._workspace.uri).name
        if self._identity:
            name = f"{name}-{self._identity[:8]}"
        token = known.get("token")
        if not (isinstance(token, str) and token.isalnum()):
            token = uuid4().hex
            self._note(token=token)
        run = MlflowRun.open(self._uri, self._experiment, name, known.get("run_id"), token)
        if known and (place := run.experiment()) != self._experiment:
            console.warn(
                f"MLflow's run of this workspace is in the experiment {place!r} and stays there; "
                f"tracking.experiment is {self._experiment!r} now."
            )
        self._log.offset = 0
        training = self._identity or known.get("training")
        self._note(run_id=run.run_id, training=training, behind=True)  # until it is closed
        if self._copied_from:
            console.say(
                f"This workspace is a copy of {self._copied_from}. It gets a separate MLflow run."
            )
            self._copied_from = ""
        if self._record and run.is_bare:
            self._record(self)
        self._record = None
        return run

    def _known(self) -> dict[str, Any]:
        """What run.json says of the MLflow run, if that is this server's and this training's."""
        known = self._workspace.read_json(RUN).get("mlflow")
        if not isinstance(known, dict) or masked(str(known.get("uri"))) != masked(self._uri):
            return {}
        other = self._identity and known.get("training") not in (None, self._identity)
        copied = self._copied_from and known.get("workspace") == self._copied_from
        return {} if other or copied else known

    def _note(self, **facts: Any) -> None:
        """Put facts into run.json; empty ones are taken out."""
        run = self._workspace.read_json(RUN)
        own = {"uri": masked(self._uri), "workspace": self._workspace.uri}
        merged = {**self._known(), **own, **facts}
        mlflow = {key: value for key, value in merged.items() if value}
        if run.get("mlflow") != mlflow:
            self._workspace.write_json(RUN, {**run, "mlflow": mlflow})

    def _has_failed(self, error: Exception) -> None:
        self.trouble = reason(error)
        if not (self._silent or self._quiet):
            self._outage.begins(
                f"MLflow at {masked(self._uri)} cannot be used: {self.trouble} The work goes on; "
                "what MLflow lacks is sent later."
            )

    def _gives_up(self, error: Exception) -> None:
        self.trouble = "an internal error."
        if not self._silent:
            console.warn(
                f"Stopped logging to MLflow after an internal error ({_named(error)}). "
                f"The work goes on, and {LOG} has all rows. Please report what follows."
            )
            traceback.print_exception(error)

    def _has_answered(self) -> None:
        self.trouble = ""
        if not self._silent:
            self._outage.ends(f"MLflow at {masked(self._uri)} is back and has got what it lacked.")


def original(workspace: Workspace) -> str:
    """Return the workspace that this one was copied from, or "".

    run.json names the workspace that wrote it. If that still exists with the same MLflow run, this
    one is a copy; otherwise it was moved, or is mounted elsewhere.
    """
    known = workspace.read_json(RUN).get("mlflow")
    if not isinstance(known, dict):
        return ""
    place = known.get("workspace")
    if not isinstance(place, str) or place == workspace.uri:
        return ""
    if place.startswith("s3://") and not workspace.uri.startswith("s3://"):
        return ""  # do not contact S3 for a workspace that does not use it
    try:
        if not place.startswith("s3://") and Path(place).samefile(workspace.uri):
            return ""
        theirs = Workspace.open(place).read_json(RUN).get("mlflow")
    except (OSError, ValueError, UserError):
        return ""
    same = isinstance(theirs, dict) and theirs.get("token") == known.get("token") is not None
    return place if same else ""


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {reason(error).rstrip('.')}"


def _sendable(entries: Any, root: str) -> list[Entry]:
    """The entries of a run.json that this program may have put there.

    A workspace may be a stranger's: it must not call what it likes, nor send files from elsewhere.
    """
    listed = entries if isinstance(entries, list) else []
    return [
        entry
        for entry in listed
        if isinstance(entry, list)
        and len(entry) > 1
        and entry[0] in SENT
        and (entry[0] not in SENDS or _below(entry[1], root))
    ]


def _below(path: Any, root: str) -> bool:
    try:
        return Path(path).resolve().is_relative_to(Path(root).resolve())
    except (TypeError, ValueError, OSError, RuntimeError):
        return False
