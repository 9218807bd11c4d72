"""Shards on disk, and the manifest that makes a whole of them."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.checkpoint import open_checkpoint
from ddpm_core.config import Config
from ddpm_core.console import say
from ddpm_core.generate import plan
from ddpm_core.generate.conditions import Conditions
from ddpm_core.generate.plan import Shard
from ddpm_core.images import Pixels, enlarge, grid, png
from ddpm_core.storage import MANIFEST, Corrupt, sha256_of
from ddpm_core.workspace import Workspace, samples_key

GRID = 64  # images in grid.png


@dataclass(frozen=True)
class Samples:
    """The images of a checkpoint, memory-mapped shard by shard, with what they are evidence of."""

    shards: list[Pixels]
    labels: NDArray[np.int64] | None
    evidence: dict[str, Any]

    def __len__(self) -> int:
        return sum(len(shard) for shard in self.shards)

    @property
    def images(self) -> Pixels:
        """uint8 (n, H, W, C); memory-mapped where there is one shard."""
        return self.shards[0] if len(self.shards) == 1 else np.concatenate(self.shards)


def open_samples(workspace: Workspace, step: int) -> Samples:
    """The gathered samples of a step. Raises Corrupt if they are absent or not what was written."""
    key = samples_key(step)
    evidence = workspace.read_json(f"{key}/{MANIFEST}")
    if not evidence:
        raise Corrupt(f"The checkpoint of step {step} has no complete samples: run `ddpm sample`.")
    folder = workspace.path(key)
    for name, file in evidence["files"].items():
        path = folder / name
        if Path(name).name != name or not path.is_file() or sha256_of(path) != file["sha256"]:
            raise Corrupt(
                f"{key}/{name} is missing or was changed: remove {key} and run `ddpm sample`."
            )
    arrays = [np.load(folder / n, mmap_mode="r", allow_pickle=False) for n in evidence["shards"]]
    labels = None
    if "labels.npy" in evidence["files"]:
        labels = np.load(folder / "labels.npy", allow_pickle=False)
    return Samples(arrays, labels, evidence)


def complete(workspace: Workspace, recipe: dict[str, Any]) -> bool:
    """Whether the gathered samples of a step are those of this recipe, and there."""
    key = samples_key(recipe["step"])
    found = workspace.read_json(f"{key}/{MANIFEST}")
    return found.get("samples_fingerprint") == recipe["samples_fingerprint"] and all(
        workspace.storage.exists(f"{key}/{name}") for name in found["files"]
    )


def shard_is_whole(workspace: Workspace, recipe: dict[str, Any], shard: Shard) -> bool:
    """Whether a shard of this recipe is on disk as it was written."""
    key = f"{samples_key(recipe['step'])}/{shard.name}"
    record = workspace.read_json(f"{key}.json")
    path = workspace.path(f"{key}.npy")
    return (
        record.get("samples_fingerprint") == recipe["samples_fingerprint"]
        and path.is_file()
        and sha256_of(path) == record.get("sha256")
    )


def write_shard(
    workspace: Workspace, recipe: dict[str, Any], shard: Shard, chunks: list[Pixels]
) -> None:
    """The array first, its record last: a shard with a record is whole."""
    size, channels = recipe["image_size"], recipe["channels"]
    empty = np.empty((0, size, size, channels), np.uint8)
    data = npy(np.concatenate([empty, *chunks]))
    key = f"{samples_key(recipe['step'])}/{shard.name}"
    workspace.storage.write(f"{key}.npy", data)
    workspace.write_json(
        f"{key}.json",
        {
            "samples_fingerprint": recipe["samples_fingerprint"],
            "start": shard.start,
            "stop": shard.stop,
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        },
    )


def try_gather(config: Config, workspace: Workspace, recipe: dict[str, Any]) -> bool:
    """Write the manifest of a checkpoint's samples if all shards are there, else say which not."""
    step = recipe["step"]
    missing = [
        shard.name
        for shard in plan.shards(config.sample)
        if not shard_is_whole(workspace, recipe, shard)
    ]
    if missing:
        say(f"sample: step {step} still waits for {', '.join(missing)}.")
        return False
    _remove_strangers(workspace, recipe, config)
    _write_extras(config, workspace, recipe)
    _write_manifest(config, workspace, recipe)
    return True


def npy(array: NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def _remove_strangers(workspace: Workspace, recipe: dict[str, Any], config: Config) -> None:
    """Remove what another recipe, or another number of shards, has left."""
    key = samples_key(recipe["step"])
    ours = {f"{s.name}.{end}" for s in plan.shards(config.sample) for end in ("npy", "json")}
    for name in workspace.storage.names(key):
        if name not in ours:
            workspace.storage.remove(f"{key}/{name}")


def _write_extras(config: Config, workspace: Workspace, recipe: dict[str, Any]) -> None:
    """The grid, the labels of a conditional model, and single PNGs where asked for."""
    key = samples_key(recipe["step"])
    arrays = [
        np.load(workspace.path(f"{key}/{s.name}.npy"), mmap_mode="r", allow_pickle=False)
        for s in plan.shards(config.sample)
    ]
    first = np.concatenate([array[:GRID] for array in arrays])[:GRID]
    workspace.storage.write(f"{key}/grid.png", png(enlarge(grid(first), 512)))
    checkpoint = open_checkpoint(workspace, recipe["step"])
    conditions = Conditions(checkpoint.network["conditioning"], checkpoint.data, config.sample)
    labels = conditions.labels(range(config.sample.count))
    if labels is not None:
        workspace.storage.write(f"{key}/labels.npy", npy(labels))
    if config.sample.png:
        for number, image in enumerate(image for array in arrays for image in array):
            workspace.storage.write(f"{key}/png/{number:06d}.png", png(image))


def _write_manifest(config: Config, workspace: Workspace, recipe: dict[str, Any]) -> None:
    key = samples_key(recipe["step"])
    folder = workspace.path(key)
    names = [f"{s.name}.npy" for s in plan.shards(config.sample)]
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
        for name in [*names, "labels.npy"]
        if (folder / name).exists()
    }
    records = [workspace.read_json(f"{key}/{s.name}.json") for s in plan.shards(config.sample)]
    counts = sum(record["stop"] - record["start"] for record in records)
    if counts != config.sample.count:
        raise Corrupt(f"{key} holds {counts} images; {config.sample.count} were asked for.")
    workspace.write_json(f"{key}/{MANIFEST}", {**recipe, "shards": names, "files": files})
