"""One run on an MLflow server: found again or made, and told everything once.

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
from pathlib import Path
from typing import Any, TypeVar

import ddpm_core
from ddpm_core.errors import require
from ddpm_core.text import masked
from ddpm_core.tracking.client import connect, find_experiment, is_active
from ddpm_core.tracking.logtail import Row

PARAM_LENGTH, TAG_LENGTH = 6000, 8000  # what a server takes
DATASET_LENGTH, RUN_LENGTH = 500, 250
METRIC_BATCH, PARAM_BATCH = 1000, 100


T = TypeVar("T")


TOKEN = "ddpm.token"  # the tag of a run by which whoever made it finds it again
EVIDENCE = "ddpm.evidence"  # the tag of a run that says which scores are in it
PARENT = "mlflow.parentRunId"  # by which the UI shows a run below another


class MlflowRun:
    """A run that is open on a server. Rows and metrics that the server has are not sent again."""

    def __init__(self, client: Any, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        run = client.get_run(run_id)
        self._params: dict[str, str] = dict(run.data.params)
        self._last = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self._history: dict[str, list[Any]] = {}
        self._datasets = {given.dataset.digest for given in run.inputs.dataset_inputs}
        self._experiment = run.info.experiment_id
        self._evidence = run.data.tags.get(EVIDENCE)
        self._measured: dict[str, MlflowRun] = {}

    @classmethod
    def open(cls, uri: str, experiment: str, name: str, known: str | None, token: str) -> MlflowRun:
        """The known run if this server has it, else the one made with this token, or a new one.

        A server that went away in the middle may have made the run and not have said so.
        """
        client = connect(uri)
        if known and is_active(client, known):
            client.update_run(known, status="RUNNING")
            return cls(client, known)
        place = find_experiment(client, uri, experiment)
        made = client.search_runs([place], f"tags.`{TOKEN}` = '{token}'", max_results=1)
        tags = {TOKEN: token, **_origin()}
        run = (
            made[0]
            if made
            else client.create_run(place, run_name=_ending(name, RUN_LENGTH), tags=tags)
        )
        return cls(client, str(run.info.run_id))

    def experiment(self) -> str:
        """The name of the experiment that it is in."""
        return str(self.client.get_experiment(self._experiment).name)

    @property
    def is_bare(self) -> bool:
        """Whether it has no params: nobody who trains, or knows of the training, has told it."""
        return not self._params

    def rows(self, rows: Sequence[Row]) -> None:
        """Send what the server lacks of rows with ascending steps, as metrics `train/NAME`."""
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
        """Send what was measured of a checkpoint, into the run that has scores of this evidence."""
        self._measured_by(evidence).metrics(step, milliseconds, values)

    def report(self, path: str, folder: str | None, evidence: Mapping[str, Any]) -> None:
        """Send a file about scores of this evidence."""
        self._measured_by(evidence).artifact(path, folder)

    def _measured_by(self, evidence: Mapping[str, Any]) -> MlflowRun:
        """This run for the first evidence that it is told of, and one below it for any other.

        So no curve mixes two ways of sampling, and each run's params are those of its scores.
        """
        key = hashlib.sha256(json.dumps(evidence, sort_keys=True).encode()).hexdigest()[:16]
        if self._evidence is None:
            self.tags({EVIDENCE: key})
            self._evidence = key
        if key == self._evidence:
            return self
        if key not in self._measured:
            place, mine = [self._experiment], f"tags.`{PARENT}` = '{self.run_id}'"
            found = self.client.search_runs(place, f"{mine} and tags.`{EVIDENCE}` = '{key}'")
            if not found:
                tags = {PARENT: self.run_id, EVIDENCE: key}
                name = _measurement(evidence)
                found = [self.client.create_run(self._experiment, run_name=name, tags=tags)]
            self._measured[key] = run = MlflowRun(self.client, str(found[0].info.run_id))
            run.params(evidence)
            run.end("FINISHED")
        return self._measured[key]

    def metrics(self, step: int, milliseconds: int, values: Mapping[str, float]) -> None:
        """Send values of one step, but none that the server has for that step already."""
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
        """Send params, flattened. A server keeps the first value; a later one becomes a tag."""
        from mlflow.entities import Param

        flat = {key: masked(value)[:PARAM_LENGTH] for key, value in flatten(params).items()}
        new = {key: value for key, value in flat.items() if key not in self._params}
        for batch in _batches(list(new.items()), PARAM_BATCH):
            self.client.log_batch(self.run_id, params=[Param(*item) for item in batch])
            self._params.update(batch)
        self.tags({f"changed.{k}": v for k, v in flat.items() if self._params[k] != v})

    def tags(self, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        items = [RunTag(key, masked(_text(value))[:TAG_LENGTH]) for key, value in tags.items()]
        for batch in _batches(items, PARAM_BATCH):
            self.client.log_batch(self.run_id, tags=batch)

    def dataset(self, name: str, fingerprint: str, source: Mapping[str, Any]) -> None:
        """Name the data that the run learns from."""
        from mlflow.entities import Dataset, DatasetInput

        if fingerprint not in self._datasets:
            data = Dataset(
                _ending(masked(name), DATASET_LENGTH),
                fingerprint,
                "ddpm",
                masked(json.dumps(source)),
            )
            self.client.log_inputs(self.run_id, [DatasetInput(data)])
            self._datasets.add(fingerprint)

    def artifact(self, path: str, folder: str | None) -> None:
        """Send a file; one that is no longer there has been replaced by newer work."""
        if Path(path).is_file():
            self.client.log_artifact(self.run_id, path, folder)

    def end(self, status: str) -> None:
        """FINISHED, FAILED or KILLED."""
        self.client.set_terminated(self.run_id, status)


def _origin() -> dict[str, str]:
    """Who made a run and by which code, where the UI looks for them."""
    tags = {"mlflow.source.name": "ddpm", "mlflow.source.type": "LOCAL"}
    with suppress(KeyError, OSError, ImportError):  # a pod's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    place = Path(ddpm_core.__file__).parents[1]
    if (place / ".git").exists():
        utilities = require("mlflow.utils.git_utils", "tracking")
        if commit := utilities.get_git_commit(str(place)):
            tags["mlflow.source.git.commit"] = commit
    return tags


def _measurement(evidence: Mapping[str, Any]) -> str:
    """A run's name: "ddim, 50 steps, 500 images, seed 1"."""
    sampler = evidence.get("sampler") or {}
    said = f"{sampler.get('sampler')}, {sampler.get('steps')} steps"
    return f"{said}, {evidence.get('count')} images, seed {evidence.get('seed')}"


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"train": {"ema": [0.99]}} to {"train.ema": "[0.99]"}."""
    flat: dict[str, str] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _text(value)
    return flat


def metric_name(section: str, key: str) -> str:
    """A name that servers take; the UI shows what stands before the last / as a section."""
    name = re.sub(r"[^/\w.\- :]", "_", key)
    return f"{section}/{name}" if section else name


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _ending(name: str, most: int) -> str:
    """A name of `most` characters at most: of a long one the end, which tells paths apart."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
