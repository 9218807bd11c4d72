"""One run on an MLflow server. Everything is sent once, also after a restart.

Each call may raise whatever the network or the server raises; the tracker handles that.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ddpm_core
from ddpm_core.errors import require
from ddpm_core.text import masked
from ddpm_core.tracking.client import connect, find_experiment, is_active

# MLflow's limits: characters of a value, and items of a request.
PARAM_LENGTH, TAG_LENGTH = 6000, 8000
DATASET_LENGTH, RUN_LENGTH = 500, 250
METRIC_BATCH, PARAM_BATCH = 1000, 100

# Tags of a run.
TOKEN = "ddpm.token"  # identifies the workspace, whose record may lack the run's ID after a crash
EVIDENCE = "ddpm.evidence"  # the hash of the evidence of its scores
PARENT = "mlflow.parentRunId"  # the UI shows the run below this one

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """The numbers in one line of log.jsonl, their step, and the time in Unix milliseconds."""

    step: int
    milliseconds: int
    values: dict[str, float]


class MlflowRun:
    """An open run on a server. Rows and metrics that the server already has are not sent again."""

    def __init__(self, client: Any, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        run = client.get_run(run_id)
        self._params: dict[str, str] = dict(run.data.params)
        # The last step of each metric comes with the run. The history of a metric takes further
        # requests, so `_history` has it only for metrics that get an earlier step.
        self._last = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self._history: dict[str, list[Any]] = {}
        self._datasets = {used.dataset.digest for used in run.inputs.dataset_inputs}
        self._experiment = run.info.experiment_id
        self._evidence = run.data.tags.get(EVIDENCE)
        self._children: dict[str, MlflowRun] = {}

    @classmethod
    def open(cls, uri: str, experiment: str, name: str, known: str | None, token: str) -> MlflowRun:
        """Return the run with the ID `known`, or the run tagged with `token`, or a new run.

        The token matters when a connection breaks after the server has created the run, and before
        the response with its ID arrives.
        """
        client = connect(uri)
        if known and is_active(client, known):
            client.update_run(known, status="RUNNING")
            return cls(client, known)
        parent = find_experiment(client, uri, experiment)
        runs = client.search_runs([parent], f"tags.`{TOKEN}` = '{token}'", max_results=1)
        if not runs:
            tags = {TOKEN: token, **_origin()}
            runs = [client.create_run(parent, run_name=_shorten(name, RUN_LENGTH), tags=tags)]
        return cls(client, str(runs[0].info.run_id))

    def experiment(self) -> str:
        """Return the name of the run's experiment."""
        return str(self.client.get_experiment(self._experiment).name)

    @property
    def is_empty(self) -> bool:
        """Return whether no command has logged params to this run yet."""
        return not self._params

    def rows(self, rows: Sequence[Row]) -> None:
        """Send the new ones among rows of ascending steps, as metrics `train/NAME`."""
        from mlflow.entities import Metric

        metrics = [
            Metric(key, value, row.milliseconds, row.step)
            for row in rows
            for key, value in ((metric_name("train", k), v) for k, v in row.values.items())
            if row.step > self._last.get(key, -1)
        ]
        for batch in _batches(metrics, METRIC_BATCH):
            self.client.log_batch(self.run_id, metrics=batch)
            self._last.update({metric.key: metric.step for metric in batch})

    def scores(
        self, evidence: Mapping[str, Any], step: int, milliseconds: int, values: Mapping[str, float]
    ) -> None:
        """Send the scores of a checkpoint to the run for this evidence."""
        self._run_for(evidence).metrics(step, milliseconds, values)

    def report(self, path: str, folder: str | None, evidence: Mapping[str, Any]) -> None:
        """Send a file to the run for this evidence."""
        self._run_for(evidence).artifact(path, folder)

    def _run_for(self, evidence: Mapping[str, Any]) -> MlflowRun:
        """Return this run for the first evidence that it gets, and a child run for any other.

        So no curve mixes two ways of sampling, and the params of a run belong to its scores.
        """
        key = evidence_key(evidence)
        if self._evidence is None:
            self.tags({EVIDENCE: key})
            self._evidence = key
        if key == self._evidence:
            return self
        if key not in self._children:
            query = f"tags.`{PARENT}` = '{self.run_id}' and tags.`{EVIDENCE}` = '{key}'"
            runs = self.client.search_runs([self._experiment], query)
            if not runs:
                tags = {PARENT: self.run_id, EVIDENCE: key}
                name = child_name(evidence)
                runs = [self.client.create_run(self._experiment, run_name=name, tags=tags)]
            self._children[key] = child = MlflowRun(self.client, str(runs[0].info.run_id))
            child.params(evidence)
            child.end("FINISHED")
        return self._children[key]

    def metrics(self, step: int, milliseconds: int, values: Mapping[str, float]) -> None:
        """Send values of one step, except those that the server already has for that step."""
        from mlflow.entities import Metric

        named = {metric_name("", key): float(value) for key, value in values.items()}
        new = [
            Metric(key, value, milliseconds, step)
            for key, value in named.items()
            if self._last.get(key, -1) < step or not self._has(key, step, value)
        ]
        for batch in _batches(new, METRIC_BATCH):
            self.client.log_batch(self.run_id, metrics=batch)
        for metric in new:
            self._last[metric.key] = max(step, self._last.get(metric.key, step))
            self._history.get(metric.key, []).append(metric)

    def _has(self, key: str, step: int, value: float) -> bool:
        if key not in self._history:
            self._history[key] = self.client.get_metric_history(self.run_id, key)
        return any(
            m.step == step and (m.value == value or (math.isnan(m.value) and math.isnan(value)))
            for m in self._history[key]
        )

    def params(self, params: Mapping[str, Any]) -> None:
        """Send params, flattened. MLflow keeps the first value; a different one becomes a tag."""
        from mlflow.entities import Param

        flat = {key: masked(value)[:PARAM_LENGTH] for key, value in flatten(params).items()}
        new = {key: value for key, value in flat.items() if key not in self._params}
        for batch in _batches(list(new.items()), PARAM_BATCH):
            self.client.log_batch(self.run_id, params=[Param(*item) for item in batch])
            self._params.update(batch)
        self.tags({f"changed.{k}": v for k, v in flat.items() if self._params[k] != v})

    def tags(self, tags: Mapping[str, Any]) -> None:
        """Send tags; a later value replaces an earlier one."""
        from mlflow.entities import RunTag

        items = [RunTag(key, masked(_text(value))[:TAG_LENGTH]) for key, value in tags.items()]
        for batch in _batches(items, PARAM_BATCH):
            self.client.log_batch(self.run_id, tags=batch)

    def dataset(self, name: str, fingerprint: str, source: Mapping[str, Any]) -> None:
        """Log the training data as an input of the run."""
        from mlflow.entities import Dataset, DatasetInput

        if fingerprint not in self._datasets:
            data = Dataset(
                _shorten(masked(name), DATASET_LENGTH),
                fingerprint,
                "ddpm",
                masked(json.dumps(source)),
            )
            self.client.log_inputs(self.run_id, [DatasetInput(data)])
            self._datasets.add(fingerprint)

    def artifact(self, path: str, folder: str | None) -> None:
        """Send a file, unless it is gone: newer work has then replaced it."""
        if Path(path).is_file():
            self.client.log_artifact(self.run_id, path, folder)

    def end(self, status: str) -> None:
        """End the run with the status FINISHED, FAILED or KILLED."""
        self.client.set_terminated(self.run_id, status)


