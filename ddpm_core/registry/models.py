"""Registered models on the server: versions found, made, tagged and downloaded."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

from ddpm_core.config import Config
from ddpm_core.errors import Corrupt, UserError, require
from ddpm_core.registry.package import CHECKPOINT
from ddpm_core.scores import Row
from ddpm_core.storage import fetch_whole, verify
from ddpm_core.storage.files import parse_object, validated
from ddpm_core.tracking.client import CALL_LIMIT, connect, sqlite_path, transfer_limit, within
from ddpm_core.tracking.errors import is_mlflows, is_refusal, reason

UPLOAD_TIMEOUT = 120  # seconds without an answer, for files of hundreds of MB
RETRIES = 3
PATIENCE = 5.0  # seconds in which MLflow is to say whether it still has a version
PROMOTED = "promoted"  # the tag of a version that became champion, or was about to

Method = TypeVar("Method", bound=Callable[..., Any])


@contextmanager
def asking(uri: str) -> Iterator[None]:
    """What MLflow raises, or the way to it, as a sentence for the user."""
    try:
        yield
    except Exception as error:
        if not is_mlflows(error):
            raise
        raise UserError(f"MLflow at {uri} cannot be used: {reason(error)}") from error


def asks(method: Method) -> Method:
    """A method of a Registry that asks MLflow, and raises UserError where that can't be used."""

    @functools.wraps(method)
    def told(registry: Registry, *arguments: Any) -> Any:
        with asking(registry.uri):
            return method(registry, *arguments)

    return cast(Method, told)


class Registry:
    """The registered model `register.name` of a config."""

    def __init__(self, config: Config) -> None:
        self.uri, self.name = config.tracking.uri, config.registration.name
        self.alias = config.registration.alias
        if not self.uri:
            raise UserError("tracking.uri is empty; registered models are kept in MLflow.")
        with asking(self.uri):
            self.client = connect(self.uri)
            self.client.search_registered_models(max_results=1)
        environment = require("mlflow.environment_variables", "tracking")
        environment.MLFLOW_HTTP_REQUEST_TIMEOUT.default = UPLOAD_TIMEOUT
        environment.MLFLOW_HTTP_REQUEST_MAX_RETRIES.default = RETRIES
        mlflow = require("mlflow", "tracking")
        mlflow.set_tracking_uri(self.uri)
        mlflow.set_registry_uri(self.uri)

    @asks
    def champion(self) -> Any | None:
        """The version that has the alias."""
        return found(self.client.get_model_version_by_alias, self.name, self.alias)

    @asks
    def versions(self) -> list[Any]:
        """All versions, the newest first."""
        every = self.client.search_model_versions(f"name = '{self.name}'")
        return sorted(every, key=lambda version: -int(version.version))

    @asks
    def find(self, tags: dict[str, str]) -> Any | None:
        """The oldest version that has these tags, and its files: all who ask agree on it."""
        for version in reversed(self.versions()):
            alike = all(version.tags.get(key) == value for key, value in tags.items())
            if alike and has_files(self.client, version):
                return version
        return None

    @asks
    def has_files(self, version: Any) -> bool:
        return has_files(self.client, version)

    @asks
    def uploaded(self, run_id: str, name: str, params: dict[str, str]) -> str | None:
        """The models:/ URI of a run's model with these params, such as one whose version could
        not be made. What is left of uploads that failed is removed."""
        place = self.client.get_run(run_id).info.experiment_id
        asked = {"source_run_id": run_id, "name": name}
        asked |= {f"params.{key}": value for key, value in params.items()}
        query = " AND ".join(f"{key} = '{value}'" for key, value in asked.items())
        uri = None
        for model in self.client.search_logged_models([place], query):
            if str(model.status) == "FAILED":
                self.client.delete_logged_model(model.model_id)
            elif str(model.status) == "READY" and has_checkpoint(
                self.client, model.artifact_location
            ):
                uri = str(model.model_uri)
        return uri

    @asks
    def remove(self, version: Any) -> None:
        self.client.delete_model_version(self.name, version.version)

    @asks
    def discard(self, model_uri: str) -> None:
        """Remove an uploaded model that is no version's."""
        self.client.delete_logged_model(model_uri.removeprefix("models:/"))

    @asks
    def create(self, model_uri: str, run_id: str, description: str, tags: dict[str, str]) -> Any:
        """A new version of an uploaded model."""
        if not self._is_there():
            self._make()
        return self.client.create_model_version(
            self.name,
            model_uri,
            run_id,
            tags=tags,
            description=description,
            model_id=model_uri.removeprefix("models:/"),
        )

    @asks
    def tag(self, version: Any, key: str, value: str) -> None:
        self.client.set_model_version_tag(self.name, version.version, key, value)

    @asks
    def promote(self, version: Any) -> None:
        """Move the alias, wherever it is by now: MLflow knows no other way."""
        self.client.set_registered_model_alias(self.name, self.alias, version.version)

    def announce(self, version: Any) -> None:
        """Say of a version that it is about to be promoted, for all who register at the moment."""
        self.tag(version, PROMOTED, datetime.now(UTC).isoformat())

    def announced(self) -> dict[str, str]:
        """When each version was last about to be promoted, by the clock of who did."""
        tags = {str(version.version): version.tags.get(PROMOTED) for version in self.versions()}
        return {number: when for number, when in tags.items() if when}

    @asks
    def checkpoint(self, version: Any) -> Path:
        """A local copy of a version's checkpoint folder."""
        return fetch(f"models:/{self.name}/{version.version}")

    def _is_there(self) -> bool:
        return found(self.client.get_registered_model, self.name) is not None

    def _make(self) -> None:
        about = "Denoising diffusion models, by `ddpm register`."
        try:
            self.client.create_registered_model(self.name, description=about)
        except Exception:
            if not self._is_there():  # else another has made it at this moment
                raise


