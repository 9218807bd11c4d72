"""Reaching MLflow: a client that gives up soon, a store made whole, an experiment.

Each call may raise whatever the network or the server raises.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from filelock import FileLock

from ddpm_core.errors import UserError, require
from ddpm_core.storage.staging import remove, staged_folder, sweep_beside
from ddpm_core.text import masked
from ddpm_core.tracking.errors import is_refusal

REQUEST_TIMEOUT = 10  # seconds without a byte; MLflow itself waits 120
CALL_LIMIT = 30.0  # seconds for a whole call, however steadily its bytes arrive
TRANSFER_LIMIT = 120.0  # seconds for a file, and more for a large one:
SLOWEST = 100_000  # bytes per second below which a transfer is given up
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
KIND = "mlflow.experimentKind"  # whether the UI speaks of training or of language models

T = TypeVar("T")


def within(seconds: float, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return what a call returns, or raise TimeoutError after `seconds`.

    The timeouts of requests and database drivers start again with each byte. A call that is given
    up keeps its thread, which does not outlive the process.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call(*arguments, **named))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="mlflow-call", daemon=True).start()
    return future.result(seconds)


def transfer_limit(size: int) -> float:
    """Return the seconds that a transfer of `size` bytes may take."""
    return TRANSFER_LIMIT + size / SLOWEST


class BoundedClient:
    """An MlflowClient of a server, each of whose calls returns or raises within a time limit."""

    def __init__(self, client: Any, limit: float) -> None:
        self._client = client
        self._limit = limit

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        return partial(within, self._limit, value) if callable(value) else value

    def log_artifact(self, run_id: str, path: str, folder: str | None = None) -> None:
        limit = transfer_limit(Path(path).stat().st_size)
        within(limit, self._client.log_artifact, run_id, path, folder)

    def download_artifacts(self, run_id: str, path: str, place: str) -> str:
        size = sum(file.file_size or 0 for file in self.list_artifacts(run_id, path))
        call = self._client.download_artifacts
        return str(within(transfer_limit(size), call, run_id, path, place))


def connect(uri: str) -> Any:
    """Return a quiet MlflowClient whose calls end soon, also if a server hangs or trickles.

    Timeouts that the environment sets still hold. The import takes seconds, and creating a SQLite
    store takes seconds more.
    """
    try:
        urlsplit(uri)
    except ValueError as error:
        raise UserError(f"tracking.uri: {masked(uri)!r} given, which is none: {error}.") from error
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = require("mlflow", "tracking")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It logs the traceback of each error that it raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    environment = require("mlflow.environment_variables", "tracking")
    environment.MLFLOW_HTTP_REQUEST_TIMEOUT.default = REQUEST_TIMEOUT
    environment.MLFLOW_HTTP_REQUEST_MAX_RETRIES.default = 0
    environment.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.default = True
    environment.MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR.default = False
    path = sqlite_path(uri)
    if path is None:
        asked = environment.MLFLOW_HTTP_REQUEST_TIMEOUT
        limit = max(CALL_LIMIT, 3.0 * asked.get()) if asked.is_set() else CALL_LIMIT
        return BoundedClient(within(limit, mlflow.MlflowClient, uri, registry_uri=uri), limit)
    sweep_beside(path)
    if not path.exists():
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
        return _id(experiment, uri)
    path = sqlite_path(uri)
    beside = (path.parent.absolute() / "mlartifacts").as_uri() if path else None
    try:
        return str(client.create_experiment(name, beside, {KIND: "custom_model_development"}))
    except Exception:
        if experiment := client.get_experiment_by_name(name):  # made by another at this moment
            return _id(experiment, uri)
        raise


def _id(experiment: Any, uri: str) -> str:
    if experiment.lifecycle_stage != "active":
        restore = f"mlflow experiments restore -x {experiment.experiment_id}"
        raise UserError(
            f"The experiment {experiment.name!r} is deleted. Restore it with "
            f"`MLFLOW_TRACKING_URI={shlex.quote(masked(uri))} {restore}`, or set "
            "tracking.experiment to another name."
        )
    return str(experiment.experiment_id)


def is_active(client: Any, run_id: str) -> bool:
    """Whether a server has the run, and not in its bin."""
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except Exception as error:
        if is_refusal(error):
            return False
        raise


def _create_store(mlflow: Any, path: Path) -> None:
    """Create a SQLite store in full or not at all.

    Creating its tables takes seconds, and a store with some of them can never be opened again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged_folder(path) as folder:
        staging = folder / path.name
        mlflow.MlflowClient(f"sqlite:///{staging}").search_experiments(max_results=1)
        try:
            # A link, unlike a rename, never replaces the store that another process has created.
            path.hardlink_to(staging)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            _rename_new(staging, path)
        remove(folder)


def _rename_new(staging: Path, path: Path) -> None:
    """Rename to a name that is free, on a file system without links: one process at a time."""
    lock = path.with_name(f".{path.name}.lock")
    with FileLock(lock, fallback_to_soft=False):
        if not path.exists():
            staging.rename(path)
        lock.unlink(missing_ok=True)
