"""One run on an MLflow server: found again or made, and told everything once.

Each call may raise whatever the network or the server raises; ddpm_core.tracking lives with that.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ddpm_core.errors import UserError, require
from ddpm_core.logtail import Row
from ddpm_core.masking import masked

REQUEST_TIMEOUT = 10  # seconds; MLflow itself waits 120
PARAM_LENGTH, TAG_LENGTH = 6000, 8000  # what a server takes
REFUSALS = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "BAD_REQUEST")
METRIC_BATCH, PARAM_BATCH = 1000, 100

# Whose exceptions are no word of MLflow's, nor of a library that it stands on.
OWN = ("builtins", "ddpm_core", "torch", "numpy", "pydantic")
UNREACHABLE = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

KIND = "mlflow.experimentKind"  # whether the UI speaks of training or of language models

T = TypeVar("T")


def connect(uri: str) -> Any:
    """An MlflowClient that is quiet and gives up soon; what the environment asks for still holds.

    The import takes seconds, and a new SQLite store as long again.
    """
    try:
        urlsplit(uri)
    except ValueError as error:
        raise UserError(f"tracking.uri: {masked(uri)!r} given, which is none: {error}.") from error
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = require("mlflow", "tracking")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    environment = require("mlflow.environment_variables", "tracking")
    environment.MLFLOW_HTTP_REQUEST_TIMEOUT.default = REQUEST_TIMEOUT
    environment.MLFLOW_HTTP_REQUEST_MAX_RETRIES.default = 0
    environment.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.default = True
    environment.MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR.default = False
    path = sqlite_path(uri)
    if path is not None and not path.exists():
        _create_store(mlflow, path)
    return mlflow.MlflowClient(uri, registry_uri=uri)


def sqlite_path(uri: str) -> Path | None:
    """The file of a sqlite:/// URI."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)) if uri.startswith(prefix) else None


def find_experiment(client: Any, uri: str, name: str) -> str:
    """The id of an experiment, made where there is none.

    The artifacts of a SQLite store lie beside it, not in whatever directory a command runs in.
    """
    if experiment := client.get_experiment_by_name(name):
        return _id(experiment)
    path = sqlite_path(uri)
    beside = (path.parent.absolute() / "mlartifacts").as_uri() if path else None
    try:
        return str(client.create_experiment(name, beside, {KIND: "custom_model_development"}))
    except Exception:
        if experiment := client.get_experiment_by_name(name):  # made by another at this moment
            return _id(experiment)
        raise


def _id(experiment: Any) -> str:
    if experiment.lifecycle_stage != "active":
        raise UserError(
            f"The experiment {experiment.name!r} is deleted there: bring it back by `mlflow "
            f"experiments restore -x {experiment.experiment_id}`, or set tracking.experiment to "
            "another name."
        )
    return str(experiment.experiment_id)


TOKEN = "ddpm.token"  # the tag of a run by which whoever made it finds it again


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
        run = made[0] if made else client.create_run(place, run_name=name, tags={TOKEN: token})
        return cls(client, str(run.info.run_id))

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
            data = Dataset(masked(name), fingerprint, "ddpm", masked(json.dumps(source)))
            self.client.log_inputs(self.run_id, [DatasetInput(data)])
            self._datasets.add(fingerprint)

    def artifact(self, path: str, folder: str | None) -> None:
        """Send a file; one that is no longer there has been replaced by newer work."""
        if Path(path).is_file():
            self.client.log_artifact(self.run_id, path, folder)

    def end(self, status: str) -> None:
        """FINISHED, FAILED or KILLED."""
        self.client.set_terminated(self.run_id, status)


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


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def is_active(client: Any, run_id: str) -> bool:
    """Whether a server has the run, and not in its bin."""
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except Exception as error:
        if is_refusal(error):
            return False
        raise


def is_refusal(error: Exception) -> bool:
    """Whether a server that is there will not have what it was given."""
    return getattr(error, "error_code", "") in REFUSALS


def is_mlflows(error: Exception) -> bool:
    """Whether MLflow says so, or the way to it.

    Else it is a mistake of this program, or a trouble of this machine such as a full disk.
    """
    if type(error).__module__.partition(".")[0] not in OWN:
        return True
    away = (ConnectionError, TimeoutError, ModuleNotFoundError)  # the last of a database's driver
    return isinstance(error, away) or getattr(error, "errno", None) in UNREACHABLE


def _create_store(mlflow: Any, path: Path) -> None:
    """Make a SQLite store whole or not at all.

    Its tables take seconds to make, and one whose making was killed can never be opened again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        mlflow.MlflowClient(f"sqlite:///{staging}").search_experiments(max_results=1)
        # A link, unlike a renaming, never replaces the store that another process has made.
        path.hardlink_to(staging)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        _rename_new(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def _rename_new(staging: Path, path: Path) -> None:
    """Rename to a name that is free, on a file system without links: one process at a time."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            staging.rename(path)
        Path(lock.name).unlink(missing_ok=True)
