"""Whether the prepared data are still what the settings ask for."""

from __future__ import annotations

from ddpm_core.config import Config, Prepare
from ddpm_core.data.dataset import Prepared, was_changed
from ddpm_core.data.place import written_places
from ddpm_core.data.sources.open import changed
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.workspace import DATA, Workspace
from ddpm_core.text import masked, throughout

_FREE = (
    "workers",
    "max_rejected",
    "download",
    "anonymous",
)  # settings that do not change the result


def stale(config: Config, workspace: Workspace) -> str | None:
    """Why prepare has to run, without a full stop; None where the data are up to date.

    A source that is no longer within reach is no reason: the data were made from it. A setting
    that was not there yet had its default.
    """
    manifest = workspace.read_json(f"{DATA}/{MANIFEST}", Prepared)
    if not {"fingerprint", "prepare", "source", "files"} <= set(manifest):
        return "there are no data yet"
    before = throughout(masked, {**Prepare().model_dump(mode="json"), **manifest["prepare"]})
    for key, value in config.record()["prepare"].items():  # other credentials, same images
        if key not in _FREE and value != before[key]:
            return f"prepare.{key} is {value!r}, it was {before[key]!r}"
    if was_changed(manifest):
        return f"{DATA}/{MANIFEST} was changed since"
    missing = workspace.damage(DATA, manifest)
    if missing:
        return missing.rstrip(".")
    if changed(config.prepare, manifest["source"], written_places(config, workspace)):
        return "the source has changed since it was prepared"
    return None
