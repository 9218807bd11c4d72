"""Reaching MLflow: a client that gives up soon, a store made whole, an experiment, whose errors.

Each call may raise whatever the network or the server raises.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddpm_core.errors import UserError, require
from ddpm_core.masking import masked

REQUEST_TIMEOUT = 10  # seconds; MLflow itself waits 120
REFUSALS = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "BAD_REQUEST")
# Whose exceptions are no word of MLflow's, nor of a library that it stands on.
OWN = ("builtins", "ddpm_core", "torch", "numpy", "pydantic")
UNREACHABLE = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
KIND = "mlflow.experimentKind"  # whether the UI speaks of training or of language models


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
