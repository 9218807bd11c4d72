"""The champion that `ddpm serve` has in memory, and the change to the next one."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpm_core.config import Config
from ddpm_core.console import say, warn
from ddpm_core.errors import UserError
from ddpm_core.registry.models import Registry, fetch_to, mlflow_errors, row_of
from ddpm_core.text import masked
from ddpm_core.tracking.errors import reason

if TYPE_CHECKING:
    from ddpm_core.registry.serving import Served


@dataclass(frozen=True)
class Loaded:
    """A version in memory, and what /version reports about it."""

    key: tuple[str, Any]  # the creation time, too: a deleted registry starts at version 1 again
    served: Served
    facts: dict[str, Any]


class CurrentChampion:
    """The newest champion that could be loaded. It stays if a later one cannot be loaded.

    One thread calls `refresh`. The others read `loaded`, which is None until the first champion is
    loaded, and `trouble`, the reason why it is not the newest. A request keeps the version that it
    started with; the last request of a version frees its memory.

    Only the checkpoint of a version is downloaded (safetensors and JSON), so no code from the
    registry runs here. Use `mlflow models serve` for a model that needs its own code.
    """

    def __init__(self, config: Config) -> None:
        if not config.tracking.uri:
            raise UserError("tracking.uri is empty, but the champion is stored in MLflow.")
        self._config = config
        self._reported = ""
        self.loaded: Loaded | None = None
        self.trouble = f"MLflow at {masked(config.tracking.uri)} was not asked yet."

    def refresh_forever(self, interval: float) -> None:
        """Call `refresh` every `interval` seconds."""
        pause = threading.Event()
        while True:
            self.refresh()
            pause.wait(interval)

    def refresh(self) -> None:
        """Ask MLflow once for the champion, and load it if it is new. Never raises."""
        kind = "MLflow"
        try:
            registry = Registry(self._config)
            version = registry.champion()
            kind = "champion"
            if version is None:
                raise UserError(
                    f"{registry.name} has no version with the alias {registry.alias!r} at "
                    f"{masked(registry.uri)}. `ddpm register` sets it."
                )
            kind = f"version {version.version}"
            if self.loaded is None or self.loaded.key != _key(version):
                self.loaded = self._load(registry, version)
                say(f"serve: serving {registry.name} version {version.version}.")
        except UserError as error:
            self._report(kind, str(error))
        except Exception as error:  # such as a lack of memory or disk space
            self._report(kind, f"The champion, {kind}, cannot be loaded: {reason(error)}")
        else:
            self.trouble = self._reported = ""

    def _load(self, registry: Registry, version: Any) -> Loaded:
        """Download a version, load it and draw one image with it. Deletes the files again."""
        # Imported here because PyTorch takes seconds, for which /health does not wait.
        from ddpm_core.registry.serving import Served

        with tempfile.TemporaryDirectory(prefix="ddpm-champion-") as target:
            with mlflow_errors(registry.uri):
                folder = fetch_to(f"models:/{registry.name}/{version.version}", target)
            served = Served(folder)
        served.try_out()
        row = row_of(version, "rescored") or row_of(version, "row")
        return Loaded(
            key=_key(version),
            served=served,
            facts={
                "name": registry.name,
                "alias": registry.alias,
                "version": str(version.version),
                "step": row and row.step,
                "score_name": row and row.score_name,
                "score": row and row.score,
                "evidence": row and row.evidence.plain(),
            },
        )

    def _report(self, kind: str, trouble: str) -> None:
        """Set `trouble`; print it if the last one was of a different kind."""
        self.trouble = trouble
        if kind != self._reported:
            serving = self.loaded and f"Still serving version {self.loaded.facts['version']}."
            warn(f"serve: {trouble} {serving or 'Waiting.'}")
        self._reported = kind


def _key(version: Any) -> tuple[str, Any]:
    return str(version.version), version.creation_timestamp