def row_of(version: Any, key: str) -> Row | None:
    """A row of results.json that a version carries as a tag; None without it."""
    try:
        row = parse_object(str(version.tags.get(key, "")).encode(errors="replace"), f"tag {key}")
        return Row.model_validate(validated(row, Row, f"tag {key}"))
    except Corrupt:
        return None


def rows_of(version: Any) -> list[Row]:
    """The rows that a version was measured by, the newest first."""
    return [row for key in ("rescored", "row") if (row := row_of(version, key))]


def lost(uri: str, record: dict[str, Any]) -> str | None:
    """What MLflow at `uri` has no longer of a registered.json; None where all is there.

    None too where MLflow is away, or does not answer in PATIENCE seconds.
    """
    store = sqlite_path(uri)
    if store is not None and not store.exists():  # which connecting would make
        return f"{store} is gone"
    with suppress(Exception):
        require("mlflow", "tracking")  # its import takes seconds, and is not to be hurried
        return within(PATIENCE, lambda: _lost(connect(uri), record))
    return None


def _lost(client: Any, record: dict[str, Any]) -> str | None:
    name, number = record["name"], record["version"]
    version = found(client.get_model_version, name, number)
    if version is None or version.tags.get("weights") != record["weights"]:
        return f"MLflow has no longer version {number} of {name}"
    if not has_files(client, version):
        return f"the files of version {number} of {name} are gone"
    alias = record["alias"]
    if record["promoted"] and found(client.get_model_version_by_alias, name, alias) is None:
        return f"no version of {name} has the alias {alias} any more"
    return None


def has_files(client: Any, version: Any) -> bool:
    """Whether a version's checkpoint lies where MLflow keeps it; raises where that is not told."""
    place = client.get_model_version_download_uri(version.name, version.version)
    return has_checkpoint(client, place)


def has_checkpoint(client: Any, place: str) -> bool:
    """Whether there is a checkpoint where the files of a model lie."""
    artifacts = require("mlflow.artifacts", "tracking")
    uri = f"{place.rstrip('/')}/artifacts/{CHECKPOINT}"
    listed = artifacts.list_artifacts
    return bool(within(CALL_LIMIT, listed, uri, tracking_uri=client.tracking_uri))


def found(call: Callable[..., Any], *arguments: str) -> Any | None:
    """What a client's call answers; None where MLflow has no such thing."""
    try:
        return call(*arguments)
    except Exception as error:
        if is_refusal(error):
            return None
        raise


def download(config: Config, origin: str) -> Path:
    """The checkpoint folder of a models:/NAME/VERSION or models:/NAME@ALIAS. Raises UserError."""
    name, at, alias = origin.removeprefix("models:/").partition("@")
    registry = Registry(config)
    with asking(registry.uri):
        if at:
            version = registry.client.get_model_version_by_alias(name, alias).version
            origin = f"models:/{name}/{version}"
        return fetch(origin)


def fetch(origin: str) -> Path:
    """Download the checkpoint folder of a version, to be gone when the process ends."""
    place = tempfile.mkdtemp(prefix="ddpm-model-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return fetch_to(origin, place)


def fetch_to(origin: str, place: str) -> Path:
    """Download the checkpoint folder of a version into the folder `place`. Raises Corrupt."""
    artifacts = require("mlflow.artifacts", "tracking")
    uri = f"{origin}/artifacts/{CHECKPOINT}"
    files = within(CALL_LIMIT, artifacts.list_artifacts, uri)
    limit = transfer_limit(sum(file.file_size or 0 for file in files))

    def fetch() -> Path:
        folder = Path(within(limit, artifacts.download_artifacts, uri, dst_path=place))
        verify(folder)
        return folder

    return fetch_whole(fetch)
