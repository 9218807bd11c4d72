"""The in-domain extractor as a folder: weights, facts, and a fingerprint that both must have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ddpm_core.evaluation.extractors import Extractor
from ddpm_core.evaluation.in_domain import InDomain, build
from ddpm_core.storage import Corrupt, sha256_of

WEIGHTS = "extractor.safetensors"
FACTS = "extractor.json"


def save_extractor(trained: InDomain, folder: Path) -> None:
    """Write both files into a folder that exists."""
    save_file(dict(trained.network.state_dict()), folder / WEIGHTS)
    facts = {**trained.facts, "sha256": sha256_of(folder / WEIGHTS)}
    (folder / FACTS).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", "utf-8")


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts of a folder whose weights are those it was saved with. Raises Corrupt."""
    try:
        facts = json.loads((folder / FACTS).read_bytes())
        whole = sha256_of(folder / WEIGHTS) == facts["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"The in-domain extractor in {folder} is damaged: {error!r}.") from error
    if not whole:
        raise Corrupt(f"{folder / WEIGHTS} was changed or damaged: its checksum differs.")
    return dict(facts)


def load_extractor(folder: Path, device: torch.device | None = None) -> Extractor:
    """The extractor of a folder, on a device (the CPU if none). Raises Corrupt."""
    facts = read_facts(folder)
    try:
        network = build(facts["channels"], facts["image_size"], facts["outputs"])
        network.load_state_dict(load_file(folder / WEIGHTS))
        fingerprint = str(facts.pop("sha256"))[:16]
        return InDomain(network, facts).extractor(fingerprint, device or torch.device("cpu"))
    except (RuntimeError, KeyError, TypeError) as error:
        raise Corrupt(f"The in-domain extractor in {folder} is damaged: {error!r}.") from error
