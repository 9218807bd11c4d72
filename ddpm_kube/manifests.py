"""The manifests that jobs are built from: those that `kubectl apply` uses, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]


def load(name: str) -> Json:
    """Return a manifest; what YAML anchors share is copied, so each part can be patched."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    loaded: Json = json.loads(json.dumps(yaml.safe_load(text)))
    return loaded
