"""The names of everything a run keeps, under one root."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ddpm_core.errors import Corrupt
from ddpm_core.storage import MANIFEST, Storage, open_storage
from ddpm_core.storage.files import Manifest, Schema, is_plain, parse_object, validated

DATA = "data"
SNAPSHOTS = "snapshots"
SAMPLES = "samples"
EVALUATION = "evaluation"
SUPERSEDED = "superseded"
LOG = "log.jsonl"
METRICS = "metrics.json"
RESULTS = f"{EVALUATION}/results.json"
REPORT = f"{EVALUATION}/report.html"
TABLE = f"{EVALUATION}/evaluation_results.csv"
CONTACT = f"{DATA}/contact.png"
RUN = "run.json"
REGISTERED = "registered.json"
GRID = "grid.png"  # in a folder of a snapshot or of samples

_STEP = re.compile(r"step-(\d{8,})")


class Workspace:
    """A run's files. Rules about their content belong to the module that writes them."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @classmethod
    def open(cls, uri: str) -> Workspace:
        return cls(open_storage(uri))

    @property
    def uri(self) -> str:
        return self.storage.uri

    def path(self, key: str) -> Path:
        """A path of a key on this machine; of what lies elsewhere, a checked copy."""
        return self.storage.local(key)

    def shown(self, key: str) -> str:
        """Where a key lies, for people."""
        return f"{self.uri}/{key}"

    def steps(self, key: str) -> list[int]:
        """The steps that have a folder below `key`, ascending; of snapshots the finished ones."""
        names = self.storage.sealed(key) if key == SNAPSHOTS else self.storage.names(key)
        matches = (_STEP.fullmatch(name) for name in names)
        return sorted(int(match[1]) for match in matches if match)

    def read_json(self, key: str, schema: type[Schema] = Schema) -> dict[str, Any]:
        """A JSON object of this schema; of an absent, damaged or other file the empty one."""
        try:
            return validated(parse_object(self.storage.read(key), key), schema, key)
        except (FileNotFoundError, NotADirectoryError, Corrupt):
            return {}

    def damage(self, key: str, manifest: dict[str, Any] | None = None) -> str:
        """A sentence about the first file of a sealed folder that is not as it was written, or "".

        Of their content the sizes are looked at, no more: `verify` reads it.
        """
        manifest = manifest or self.read_json(f"{key}/{MANIFEST}", Manifest)
        if not manifest:
            return f"{key} has no {MANIFEST}."
        for name, facts in manifest["files"].items():
            if not is_plain(name):
                return f"{key} names a file outside it, or none: {name[:200]!r}."
            size = self.storage.size(f"{key}/{name}")
            if size is None:
                return f"{key} lacks its file {name}."
            if size != facts["size"]:
                return f"{key}/{name} has {size} bytes; {facts['size']} were written."
        return ""

    def write_json(self, key: str, value: dict[str, Any]) -> None:
        self.storage.write(key, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def snapshot_key(step: int) -> str:
    return f"{SNAPSHOTS}/{step_name(step)}"


def samples_key(step: int) -> str:
    return f"{SAMPLES}/{step_name(step)}"


def fingerprint(value: Any) -> str:
    """16 hex digits that stand for plain data: the start of its canonical JSON's SHA-256."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
