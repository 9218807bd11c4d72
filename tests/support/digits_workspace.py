"""Write workspaces of scikit-learn's digits in the format of prepare and sample."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.sampling.plan import Recipe
from ddpm_core.storage import MANIFEST, sha256_of
from ddpm_core.storage.workspace import DATA, Workspace, samples_key, snapshot_key

Pixels = NDArray[np.uint8]
HELD_OUT = 180


@functools.cache
def digits(size: int = 16) -> tuple[Pixels, NDArray[np.int64]]:
    """Return all 1,797 digits, uint8 (N, size, size, 1), and their classes, in a shuffled order."""
    data = load_digits()
    small = (data.images * 255 / 16).round().astype(np.uint8)
    resized = [Image.fromarray(i).resize((size, size), Image.Resampling.BICUBIC) for i in small]
    order = np.argsort([hashlib.sha256(i.tobytes()).digest() for i in small])
    return np.stack([np.asarray(i) for i in resized])[order][..., None], data.target[order]


def make_config(root: Path, **sections: Any) -> Config:
    defaults = {"workspace": str(root / "run"), "tracking": {"uri": ""}, "device": "cpu"}
    return params.validate({**defaults, **sections})


def put_data(
    workspace: Workspace,
    images: Pixels,
    labels: NDArray[np.int64],
    held_out: int = HELD_OUT,
    classes: tuple[str, ...] = tuple("0123456789"),
) -> str:
    """Write data/ with the first images held out; return its fingerprint."""
    parts = {"": slice(held_out, None), "holdout_": slice(None, held_out)}
    facts: dict[str, Any] = {
        "classes": list(classes),
        "image_size": images.shape[1],
        "channels": images.shape[3],
        "source": {"uri": "digits", "revision": "1"},
        "arrays": {
            f"{p}{kind}": [f"{p}{kind}.npy"] for p in parts for kind in ("images", "labels")
        },
    }
    for prefix, rows in parts.items():
        facts[f"{prefix}count"] = len(images[rows])
        counts = np.bincount(labels[rows], minlength=len(classes)) if classes else []
        facts[f"{prefix}class_counts"] = [int(n) for n in counts]
        digest = hashlib.sha256(images[rows].tobytes() + repr(classes).encode())
        facts[f"{prefix}fingerprint"] = digest.hexdigest()[:16]
    with workspace.storage.new_folder(DATA, facts) as folder:
        for prefix, rows in parts.items():
            np.save(folder / f"{prefix}images.npy", images[rows])
            np.save(folder / f"{prefix}labels.npy", labels[rows])
    return str(facts["fingerprint"])


def put_samples(
    workspace: Workspace, step: int, images: Pixels, data: str, shards: int = 1, **recipe: Any
) -> Path:
    """Write samples/<step>/ in `shards` shards; return the folder."""
    folder = workspace.path(samples_key(step))
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, part in enumerate(np.array_split(images, shards)):
        names.append(f"shard-{number:03d}-of-{shards:03d}.npy")
        np.save(folder / names[-1], part)
    files = {
        n: {"size": (folder / n).stat().st_size, "sha256": sha256_of(folder / n)} for n in names
    }
    facts: dict[str, Any] = {
        "step": step,
        "count": len(images),
        "batch_size": 250,
        "weights": hashlib.sha256(str(step).encode()).hexdigest(),
        "sampler": {"sampler": "dpmpp", "steps": 20, "guidance": 1.0, "classes": None},
        "seed": 1,
        "data_fingerprint": data,
        "train_fingerprint": "0123456789abcdef",
        "image_size": images.shape[1],
        "channels": images.shape[3],
        "classes": list("0123456789"),
        "content": [file["sha256"] for file in files.values()],
        **recipe,
    }
    manifest = {**facts, "samples_fingerprint": Recipe(**facts).fingerprint(), "shards": names}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "files": files}))
    return folder


def put_snapshot(workspace: Workspace, step: int) -> None:
    """Write a folder that counts as a checkpoint of a step."""
    workspace.write_json(f"{snapshot_key(step)}/config.json", {"step": step})