def _origin() -> dict[str, str]:
    """Return the tags by which the UI shows who created a run, and from which commit."""
    tags = {"mlflow.source.name": "ddpm", "mlflow.source.type": "LOCAL"}
    with suppress(KeyError, OSError, ImportError):  # the user of a pod may have no name
        tags["mlflow.user"] = getpass.getuser()
    root = Path(ddpm_core.__file__).parents[1]
    if (root / ".git").exists():
        utilities = require("mlflow.utils.git_utils", "tracking")
        if commit := utilities.get_git_commit(str(root)):
            tags["mlflow.source.git.commit"] = commit
    return tags


def evidence_key(evidence: Mapping[str, Any]) -> str:
    """Return 16 hex digits that identify how scores were measured."""
    return hashlib.sha256(json.dumps(evidence, sort_keys=True).encode()).hexdigest()[:16]


def child_name(evidence: Mapping[str, Any]) -> str:
    """Return for example "ddim, 50 steps, 500 images, seed 1"."""
    sampler = evidence.get("sampler") or {}
    name = f"{sampler.get('sampler')}, {sampler.get('steps')} steps"
    return f"{name}, {evidence.get('count')} images, seed {evidence.get('seed')}"


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested params: {"train": {"ema": [0.99]}} becomes {"train.ema": "[0.99]"}."""
    flat: dict[str, str] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _text(value)
    return flat


def metric_name(section: str, key: str) -> str:
    """Return a valid metric name; the UI groups metrics by the part before the last slash."""
    name = re.sub(r"[^/\w.\- :]", "_", key)
    return f"{section}/{name}" if section else name


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shorten(name: str, length: int) -> str:
    """Cut a name at its start, because paths differ at their end."""
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
