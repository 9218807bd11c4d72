"""The registered model on the MLflow server: find, create, tag and download versions."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast

from ddpm_core.config import Config
from ddpm_core.errors import Corrupt, Unavailable, UserError, require
from ddpm_core.registry.gate import FAULTS
from ddpm_core.registry.package import CHECKPOINT, SCORES
from ddpm_core.scores import Row
from ddpm_core.storage import fetch_whole, verify
from ddpm_core.storage.files import LARGEST_JSON, parse_model, read_bytes
from ddpm_core.storage.workspace import GRID
from ddpm_core.tracking.client import (
    CALL_TIMEOUT,
    connect,
    prepare_upload,
    sqlite_path,
    transfer_timeout,
    within,
)
from ddpm_core.tracking.errors import is_mlflow_error, is_rejection, reason

CHECK_TIMEOUT = 5.0  # seconds to find out whether MLflow still has a version
PROMOTED = "promoted"  # the tag of a version that became champion, or was about to
ROW_FIELDS = ("step", "score_name", "score", "evidence", *FAULTS)  # of a row, in a version's tag

Method = TypeVar("Method", bound=Callable[..., Any])


@contextmanager
def mlflow_errors(uri: str) -> Iterator[None]:
    """Turn errors of MLflow, or of the network on the way to it, into a UserError.

    It is Unavailable unless the server refused the request, as it does without a password, or a
    package is missing here.
    """
    try:
        yield
    except Exception as error:
        if not is_mlflow_error(error):
            raise
        status = getattr(error, "get_http_status_code", lambda: 500)()
        lasting = isinstance(error, ModuleNotFoundError) or (status < 500 and status != 429)
        kind = UserError if lasting else Unavailable
        raise kind(f"MLflow at {uri} is unavailable: {reason(error)}") from error


def calls_mlflow(method: Method) -> Method:
    """Decorate a method of Registry, so that it raises UserError if MLflow is unavailable."""

    @functools.wraps(method)
    def wrapper(registry: Registry, *arguments: Any) -> Any:
        with mlflow_errors(registry.uri):
            return method(registry, *arguments)

    return cast(Method, wrapper)


class Registry:
    """The registered model `register.name` of a config."""

    def __init__(self, config: Config) -> None:
        """Connect to the server. Raises UserError if it is unavailable."""
        self.uri, self.name = config.tracking.uri, config.registration.name
        self.alias = config.registration.alias
        if not self.uri:
            raise UserError("tracking.uri is empty, but registered models are stored in MLflow.")
        with mlflow_errors(self.uri):
            self.client = connect(self.uri)
            self.client.search_registered_models(max_results=1)
        prepare_upload(self.uri)

    @calls_mlflow
    def champion(self) -> Any | None:
        """Return the version that has the alias, or None."""
        return get_or_none(self.client.get_model_version_by_alias, self.name, self.alias)

    @calls_mlflow
    def version(self, origin: str) -> Any:
        """Return the version models:/NAME/VERSION or models:/NAME@ALIAS, of any NAME.

        Raises UserError.
        """
        name, at, alias = origin.removeprefix("models:/").partition("@")
        if at:
            return self.client.get_model_version_by_alias(name, alias)
        name, slash, version = name.rpartition("/")
        if not (origin.startswith("models:/") and slash and version.isdecimal()):
            raise UserError(
                f"--model: got {origin!r}; must be models:/NAME/VERSION or models:/NAME@ALIAS."
            )
        return self.client.get_model_version(name, version)

    @calls_mlflow
    def versions(self) -> list[Any]:
        """Return all versions, the newest first."""
        versions = self.client.search_model_versions(f"name = '{self.name}'")
        return sorted(versions, key=lambda version: -int(version.version))

    @calls_mlflow
    def find(self, tags: dict[str, str]) -> Any | None:
        """Return the oldest version that has these tags and its files, or None.

        The oldest, so that concurrent callers agree.
        """
        for version in reversed(self.versions()):
            matches = all(version.tags.get(key) == value for key, value in tags.items())
            if matches and has_files(self.client, version):
                return version
        return None

    @calls_mlflow
    def has_files(self, version: Any) -> bool:
        """Return whether the server still has the checkpoint of a version."""
        return has_files(self.client, version)

    @calls_mlflow
    def uploaded(self, run_id: str, name: str, params: dict[str, str]) -> str | None:
        """Return the models:/ URI of a run's model with these params, or None.

        It is there if an earlier attempt died between the upload and the creation of the version.
        Removes what failed uploads have left.
        """
        experiment = self.client.get_run(run_id).info.experiment_id
        conditions = {"source_run_id": run_id, "name": name}
        conditions |= {f"params.{key}": value for key, value in params.items()}
        query = " AND ".join(f"{key} = '{value}'" for key, value in conditions.items())
        uri = None
        for model in self.client.search_logged_models([experiment], query):
            if str(model.status) == "FAILED":
                self.client.delete_logged_model(model.model_id)
            elif str(model.status) == "READY" and has_checkpoint(
                self.client, model.artifact_location
            ):
                uri = str(model.model_uri)
        return uri

    @calls_mlflow
    def remove(self, version: Any) -> None:
        """Delete a version."""
        self.client.delete_model_version(self.name, version.version)

    @calls_mlflow
    def discard(self, model_uri: str) -> None:
        """Delete an uploaded model that belongs to no version."""
        self.client.delete_logged_model(model_uri.removeprefix("models:/"))

    @calls_mlflow
    def create(self, model_uri: str, run_id: str, description: str, tags: dict[str, str]) -> Any:
        """Create a version of an uploaded model, and the registered model if it is missing."""
        if not self._exists():
            self._create_model()
        return self.client.create_model_version(
            self.name,
            model_uri,
            run_id,
            tags=tags,
            description=description,
            model_id=model_uri.removeprefix("models:/"),
        )

    @calls_mlflow
    def tag(self, version: Any, key: str, value: str) -> None:
        """Set a tag of a version."""
        self.client.set_model_version_tag(self.name, version.version, key, value)

    @calls_mlflow
    def promote(self, version: Any) -> None:
        """Move the alias to a version. MLflow cannot make this depend on where the alias is."""
        self.client.set_registered_model_alias(self.name, self.alias, version.version)

    def announce(self, version: Any) -> None:
        """Announce to concurrent processes that a version is about to be promoted."""
        self.tag(version, PROMOTED, datetime.now(UTC).isoformat())

    def announcements(self) -> dict[str, str]:
        """Return when each version was last announced, by the clock of the announcer."""
        tags = {number(version): version.tags.get(PROMOTED) for version in self.versions()}
        return {key: when for key, when in tags.items() if when}

    @calls_mlflow
    def checkpoint(self, version: Any) -> Path:
        """Download the checkpoint folder of a version."""
        return fetch(f"models:/{version.name}/{version.version}")

    @calls_mlflow
    def evidence(self, version: Any) -> tuple[Row | None, bytes | None]:
        """Return the scores of a version and the PNG of its images; None for what is missing.

        Versions of earlier releases have neither as a file, and the main score in a tag.
        """
        artifacts = require("mlflow.artifacts", "tracking")
        uri = f"models:/{version.name}/{version.version}/artifacts"
        listed = within(CALL_TIMEOUT, artifacts.list_artifacts, uri)
        there = {PurePosixPath(file.path).name for file in listed}
        found: dict[str, bytes] = {}
        with tempfile.TemporaryDirectory(prefix="ddpm-model-") as target:
            for name in there & {SCORES, GRID}:
                get = artifacts.download_artifacts
                path = within(transfer_timeout(0), get, f"{uri}/{name}", dst_path=target)
                found[name] = read_bytes(Path(path), name, LARGEST_JSON)
        tagged = row_of(version, "row")
        row = parse_model(found[SCORES], Row, SCORES) if SCORES in found else tagged
        return row, found.get(GRID)

    def _exists(self) -> bool:
        return get_or_none(self.client.get_registered_model, self.name) is not None

    def _create_model(self) -> None:
        description = "Denoising diffusion models, by `ddpm register`."
        try:
            self.client.create_registered_model(self.name, description=description)
        except Exception:
            if not self._exists():  # otherwise another process has just created it
                raise


def number(version: Any | None) -> str:
    """Return the number of a version as text; "" for None."""
    return "" if version is None else str(version.version)


def compact_json(row: Row) -> str:
    """Return the fields of a row that the gate needs, as the JSON of a tag."""
    plain = row.plain()
    return json.dumps({key: plain[key] for key in ROW_FIELDS if key in plain})


def row_of(version: Any, key: str) -> Row | None:
    """Return the row in a tag of a version; None if it is missing or invalid."""
    try:
        tag = str(version.tags.get(key, "")).encode(errors="replace")
        return parse_model(tag, Row, f"tag {key}")
    except Corrupt:
        return None


def rows_of(version: Any) -> list[Row]:
    """Return the measurements of a version, the newest first."""
    return [row for key in ("rescored", "row") if (row := row_of(version, key))]


def missing(uri: str, name: str, version: str, weights: str, alias: str | None) -> str | None:
    """Return what MLflow no longer has of a registered version, or None if everything is there.

    Also None if MLflow is unavailable, or takes more than CHECK_TIMEOUT seconds.

    Args:
        uri: The tracking URI.
        name: The registered model.
        version: The number of the version.
        weights: The fingerprint of its weights.
        alias: The alias that some version must have, or None.
    """
    store = sqlite_path(uri)
    if store is not None and not store.exists():  # connecting would create it
        return f"{store} is gone"
    with suppress(Exception):
        require("mlflow", "tracking")  # imported here, because that may take more than the timeout
        return within(CHECK_TIMEOUT, lambda: _missing(connect(uri), name, version, weights, alias))
    return None


def _missing(client: Any, name: str, number: str, weights: str, alias: str | None) -> str | None:
    version = get_or_none(client.get_model_version, name, number)
    if version is None or version.tags.get("weights") != weights:
        return f"MLflow no longer has version {number} of {name}"
    if not has_files(client, version):
        return f"the files of version {number} of {name} are gone"
    if alias and get_or_none(client.get_model_version_by_alias, name, alias) is None:
        return f"no version of {name} has the alias {alias} any more"
    return None


def has_files(client: Any, version: Any) -> bool:
    """Return whether the checkpoint of a version exists. Raises if the storage is unavailable."""
    folder = client.get_model_version_download_uri(version.name, version.version)
    return has_checkpoint(client, folder)


def has_checkpoint(client: Any, folder: str) -> bool:
    """Return whether the artifacts folder of a model contains a checkpoint."""
    artifacts = require("mlflow.artifacts", "tracking")
    uri = f"{folder.rstrip('/')}/artifacts/{CHECKPOINT}"
    files = within(CALL_TIMEOUT, artifacts.list_artifacts, uri, tracking_uri=client.tracking_uri)
    return bool(files)


def get_or_none(call: Callable[..., Any], *arguments: str) -> Any | None:
    """Return the result of a client's call, or None if MLflow has no such object."""
    try:
        return call(*arguments)
    except Exception as error:
        if is_rejection(error):
            return None
        raise


def download(config: Config, origin: str) -> Path:
    """Download the checkpoint folder of models:/NAME/VERSION or models:/NAME@ALIAS.

    Raises:
        UserError: MLflow is unavailable, or has no such version.
    """
    name, at, alias = origin.removeprefix("models:/").partition("@")
    registry = Registry(config)
    with mlflow_errors(registry.uri):
        if at:
            version = registry.client.get_model_version_by_alias(name, alias).version
            origin = f"models:/{name}/{version}"
        return fetch(origin)


def fetch(origin: str) -> Path:
    """Download the checkpoint folder of a version; it is deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="ddpm-model-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return fetch_to(origin, folder)


def fetch_to(origin: str, target: str) -> Path:
    """Download the checkpoint folder of a version into the folder `target`. Raises Corrupt."""
    artifacts = require("mlflow.artifacts", "tracking")
    uri = f"{origin}/artifacts/{CHECKPOINT}"
    files = within(CALL_TIMEOUT, artifacts.list_artifacts, uri)
    timeout = transfer_timeout(sum(file.file_size or 0 for file in files))

    def fetch() -> Path:
        folder = Path(within(timeout, artifacts.download_artifacts, uri, dst_path=target))
        verify(folder)
        return folder

    return fetch_whole(fetch)
