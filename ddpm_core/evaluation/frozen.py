"""The in-domain extractor as a folder: weights, facts, and a fingerprint that both must have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from ddpm_core.errors import Corrupt
from ddpm_core.evaluation.features import Extractor
from ddpm_core.evaluation.in_domain import InDomain, Network
from ddpm_core.storage import sha256_of
from ddpm_core.storage.files import Schema, read_object, read_tensors, save_tensors, validated

WEIGHTS = "extractor.safetensors"
FACTS = "extractor.json"


class Facts(Schema):
    """What extractor.json must say of the network."""

    sha256: str
    channels: Literal[1, 3]
    image_size: Annotated[int, Field(ge=4, le=2**16)]
    outputs: Annotated[int, Field(ge=1, le=2**20)]
    task: Literal["classes", "rotations"]
    accuracy: float | None


def save_extractor(trained: InDomain, folder: Path) -> None:
    """Write both files into a folder that exists."""
    save_tensors(trained.network.state_dict(), folder / WEIGHTS)
    facts = {**trained.facts, "sha256": sha256_of(folder / WEIGHTS)}
    (folder / FACTS).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", "utf-8")


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts of a folder whose weights are those it was saved with. Raises Corrupt."""
    try:
        facts = validated(read_object(folder / FACTS, FACTS), Facts, FACTS)
        whole = sha256_of(folder / WEIGHTS) == facts["sha256"]
    except (OSError, Corrupt) as error:
        raise Corrupt(f"The in-domain extractor in {folder} is damaged: {error!r}.") from error
    if not whole:
        raise Corrupt(f"{folder / WEIGHTS} was changed or damaged: its checksum differs.")
    return dict(facts)


def load_extractor(folder: Path, device: torch.device | None = None) -> Extractor:
    """The extractor of a folder, on a device (the CPU if none). Raises Corrupt."""
    trained, fingerprint = load(folder)
    return trained.extractor(fingerprint, device or torch.device("cpu"))


def load(folder: Path) -> tuple[InDomain, str]:
    """The network of a folder and its facts, and the fingerprint. Raises Corrupt."""
    facts = read_facts(folder)
    tensors = read_tensors(folder / WEIGHTS)
    head = tensors.get("head.weight")
    if head is None or len(head.shape) != 2 or len(head) != facts["outputs"]:
        raise Corrupt(f"The in-domain extractor in {folder} is damaged: it has another head.")
    network = Network(facts["channels"], facts["image_size"], facts["outputs"])
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise Corrupt(f"The in-domain extractor in {folder} is damaged: {error}.") from error
    fingerprint = str(facts.pop("sha256"))[:16]
    return InDomain(network.eval(), facts), fingerprint
