"""The manifest that makes a whole of shards, and the samples that it lists.

Whoever ends last gathers, and several may at once: they write the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, InstanceOf

from ddpm_core.checkpoint import look_at_checkpoint
from ddpm_core.config import Config
from ddpm_core.console import say
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.sampling import plan
from ddpm_core.sampling.images import Pixels, enlarge, grid, png
from ddpm_core.sampling.plan import Shard
from ddpm_core.sampling.sampler import Conditions
from ddpm_core.sampling.shards import ShardStore, facts_of, npy
from ddpm_core.storage import MANIFEST, sha256_of
from ddpm_core.storage.files import Count, Schema, inside, is_plain, open_array
from ddpm_core.storage.manifest import FileRecord
from ddpm_core.storage.workspace import GRID, Workspace, samples_key

SHOWN = 64  # images in the grid
SINGLES = "png"
LABELS = "labels.npy"
LISTED = 8  # shards that are named
# Of a manifest, what the fingerprint does not stand for; all else are facts of plan.recipe.
_BESIDE = {"png", "samples_fingerprint", "shards", "files", "pictures"}


class Gathered(Schema):
    """The manifest of gathered samples: their recipe (see plan.recipe), shards and files."""

    step: Count
    count: Count
    seed: int
    image_size: Annotated[int, Field(ge=1, le=2**16)]
    channels: Annotated[int, Field(ge=1, le=4)]
    classes: list[InstanceOf[str]]
    sampler: dict[str, Any]
    weights: str
    data_fingerprint: str
    train_fingerprint: str
    png: bool = False  # whether each image is a file in png/ too
    samples_fingerprint: str
    shards: Annotated[list[str], Field(min_length=1)]
    files: dict[str, FileRecord]
    pictures: dict[str, Count] = Field(default={})  # bytes of those to look at


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
    evidence = workspace.read_json(f"{key}/{MANIFEST}", Gathered)
    if not evidence:
        raise Corrupt(f"The checkpoint of step {step} has no complete samples: run `ddpm sample`.")
    folder = workspace.path(key)
    again = f"remove {key} and run `ddpm sample`."
    if not _is_recipe(evidence):
        raise Corrupt(
            f"{key}/{MANIFEST} was changed, or is of another version: its fingerprint is not of "
            f"the settings that it names: {again}"
        )
    for name, file in evidence["files"].items():
        path = inside(folder, name)
        if not path.is_file() or sha256_of(path) != file["sha256"]:
            raise Corrupt(f"{key}/{name} is missing or was changed: {again}")
    if not set(evidence["shards"]) <= set(evidence["files"]):
        raise Corrupt(f"{key}/{MANIFEST} lists shards without their checksums: {again}")
    arrays = [open_array(folder / name) for name in evidence["shards"]]
    if any(array.dtype != np.uint8 or array.ndim != 4 for array in arrays):
        raise Corrupt(f"A shard of {key} holds no images: {again}")
    if (images := sum(map(len, arrays))) != evidence["count"]:
        raise Corrupt(f"{key} holds {images} images; {evidence['count']} were written: {again}")
    if len({array.shape[1:] for array in arrays}) > 1:
        raise Corrupt(f"The shards of {key} hold images of several sizes: {again}")
    labels = None
    if LABELS in evidence["files"]:
        labels = np.array(open_array(folder / LABELS))
        classes = range(len(evidence["classes"]))
        fits = labels.dtype == np.int64 and labels.shape == (images,)
        if not fits or not np.isin(labels, classes).all():
            raise Corrupt(f"{key}/{LABELS} does not fit the images: {again}")
    return Samples(arrays, labels, evidence)


def complete(workspace: Workspace, recipe: dict[str, Any], thorough: bool = False) -> bool:
    """Whether the gathered samples of a step are those of this recipe, and there.

    By the sizes of their files, or `thorough` by the checksums too; single pictures by their
    number.
    """
    key, storage = samples_key(recipe["step"]), workspace.storage
    found = workspace.read_json(f"{key}/{MANIFEST}", Gathered)
    if found.get("samples_fingerprint") != recipe["samples_fingerprint"] or not _is_recipe(found):
        return False
    size = storage.size(f"{key}/{GRID}")
    if size is None or size != found.get("pictures", {}).get(GRID, size):
        return False
    if recipe["png"] and not (found.get("png") and len(_singles(workspace, key)) == found["count"]):
        return False
    for name, file in found["files"].items():
        if not is_plain(name) or storage.size(f"{key}/{name}") != file["size"]:
            return False
        if thorough and storage.checksum(f"{key}/{name}") != file["sha256"]:
            return False
    return True


def _is_recipe(evidence: dict[str, Any]) -> bool:
    """Whether what a manifest says of the images is what its fingerprint stands for."""
    facts = {name: value for name, value in evidence.items() if name not in _BESIDE}
    return plan.fingerprint_of(facts) == str(evidence["samples_fingerprint"])


def try_gather(config: Config, workspace: Workspace, recipe: dict[str, Any]) -> bool:
    """Write the manifest of a checkpoint's samples if all shards are there, else say which not.

    Raises UserError where another sample puts its own in their place meanwhile.
    """
    if complete(workspace, recipe):
        return True
    shards = plan.shards(config.sample)
    waits = waiting(workspace, recipe, shards)
    if waits:
        say(f"sample: step {recipe['step']} still waits for {waits}.")
        return False
    parts = ShardStore(workspace, recipe)
    try:
        made = _write_extras(config, workspace, recipe)
        files = {f"{shard.name}.npy": parts.listed(shard) for shard in shards}
    except (Corrupt, FileNotFoundError) as error:
        now = waiting(workspace, recipe, shards)
        raise UserError(
            f"The samples of step {recipe['step']} were changed while they were gathered"
            f"{now and f': {now}'}. Another `ddpm sample` is at work in this workspace: wait for "
            "it, then run this one again."
        ) from error
    _write_manifest(workspace, recipe, files, made)
    records = [f"{shard.name}.json" for shard in shards]
    parts.tidy([*files, *records, *made, *([SINGLES] * recipe["png"]), MANIFEST])
    return True


def waiting(workspace: Workspace, recipe: dict[str, Any], shards: list[Shard]) -> str:
    """The shards that are not there whole, each with the reason if it is not merely missing."""
    parts = ShardStore(workspace, recipe)
    found = [(shard.name, parts.problem(shard)) for shard in shards]
    told = [
        name if problem == "missing" else f"{name} ({problem})"
        for name, problem in found
        if problem
    ]
    more = f" and {len(told) - LISTED} others" if len(told) > LISTED else ""
    return ", ".join(told[:LISTED]) + more


def _write_extras(config: Config, workspace: Workspace, recipe: dict[str, Any]) -> dict[str, bytes]:
    """The grid, the labels of a conditional model, single PNGs where asked for.

    The contents of the first two, by name.
    """
    key = samples_key(recipe["step"])
    first = np.stack(list(islice(_images(config, workspace, key), SHOWN)))
    made = {GRID: png(enlarge(grid(first), 512))}
    checkpoint = look_at_checkpoint(workspace, recipe["step"])
    conditions = Conditions(checkpoint.network.conditioning, checkpoint.data, config.sample)
    labels = conditions.labels(range(config.sample.count))
    if labels is not None:
        made[LABELS] = npy(labels)
    for name, data in made.items():
        workspace.storage.write(f"{key}/{name}", data)
    if config.sample.png:
        _write_singles(config, workspace, key)
    return made


def _write_singles(config: Config, workspace: Workspace, key: str) -> None:
    """Each image as png/NNNNNN.png; what else lies there, of an earlier recipe, goes.

    Afterwards, so that another gatherer at the same work loses none.
    """
    written = set()
    for number, image in enumerate(_images(config, workspace, key)):
        written.add(name := f"{number:06d}.png")
        workspace.storage.write(f"{key}/{SINGLES}/{name}", png(image))
    for name in set(_singles(workspace, key)) - written:
        with contextlib.suppress(FileNotFoundError):
            workspace.storage.remove(f"{key}/{SINGLES}/{name}")


def _singles(workspace: Workspace, key: str) -> list[str]:
    return workspace.storage.names(f"{key}/{SINGLES}")


def _images(config: Config, workspace: Workspace, key: str) -> Iterator[Pixels]:
    """All images (H, W, C) in order; a shard is fetched when it is reached."""
    for shard in plan.shards(config.sample):
        yield from open_array(workspace.path(f"{key}/{shard.name}.npy"))


def _write_manifest(
    workspace: Workspace,
    recipe: dict[str, Any],
    files: dict[str, dict[str, Any]],
    made: dict[str, bytes],
) -> None:
    """Sizes and checksums of what this recipe made: what another puts there is not taken for it."""
    manifest = {
        **recipe,
        "shards": list(files),
        "files": {**files, **{name: facts_of(made[name]) for name in made if name == LABELS}},
        "pictures": {GRID: len(made[GRID])},
    }
    workspace.write_json(f"{samples_key(recipe['step'])}/{MANIFEST}", manifest)
