"""Connect to MLflow: time limits, the retry policy, SQLite stores and experiments.

Any call may raise whatever the network or the server raises; errors.py classifies these errors.
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
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ddpm_core.errors import UserError, require
from ddpm_core.storage import retry
from ddpm_core.storage.staging import remove, staged_folder, sweep_beside
from ddpm_core.text import masked
from ddpm_core.tracking.errors import is_rejection, is_transient

if TYPE_CHECKING:
    from tenacity import Retrying

REQUEST_TIMEOUT = 10  # seconds without a byte; MLflow's own default is 120
CALL_TIMEOUT = 30.0  # seconds for a whole call, however steadily its bytes arrive
TRANSFER_TIMEOUT = 120.0  # seconds for a file; a large one also gets its size / MIN_SPEED
MIN_SPEED = 100_000  # bytes per second
UPLOAD_TIMEOUT = 120  # seconds without a byte while MLflow uploads a model
UPLOAD_RETRIES = 3  # per request of such an upload, made by MLflow itself
ATTEMPTS = 2  # of everything else, see `retrying`
PAUSE = 1.0  # seconds before the second attempt

NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
KIND = "mlflow.experimentKind"  # selects the UI's views for training, not those for agents

T = TypeVar("T")


def within(seconds: float, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return the result of a call, or raise TimeoutError after `seconds`.

    The timeouts of requests and of database drivers start again with each byte, so they do not
    bound a call. A call that timed out keeps its daemon thread, which ends with the process.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call(*arguments, **named))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="mlflow-call", daemon=True).start()
    return future.result(seconds)


def transfer_timeout(size: int) -> float:
    """Return how many seconds a transfer of `size` bytes may take."""
    return TRANSFER_TIMEOUT + size / MIN_SPEED


def retrying() -> Retrying:
    """Return the retry policy for a group of MLflow calls: `retrying()(function)`.

    A timeout is not retried, since it has already taken CALL_TIMEOUT. Neither is a UserError, which
    asks for a change by the user. The tracker has its own loop, see Tracker._work.
    """

    def can_help(error: BaseException) -> bool:
        return is_transient(error) and not isinstance(error, TimeoutError | UserError)

    return retry.retrying(can_help, ATTEMPTS, PAUSE)


class BoundedClient:
    """An MlflowClient of a server. Each call returns or raises within a time limit."""

    def __init__(self, client: Any, timeout: float) -> None:
        self._client = client
        self.timeout = timeout

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        return partial(within, self.timeout, value) if callable(value) else value

    def log_artifact(self, run_id: str, path: str, folder: str | None = None) -> None:
        timeout = transfer_timeout(Path(path).stat().st_size)
        within(timeout, self._client.log_artifact, run_id, path, folder)

    def download_artifacts(self, run_id: str, path: str, target: str) -> str:
        size = sum(file.file_size or 0 for file in self.list_artifacts(run_id, path))
        call = self._client.download_artifacts
        return str(within(transfer_timeout(size), call, run_id, path, target))


def connect(uri: str) -> Any:
    """Return an MlflowClient whose calls end soon, even if a server hangs or trickles.

    Timeouts set by MLflow's environment variables take precedence. The import of MLflow takes
    seconds, and so does the creation of a SQLite store.

    Raises:
        UserError: the URI is invalid, or MLflow is not installed.
    """
    try:
        urlsplit(uri)
    except ValueError as error:
        raise UserError(
            f"tracking.uri: got {masked(uri)!r}, which is not a valid URI: {error}."
        ) from error
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = require("mlflow", "tracking")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # This logger prints a traceback for each error that the store raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    environment = require("mlflow.environment_variables", "tracking")
    environment.MLFLOW_HTTP_REQUEST_TIMEOUT.default = REQUEST_TIMEOUT
    environment.MLFLOW_HTTP_REQUEST_MAX_RETRIES.default = 0
    environment.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.default = True
    environment.MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR.default = False
    path = sqlite_path(uri)
    if path is None:
        setting = environment.MLFLOW_HTTP_REQUEST_TIMEOUT
        timeout = max(CALL_TIMEOUT, 3.0 * setting.get()) if setting.is_set() else CALL_TIMEOUT
        return BoundedClient(within(timeout, mlflow.MlflowClient, uri, registry_uri=uri), timeout)
    sweep_beside(path)
    if not path.exists():
        _create_store(mlflow, path)
    return mlflow.MlflowClient(uri, registry_uri=uri)


def prepare_upload(uri: str) -> None:
    """Set MLflow's globals for the upload of models: the server, longer timeouts, and retries."""
    environment = require("mlflow.environment_variables", "tracking")
    environment.MLFLOW_HTTP_REQUEST_TIMEOUT.default = UPLOAD_TIMEOUT
    environment.MLFLOW_HTTP_REQUEST_MAX_RETRIES.default = UPLOAD_RETRIES
    mlflow = require("mlflow", "tracking")
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)


def sqlite_path(uri: str) -> Path | None:
    """Return the file of a sqlite:/// URI, or None for another URI."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)) if uri.startswith(prefix) else None


def find_experiment(client: Any, uri: str, name: str) -> str:
    """Return the id of an experiment; create the experiment if it is missing.

    A SQLite store gets its artifacts folder beside its file; MLflow's default would be the current
    directory of whichever command ran first.

    Raises:
        UserError: the experiment is deleted.
    """
    if experiment := client.get_experiment_by_name(name):
        return _active_id(experiment, uri)
    path = sqlite_path(uri)
    artifacts = (path.parent.absolute() / "mlartifacts").as_uri() if path else None
    try:
        return str(client.create_experiment(name, artifacts, {KIND: "custom_model_development"}))
    except Exception:
        # Another process may have created it between the two calls.
        if experiment := client.get_experiment_by_name(name):
            return _active_id(experiment, uri)
        raise


def _active_id(experiment: Any, uri: str) -> str:
    if experiment.lifecycle_stage != "active":
        restore = f"mlflow experiments restore -x {experiment.experiment_id}"
        raise UserError(
            f"The experiment {experiment.name!r} is deleted. Restore it with "
            f"`MLFLOW_TRACKING_URI={shlex.quote(masked(uri))} {restore}`, or set "
            "tracking.experiment to another name."
        )
    return str(experiment.experiment_id)


def is_active(client: Any, run_id: str) -> bool:
    """Return whether a server has the run and the run is not deleted."""
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except Exception as error:
        if is_rejection(error):
            return False
        raise


def _create_store(mlflow: Any, path: Path) -> None:
    """Create a SQLite store in full or not at all.

    Creating its tables takes seconds, and MLflow can never open a store that has only some.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged_folder(path) as folder:
        staging = folder / path.name
        mlflow.MlflowClient(f"sqlite:///{staging}").search_experiments(max_results=1)
        try:
            # Unlike a rename, a link never replaces a store that another process has created.
            path.hardlink_to(staging)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            _rename_unless_exists(staging, path)
        remove(folder)


def _rename_unless_exists(staging: Path, path: Path) -> None:
    """Rename a file, but keep an existing target; a lock excludes other processes meanwhile."""
    # Imported here: only a store that is created needs it, and every `ddpm wait` loads this module.
    from filelock import FileLock

    lock = path.with_name(f".{path.name}.lock")
    with FileLock(lock, fallback_to_soft=False):
        if not path.exists():
            staging.rename(path)
        lock.unlink(missing_ok=True)
