"""The names of a run's files below one root, and JSON files by key."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ddpm_core.errors import Corrupt
from ddpm_core.storage import MANIFEST, Storage, open_storage
from ddpm_core.storage.files import Model, is_plain, parse_model, parse_object
from ddpm_core.storage.manifest import Manifest

DATA = "data"
SNAPSHOTS = "snapshots"
SAMPLES = "samples"
EVALUATION = "evaluation"
SUPERSEDED = "superseded"
LOG = "log.jsonl"
METRICS = "metrics.json"
PICTURES = f"{EVALUATION}/pictures"
RESULTS = f"{EVALUATION}/results.json"
REPORT = f"{EVALUATION}/report.html"
TABLE = f"{EVALUATION}/evaluation_results.csv"
CONTACT = f"{DATA}/contact.png"
RUN = "run.json"
REGISTERED = "registered.json"
GRID = "grid.png"  # in a folder of a snapshot or of samples

_STEP = re.compile(r"step-(\d{8,})")


class Workspace:
    """The files of a run. The module that writes a file defines its content."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @classmethod
    def open(cls, uri: str) -> Workspace:
        """Open a directory or s3://bucket/prefix. Raises UserError."""
        return cls(open_storage(uri))

    @property
    def uri(self) -> str:
        return self.storage.uri

    def path(self, key: str) -> Path:
        """Return a local path of a key; for a workspace in S3, of a checked copy."""
        return self.storage.local(key)

    def shown(self, key: str) -> str:
        """Return the location of a key, for messages."""
        return f"{self.uri}/{key}"

    def steps(self, key: str) -> list[int]:
        """Return the steps with a folder below `key`, ascending; only complete snapshots count."""
        names = self.storage.sealed(key) if key == SNAPSHOTS else self.storage.names(key)
        matches = (_STEP.fullmatch(name) for name in names)
        return sorted(int(match[1]) for match in matches if match)

    def read_json(self, key: str) -> dict[str, Any]:
        """Return the JSON object in a file; {} if it is missing or invalid."""
        try:
            return parse_object(self.storage.read(key), key)
        except (FileNotFoundError, NotADirectoryError, Corrupt):
            return {}

    def read_model(self, key: str, schema: type[Model]) -> Model | None:
        """Return the JSON object in a file as a frozen model; None if it is missing or invalid."""
        try:
            return parse_model(self.storage.read(key), schema, key)
        except (FileNotFoundError, NotADirectoryError, Corrupt):
            return None

    def damage(self, key: str, manifest: Manifest | None = None) -> str:
        """Return a message about the first file of a folder that is missing or has a wrong size.

        Returns "" if there is none. Only sizes are compared; `verify` also compares content.
        """
        manifest = manifest or self.read_model(f"{key}/{MANIFEST}", Manifest)
        if manifest is None:
            return f"{key} has no {MANIFEST}."
        for name, record in manifest.files.items():
            if not is_plain(name):
                return f"{key} refers to a file outside it or an invalid name: {name[:200]!r}."
            size = self.storage.size(f"{key}/{name}")
            if size is None:
                return f"{key}/{name} is missing."
            if size != record.size:
                return f"{key}/{name} has {size} bytes; {record.size} were written."
        return ""

    def write_json(self, key: str, value: dict[str, Any]) -> None:
        """Write a JSON object, indented and with sorted keys."""
        self.storage.write(key, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def step_name(step: int) -> str:
    """Return the folder name of a step: "step-00000200"."""
    return f"step-{step:08d}"


def figure_name(kind: str, weights: str) -> str:
    """Return the name in PICTURES of what weights with this SHA-256 have drawn, without its end."""
    return f"{kind}-{weights[:16]}"


def snapshot_key(step: int) -> str:
    """Return the key of a snapshot."""
    return f"{SNAPSHOTS}/{step_name(step)}"


def samples_key(step: int) -> str:
    """Return the key of the samples of a snapshot."""
    return f"{SAMPLES}/{step_name(step)}"


def fingerprint(value: Any) -> str:
    """Return 16 hex digits that identify plain data: the start of its canonical JSON's SHA-256."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
