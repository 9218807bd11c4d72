"""Send a run's log.jsonl to MLflow, from a background thread.

log.jsonl is the record of a run, and MLflow has a copy of it. The thread sends the rows after the
last step that the server has, each once, also after an outage of the server or the death of this
process.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
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
from ddpm_core.tracking.errors import is_rejection, is_transient, reason
from ddpm_core.tracking.record import Entry, RunRecord, copied_from, read_record, write_record
from ddpm_core.tracking.rows import is_number
from ddpm_core.tracking.run import MlflowRun, Row
from ddpm_core.tracking.system import SystemMetrics

INTERVAL = 1.0  # seconds between two looks at the log
MAX_PAUSE = 30.0  # seconds between two attempts during an outage; the pauses double up to it
ROWS_AT_ONCE = 100

# What an entry of the queue may name, and the method that sends it.
SENDERS: dict[str, Callable[..., None]] = {
    "params": MlflowRun.params,
    "tags": MlflowRun.tags,
    "metrics": MlflowRun.metrics,
    "scores": MlflowRun.scores,
    "dataset": MlflowRun.dataset,
    "artifact": MlflowRun.artifact,
    "report": MlflowRun.report,
    "end": MlflowRun.end,
}
FILES = ("artifact", "report")  # entries whose first argument is the path of a file


class Log:
    """Reads the rows of a log.jsonl while it grows. `offset` is the position in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def peek(self, limit: int = ROWS_AT_ONCE) -> tuple[list[Row], int]:
        """Return the rows of up to `limit` complete lines, and the offset after them."""
        if not self.path.is_file():
            return [], self.offset
        if self.path.stat().st_size < self.offset:  # truncated by a run that resumed
            self.offset = 0
        rows, end = [], self.offset
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line, _ in zip(file, range(limit), strict=False):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                if row := parse_row(line):
                    rows.append(row)
        return rows, end

    def remaining(self) -> int:
        """Return the number of complete rows after the offset."""
        rows, _ = self.peek(limit=2**62)
        return len(rows)


def parse_row(line: bytes) -> Row | None:
    """Return the numbers of a line of log.jsonl, or None if the line is damaged."""
    try:
        values = json.loads(line)
        step = int(values.pop("step"))
        milliseconds = int(1000 * float(values.pop("time", None) or time.time()))
        numbers = {key: float(value) for key, value in values.items() if is_number(value)}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return Row(step, milliseconds, numbers)


