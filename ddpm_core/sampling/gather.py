"""Gather the shards of a checkpoint into samples: write, check and open their manifest.

The worker that finishes last gathers. Several workers may do so at once: they write the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ddpm_core.checkpoint import look_at_checkpoint
from ddpm_core.config import Config
from ddpm_core.console import say
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.sampling import plan
from ddpm_core.sampling.images import Pixels, grid_png, png
from ddpm_core.sampling.plan import Recipe, Shard
from ddpm_core.sampling.shards import ShardStore, npy, record_of
from ddpm_core.storage import MANIFEST, sha256_of
from ddpm_core.storage.files import Count, inside, is_plain, open_array
from ddpm_core.storage.manifest import FileRecord
from ddpm_core.storage.workspace import GRID, Workspace, samples_key

SHOWN = 64  # images in the grid
SINGLES = "png"  # the folder with a file per image
LABELS = "labels.npy"
LISTED = 8  # shards that a message names


class SamplesManifest(Recipe):
    """The manifest of gathered samples: their recipe, shards and files."""

    samples_fingerprint: str
    shards: Annotated[list[str], Field(min_length=1)]
    files: dict[str, FileRecord]
    pictures: dict[str, Count] = Field(default={})  # sizes in bytes of the images for people


@dataclass(frozen=True)
class Samples:
    """The samples of a checkpoint.

    Attributes:
        shards: Memory-mapped images, uint8 (n, H, W, C) each.
        labels: The class of each image, int64 (n,), or None.
        manifest: Where the images come from.
    """

    shards: list[Pixels]
    labels: NDArray[np.int64] | None
    manifest: SamplesManifest

    def __len__(self) -> int:
        return sum(len(shard) for shard in self.shards)

    @property
    def images(self) -> Pixels:
        """All images, uint8 (n, H, W, C); memory-mapped if there is one shard."""
        return self.shards[0] if len(self.shards) == 1 else np.concatenate(self.shards)


def open_samples(workspace: Workspace, step: int) -> Samples:
    """Return the gathered samples of a step. Raises Corrupt if they are missing or damaged."""
    key, again = samples_key(step), ("sample",)
    manifest = workspace.read_model(f"{key}/{MANIFEST}", SamplesManifest)
    if manifest is None:
        raise Corrupt(f"The checkpoint of step {step} has no complete samples.", run=again)
    folder = workspace.path(key)
    remove = f"Remove {key}."
    if manifest.fingerprint() != manifest.samples_fingerprint:
        raise Corrupt(
            f"{key}/{MANIFEST} was changed, or another version of ddpm wrote it: its fingerprint "
            f"does not match its settings. {remove}",
            run=again,
        )
    for name, file in manifest.files.items():
        path = inside(folder, name)
        if not path.is_file() or sha256_of(path) != file.sha256:
            raise Corrupt(f"{key}/{name} is missing or was changed. {remove}", run=again)
    if not set(manifest.shards) <= set(manifest.files):
        raise Corrupt(
            f"{key}/{MANIFEST} is damaged: it lists shards without checksums. {remove}", run=again
        )
    arrays = [open_array(folder / name) for name in manifest.shards]
    if any(array.dtype != np.uint8 or array.ndim != 4 for array in arrays):
        raise Corrupt(f"{key} is damaged: a shard does not contain images. {remove}", run=again)
    if (images := sum(map(len, arrays))) != manifest.count:
        raise Corrupt(f"{key} has {images} images; must have {manifest.count}. {remove}", run=again)
    if len({array.shape[1:] for array in arrays}) > 1:
        raise Corrupt(f"{key} is damaged: its shards differ in image size. {remove}", run=again)
    labels = None
    if LABELS in manifest.files:
        labels = np.array(open_array(folder / LABELS))
        classes = range(len(manifest.classes))
        fits = labels.dtype == np.int64 and labels.shape == (images,)
        if not fits or not np.isin(labels, classes).all():
            raise Corrupt(f"{key}/{LABELS} does not match the images. {remove}", run=again)
    return Samples(arrays, labels, manifest)


def complete(workspace: Workspace, recipe: Recipe, thorough: bool = False) -> bool:
    """Return whether a step has complete samples of this recipe.

    Checks the sizes of files, if `thorough` also their checksums, and the number of single PNGs.
    """
    key, storage = samples_key(recipe.step), workspace.storage
    found = workspace.read_model(f"{key}/{MANIFEST}", SamplesManifest)
    wanted = recipe.samples_fingerprint
    if found is None or found.samples_fingerprint != wanted or found.fingerprint() != wanted:
        return False
    size = storage.size(f"{key}/{GRID}")
    if size is None or size != found.pictures.get(GRID, size):
        return False
    if recipe.png and not (found.png and len(_singles(workspace, key)) == found.count):
        return False
    for name, file in found.files.items():
        if not is_plain(name) or storage.size(f"{key}/{name}") != file.size:
            return False
        if thorough and storage.checksum(f"{key}/{name}") != file.sha256:
            return False
    return True


def try_gather(config: Config, workspace: Workspace, recipe: Recipe) -> bool:
    """Write the manifest of a checkpoint's samples if all shards are finished.

    Otherwise prints which shards are missing and returns False. Raises UserError if another
    `ddpm sample` replaces shards at the same time.
    """
    if complete(workspace, recipe):
        return True
    shards = plan.shards(config.sample)
    missing = waiting(workspace, recipe, shards)
    if missing:
        say(f"sample: step {recipe.step} still waits for {missing}.")
        return False
    parts = ShardStore(workspace, recipe)
    try:
        made = _write_extras(config, workspace, recipe)
        files = {f"{shard.name}.npy": parts.listed(shard) for shard in shards}
    except (Corrupt, FileNotFoundError) as error:
        now = waiting(workspace, recipe, shards)
        raise UserError(
            f"The samples of step {recipe.step} were changed while they were gathered"
            f"{now and f': {now}'}. Another `ddpm sample` is running in this workspace: wait for "
            "it, then re-run this one."
        ) from error
    _write_manifest(workspace, recipe, files, made)
    records = [f"{shard.name}.json" for shard in shards]
    parts.tidy([*files, *records, *made, *([SINGLES] * recipe.png), MANIFEST])
    return True


def waiting(workspace: Workspace, recipe: Recipe, shards: list[Shard]) -> str:
    """Return the names of unfinished shards, with the reason unless they are just missing."""
    parts = ShardStore(workspace, recipe)
    found = [(shard.name, parts.problem(shard)) for shard in shards]
    unfinished = [
        name if problem == "missing" else f"{name} ({problem})"
        for name, problem in found
        if problem
    ]
    more = f" and {len(unfinished) - LISTED} others" if len(unfinished) > LISTED else ""
    return ", ".join(unfinished[:LISTED]) + more


def _write_extras(config: Config, workspace: Workspace, recipe: Recipe) -> dict[str, bytes]:
    """Write the grid, the labels of a class-conditional model, and single PNGs if requested.

    Returns the contents of grid and labels by name.
    """
    from ddpm_core.sampling.sampler import Conditions

    key = samples_key(recipe.step)
    first = np.stack(list(islice(_images(config, workspace, key), SHOWN)))
    made = {GRID: grid_png(first)}
    checkpoint = look_at_checkpoint(workspace, recipe.step)
    conditions = Conditions(
        checkpoint.network.conditioning, checkpoint.training_data, config.sample
    )
    labels = conditions.labels(range(config.sample.count))
    if labels is not None:
        made[LABELS] = npy(labels)
    for name, data in made.items():
        workspace.storage.write(f"{key}/{name}", data)
    if config.sample.png:
        _write_singles(config, workspace, key)
    return made


def _write_singles(config: Config, workspace: Workspace, key: str) -> None:
    """Write each image as png/NNNNNN.png, then remove other files there, of an earlier recipe.

    In this order, another worker that does the same never finds a file missing.
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
    """Yield all images (H, W, C) in order; each shard is downloaded when it is reached."""
    for shard in plan.shards(config.sample):
        yield from open_array(workspace.path(f"{key}/{shard.name}.npy"))


def _write_manifest(
    workspace: Workspace,
    recipe: Recipe,
    files: dict[str, FileRecord],
    made: dict[str, bytes],
) -> None:
    """Write the manifest with the sizes and checksums of this recipe's files.

    `files` and `made` come from this process, so a file that another recipe puts in their place
    does not match.
    """
    labels = {LABELS: record_of(made[LABELS])} if LABELS in made else {}
    manifest = SamplesManifest(
        **recipe.plain(),
        shards=list(files),
        files={**files, **labels},
        pictures={GRID: len(made[GRID])},
    )
    workspace.write_json(f"{samples_key(recipe.step)}/{MANIFEST}", manifest.plain())
