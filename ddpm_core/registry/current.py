"""The champion of the moment: found, loaded, and put in the place of the one before it.

Of a version only the checkpoint is fetched, safetensors and JSON: no code from the registry runs
here. `mlflow models serve` is the way for a model that needs its own.
"""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpm_core.config import Config
from ddpm_core.console import say, warn
from ddpm_core.errors import UserError
from ddpm_core.masking import masked
from ddpm_core.registry.models import Registry, asking, fetch_to, row_of
from ddpm_core.tracking.errors import reason

if TYPE_CHECKING:
    from ddpm_core.registry.serving import Served


@dataclass(frozen=True)
class Loaded:
    """A version in memory, and what /version reports of it."""

    key: tuple[str, Any]  # also tells a version from one of the same number in a newer registry
    served: Served
    facts: dict[str, Any]


class Current:
    """The newest champion that could be loaded. What goes wrong afterwards leaves it in its place.

    `look` is for one thread. The others read `loaded`, which is None as long as there was none,
    and `trouble`, the sentence why it is not the newest; a request keeps the one that it began
    with, and the last request of a version frees its memory.
    """

    def __init__(self, config: Config) -> None:
        if not config.tracking.uri:
            raise UserError("tracking.uri is empty; the champion is kept in MLflow.")
        self._config = config
        self._told = ""
        self.loaded: Loaded | None = None
        self.trouble = f"MLflow at {masked(config.tracking.uri)} has not been asked yet."

    def look(self) -> None:
        """Ask MLflow once who the champion is, and load it if it is a new one. Never raises."""
        kind = "MLflow"
        try:
            registry = Registry(self._config)
            version = registry.champion()
            kind = "champion"
            if version is None:
                raise UserError(
                    f"{registry.name} has no version with the alias {registry.alias!r} at "
                    f"{masked(registry.uri)}; `ddpm register` gives it to one."
                )
            kind = f"version {version.version}"
            if self.loaded is None or self.loaded.key != _key(version):
                self.loaded = self._load(registry, version)
                say(f"serve: {registry.name} version {version.version} answers from now on.")
        except UserError as error:
            self._is_away(kind, str(error))
        except Exception as error:  # no memory, no disk: whatever a machine runs out of
            self._is_away(kind, f"The champion, {kind}, cannot be loaded: {reason(error)}")
        else:
            self.trouble = self._told = ""

    def keep_looking(self, every: float) -> None:
        """Look every so many seconds, for ever."""
        pause = threading.Event()
        while True:
            self.look()
            pause.wait(every)

    def _load(self, registry: Registry, version: Any) -> Loaded:
        """Fetch a version and draw an image with it; its files are gone afterwards."""
        from ddpm_core.registry.serving import Served  # PyTorch takes seconds; /health does not

        with tempfile.TemporaryDirectory(prefix="ddpm-champion-") as place:
            with asking(registry.uri):
                folder = fetch_to(f"models:/{registry.name}/{version.version}", place)
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

    def _is_away(self, kind: str, trouble: str) -> None:
        """Keep the reason; a new kind of trouble is also said, once."""
        self.trouble = trouble
        if kind != self._told:
            went_on = self.loaded and f"Version {self.loaded.facts['version']} goes on answering."
            warn(f"serve: {trouble} {went_on or 'Waiting.'}")
        self._told = kind


def _key(version: Any) -> tuple[str, Any]:
    return str(version.version), version.creation_timestamp