class Tracker:
    """Sends a workspace's log, settings and scores to MLflow. No call blocks, and none raises."""

    def __init__(self, config: Config, workspace: Workspace, identity: str | None) -> None:
        self._uri = config.tracking.uri
        self._experiment = config.tracking.experiment
        self._workspace = workspace
        self._identity = identity
        self._log = Log(workspace.path(LOG))
        self._copied_from = copied_from(workspace)
        self._queue: deque[Entry] = deque(_allowed(self._known().unsent, workspace.uri))
        self._run: MlflowRun | None = None
        self._outage = console.Outage()
        self._silent = self._quiet = False
        self.trouble = ""  # why MLflow is unavailable at present
        self._replay: Callable[[Tracker], None] | None = None
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._system: SystemMetrics | None = None

    @classmethod
    def open(
        cls,
        config: Config,
        workspace: Workspace,
        identity: str | None = None,
        replay: Callable[[Tracker], None] | None = None,
        log: Path | None = None,
        quiet: bool = False,
    ) -> Tracker:
        """Start to send the log, and the entries that the methods below add.

        The MLflow run is the one in run.json, unless that belongs to a different server, to a
        different training, or to the workspace that this one was copied from.

        Args:
            config: Its `tracking` names the server and the experiment.
            workspace: Has the log and run.json.
            identity: The fingerprint of the training, if the caller knows it.
            replay: Logs again, by the methods below, what earlier commands have logged. Called if
                the run is empty, because it is new.
            log: The log.jsonl of a training in progress, if there is one. With
                `tracking.system_metrics`, the use of the machine is logged meanwhile.
            quiet: Do not print outages; the caller reports `trouble`.
        """
        tracker = cls(config, workspace, identity)
        tracker._quiet = quiet
        tracker._replay = replay
        tracker._log = Log(log) if log else tracker._log
        if not config.tracking.uri:
            return tracker
        if find_spec("mlflow") is None:
            console.warn(f"Tracking is off. {not_installed('mlflow', 'tracking')}")
            return tracker
        if log and config.tracking.system_metrics:
            try:
                tracker._system = SystemMetrics(config.tracking.uri)
            except UserError as error:
                console.warn(f"tracking.system_metrics is off. {error}")
        tracker._thread = threading.Thread(target=tracker._work, name="tracking", daemon=True)
        tracker._put_data()
        tracker._thread.start()
        return tracker

    @classmethod
    def catch_up(cls, config: Config, workspace: Workspace, identity: str | None) -> None:
        """Send what an earlier command could not send, if there is anything."""
        record = read_record(workspace)
        if record.unsent or record.behind:
            cls.open(config, workspace, identity).close()

    def params(self, params: Mapping[str, Any]) -> None:
        """Log nested params. A later, different value becomes the tag `changed.NAME`."""
        self._put("params", dict(params))

    def tags(self, tags: Mapping[str, Any]) -> None:
        """Log tags; a later value replaces an earlier one."""
        self._put("tags", dict(tags))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log values of a step that are not in log.jsonl."""
        self._put("metrics", step, int(time.time() * 1000), dict(values))

    def scores(self, evidence: Mapping[str, Any], step: int, values: Mapping[str, float]) -> None:
        """Log the scores of the checkpoint of a step. Each evidence has a separate run."""
        self._put("scores", dict(evidence), step, int(time.time() * 1000), dict(values))

    def report(self, path: Path, folder: str | None, evidence: Mapping[str, Any]) -> None:
        """Upload a file to the run for this evidence. It is read when it is sent."""
        self._put("report", str(path), folder, dict(evidence))

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Upload a file. It is read when it is sent."""
        self._put("artifact", str(path), folder)

    def close(self, timeout: float = 30.0, status: str = "FINISHED") -> None:
        """Send the rest, for at most `timeout` seconds, and end the MLflow run.

        What could not be sent is reported, kept in run.json, and sent by the next command.
        """
        if self._thread is None:
            return
        system, self._system = self._system, None
        if system:
            with suppress(Exception):  # the thread below reports an outage
                system.stop()
        self._queue.append(["end", status])
        self._closing.set()  # after the append, so that the last attempt sends the end
        self._wake.set()
        self._thread.join(timeout)
        if self._thread.is_alive() and not self._run:
            self.trouble = reason(TimeoutError())
        self._silent = True  # the thread may still run, but this process reports no more
        left = list(self._queue)
        unsent = [entry for entry in left if entry[0] != "end"]
        rows = self._log.remaining()
        try:
            # With any entry left, even the end alone, the run is still RUNNING on the server.
            self._update_record(unsent=unsent, behind=bool(rows or left))
        except (OSError, UserError) as error:
            console.warn(f"Could not record in {RUN} what MLflow has not received: {error}")
        if (rows or unsent) and not (self._quiet and self.trouble):
            parts = [f"{counted(rows, 'row')} of {self._log.path.name}"] * bool(rows)
            entries = f"{counted(len(unsent), 'entry')} such as settings, scores and files"
            parts += [entries] * bool(unsent)
            console.warn(
                f"MLflow at {masked(self._uri)} has not received {' and '.join(parts)}. The next "
                "command on this workspace sends them."
            )
        self._thread = None

    def _put(self, *entry: Any) -> None:
        if self._thread is not None:
            self._queue.append(list(entry))
            self._wake.set()

    def _put_data(self) -> None:
        """Log which data and training the run is about: for the UI, and as tags for searches."""
        manifest = self._workspace.read_json(f"{DATA}/{MANIFEST}")
        if "fingerprint" in manifest:
            source = manifest["source"] if isinstance(manifest.get("source"), dict) else {}
            data = str(manifest["fingerprint"])
            self._put("dataset", str(source.get("uri") or "data"), data, source)
            self.tags({"data": data, **{f"source.{key}": v for key, v in source.items()}})
        if self._identity:
            self.tags({"training": self._identity, "ddpm": __version__})

    def _work(self) -> None:
        """Send new rows and entries until the tracker is closed, then once more.

        No tenacity here: closing must cut a pause short but still allow a last attempt, and that
        took three callbacks that share state, in 30 lines instead of 20.
        """
        pause = INTERVAL
        while True:
            last = self._closing.is_set()
            try:
                self._send()
                self._report_recovery()
                pause = INTERVAL
            except Exception as error:
                self._run = None
                if not is_transient(error):
                    self._report_bug(error)
                    return
                self._report_outage(error)
                pause = min(MAX_PAUSE, pause * 2)
            if last:
                return
            # During an outage new entries do not shorten the pause; closing does.
            (self._closing if self._outage.on else self._wake).wait(pause)
            self._wake.clear()

    def _send(self) -> None:
        """Send all rows and entries that exist now."""
        run = self._run = self._run or self._open()
        self._measure(run.run_id)
        while True:
            rows, end = self._log.peek()
            run.rows(rows)
            if end == self._log.offset:
                break
            self._log.offset = end  # only now, so that rows whose sending failed are sent again
        while self._queue:
            name, *arguments = self._queue[0]
            try:
                SENDERS[name](run, *arguments)
            except Exception as error:
                if is_rejection(error) and is_active(run.client, run.run_id):
                    console.warn(f"MLflow rejected an entry; skipped it: {reason(error)}")
                elif is_transient(error):
                    raise
                else:
                    console.warn(
                        f"Skipped an invalid {name!r} entry for MLflow ({_describe(error)})."
                    )
            self._queue.popleft()

    def _measure(self, run_id: str) -> None:
        """Start or restart the system metrics; an error of this machine turns them off."""
        try:
            if system := self._system:
                system.ensure(run_id)
        except Exception as error:
            if is_transient(error):
                raise
            self._system = None
            console.warn(f"Turned off tracking.system_metrics ({_describe(error)}).")

    def _open(self) -> MlflowRun:
        """Return the workspace's MLflow run, and note its ID in run.json."""
        record = self._known()
        name = Path(self._workspace.uri).name
        if self._identity:
            name = f"{name}-{self._identity[:8]}"
        token = record.token
        if not token:
            token = uuid4().hex
            self._update_record(token=token)  # before the run exists, see MlflowRun.open
        run = MlflowRun.open(self._uri, self._experiment, name, record.run_id or None, token)
        if record.uri and (experiment := run.experiment()) != self._experiment:
            console.warn(
                f"The MLflow run of this workspace stays in the experiment {experiment!r}; "
                f"tracking.experiment is now {self._experiment!r}."
            )
        self._log.offset = 0  # MlflowRun.rows skips the rows that the server already has
        training = self._identity or record.training
        self._update_record(run_id=run.run_id, training=training, behind=True)  # until `close`
        if self._copied_from:
            console.say(
                f"This workspace is a copy of {self._copied_from}. It gets a separate MLflow run."
            )
            self._copied_from = ""
        if self._replay and run.is_empty:
            self._replay(self)
        self._replay = None
        return run

    def _known(self) -> RunRecord:
        """Return the record of run.json, or an empty one if its run is not for this tracker."""
        record = read_record(self._workspace)
        other_server = masked(record.uri) != masked(self._uri)
        other_training = self._identity and record.training not in ("", self._identity)
        copied = self._copied_from and record.workspace == self._copied_from
        return RunRecord() if other_server or other_training or copied else record

    def _update_record(self, **changes: Any) -> None:
        own = {"uri": masked(self._uri), "workspace": self._workspace.uri}
        record = self._known().model_copy(update={**own, **changes})
        write_record(self._workspace, record)

    def _report_outage(self, error: Exception) -> None:
        self.trouble = reason(error)
        if not (self._silent or self._quiet):
            self._outage.begins(
                f"MLflow at {masked(self._uri)} is unavailable: {self.trouble} The command "
                "continues; MLflow gets the missing entries later."
            )

    def _report_bug(self, error: Exception) -> None:
        self.trouble = "an internal error."
        if not self._silent:
            console.warn(
                f"Stopped logging to MLflow after an internal error ({_describe(error)}). "
                f"The command continues, and {LOG} has all rows. Please report this traceback:"
            )
            traceback.print_exception(error)

    def _report_recovery(self) -> None:
        self.trouble = ""
        if not self._silent:
            self._outage.ends(f"MLflow at {masked(self._uri)} is back and up to date.")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {reason(error).rstrip('.')}"


def _allowed(entries: list[Entry], root: str) -> list[Entry]:
    """Return the entries of a run.json that this program may have written.

    A workspace may come from a stranger, whose entries must not send files from outside it.
    """
    return [
        entry
        for entry in entries
        if entry[0] in SENDERS
        and entry[0] != "end"
        and (entry[0] not in FILES or _is_below(entry[1], root))
    ]


def _is_below(path: Any, root: str) -> bool:
    try:
        return Path(path).resolve().is_relative_to(Path(root).resolve())
    except (TypeError, ValueError, OSError, RuntimeError):
        return False
