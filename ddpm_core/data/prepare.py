"""The verb prepare: from images of any kind to packed arrays in the workspace."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ImageColor

from ddpm_core import console
from ddpm_core.config import Config, Prepare
from ddpm_core.data.captions import add_class_captions, read_captions
from ddpm_core.data.dataset import checksum_of_facts, missing_file, read_manifest
from ddpm_core.data.decode import SquareRule
from ddpm_core.data.layout import Layout, find_layout, select
from ddpm_core.data.names import one_line
from ddpm_core.data.overlap import refuse_overlap, run_outputs
from ddpm_core.data.pack import Scratch, UsableImages, pack
from ddpm_core.data.rejected import (
    REJECTED,
    UnusableSource,
    check_rejected_share,
    rejected_list,
    require_images,
    sorted_by_name,
    to_csv,
)
from ddpm_core.data.sources.base import Entry, Listing, Rejection, Source
from ddpm_core.data.sources.open import has_changed, open_source, recognise
from ddpm_core.data.split import untrainable
from ddpm_core.data.workers import chunked, make_squares, map_chunks, workers_for
from ddpm_core.errors import UserError
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.lease import hold
from ddpm_core.storage.staging import FULL
from ddpm_core.storage.workspace import DATA, Workspace
from ddpm_core.text import counted, masked, throughout

_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
# Settings that do not change the result.
_IRRELEVANT = ("workers", "max_rejected", "download", "anonymous")


def prepare(config: Config, workspace: Workspace) -> dict[str, Any]:
    """Make data/ from prepare.source unless it is up to date, and return its manifest.

    Raises:
        UserError: the source cannot be read, too many of its images are unusable, the disk is
            full, or another process prepares or trains in this workspace. Data prepared earlier
            are not changed then.
    """
    settings = config.prepare
    reason = stale(config, workspace)
    if reason is None:
        console.say(f"The data in {workspace.uri} are up to date.")
        return workspace.read_json(f"{DATA}/{MANIFEST}")
    refuse_overlap(settings.source, workspace)
    console.say(f"Preparing {settings.source}: {reason}.")
    facts: dict[str, Any] = {"prepare": config.record()["prepare"]}
    # `downloads` closes after the lease is released, so that a process that waits for the data can
    # start to train while the downloads are deleted.
    with (
        _write_errors(workspace),
        rejected_list(workspace),
        ExitStack() as downloads,
        hold(workspace),
    ):
        opened = open_source(settings, workspace.storage.scratch(), run_outputs(config, workspace))
        source = downloads.enter_context(opened)
        with workspace.storage.new_folder(DATA, facts) as folder:
            notes = _write_data(folder, facts, source, config)
    for note in notes:
        console.warn(one_line(note))
    console.say(_summary(facts))
    return workspace.read_json(f"{DATA}/{MANIFEST}")


def stale(config: Config, workspace: Workspace) -> str | None:
    """Return why prepare must run, without a full stop, or None if the data are up to date.

    An unavailable source is no reason, because the data were made from it. A setting that did not
    exist when they were made counts as its default.
    """
    manifest = read_manifest(workspace)
    if manifest is None or manifest.prepare is None or manifest.source is None:
        return "there are no data yet"
    before = throughout(masked, {**Prepare().model_dump(mode="json"), **manifest.prepare})
    # The record is masked, so new credentials for the same source do not count as a change.
    for key, value in config.record()["prepare"].items():
        if key not in _IRRELEVANT and value != before[key]:
            return f"prepare.{key} is {value!r}, it was {before[key]!r}"
    if manifest.was_edited:
        return f"{DATA}/{MANIFEST} was edited after prepare wrote it"
    missing = missing_file(workspace, manifest)
    if missing:
        return missing.rstrip(".")
    if has_changed(config.prepare, manifest.source, run_outputs(config, workspace)):
        return "the source has changed since it was prepared"
    return None


def _write_data(folder: Path, facts: dict[str, Any], opened: Source, config: Config) -> list[str]:
    """Write the files of data/ into `folder` and its facts into `facts`; return messages."""
    settings, size = config.prepare, config.prepare.image_size
    source, listing = recognise(opened, settings)
    require_images(listing, settings)
    layout = find_layout(listing)
    if settings.classes is not None:
        _select_classes(listing, layout, settings.classes)
    # Decoding takes long, so find a source that cannot be trained on, or wrong captions, before.
    _refuse_untrainable(layout.held_out, [], settings)
    texts = read_captions(listing, settings.caption_column, layout.notes)
    captions = add_class_captions(texts, layout.classes, settings.caption, layout.notes)
    channels = 1 if settings.channels == 1 else 3
    # With channels: auto, squares are decoded as RGB and narrowed when all turn out to be gray.
    with closing(Scratch(folder, (size, size, channels))) as scratch:
        decoded = _decode(source, listing.images, settings, scratch)
        rejected = sorted_by_name([*listing.rejected, *decoded.rejected])
        (folder / REJECTED).write_bytes(to_csv(rejected))
        check_rejected_share(rejected, len(listing.images) + len(listing.rejected), settings)
        images = _usable(layout, captions, decoded)
        _refuse_untrainable(images.held_out, rejected, settings)
        if settings.channels == "auto" and images.gray:
            channels = 1
        packed, notes = pack(folder, scratch, images, settings.holdout, channels)
    facts.update(
        packed,
        bound=checksum_of_facts(packed),
        source=throughout(masked, source.facts),
        rejected=len(rejected),
        ignored=dict(listing.ignored),
    )
    return [*layout.notes, *_lost_classes(layout, images), *notes, *_small_data(facts, config)]


def _select_classes(listing: Listing, layout: Layout, classes: Sequence[str]) -> None:
    """Keep only the images of these classes, and only their rejections. Raises UserError."""
    known = sorted({name for name in layout.classes if name is not None})
    missing = [name for name in classes if name not in known]
    if missing:
        raise UserError(
            f"prepare.classes: got {', '.join(missing)}; the source has "
            f"{one_line(', '.join(known)) or 'no classes'}."
        )
    select(listing, layout, [row for row, name in enumerate(layout.classes) if name in classes])
    kept = {None, *classes}
    class_of = layout.rules.class_of
    listing.rejected = [item for item in listing.rejected if class_of(item.name) in kept]


@dataclass(slots=True)
class _Decoded:
    """The result of decoding a listing. `digests` has one for each image, empty if rejected."""

    digests: list[bytes]
    gray: bool
    rejected: list[Rejection]


def _decode(
    source: Source, images: Sequence[Entry], settings: Prepare, scratch: Scratch
) -> _Decoded:
    """Decode every image into its position in the scratch, in one or several processes."""
    background = ImageColor.getrgb(settings.background)[:3]
    rule = SquareRule(settings.image_size, settings.resize, background, scratch.shape[2])
    decoded = _Decoded([b""] * len(images), True, [])
    workers = workers_for(images, settings.workers)
    chunks = chunked(source.read(images), scratch.row_bytes)
    with console.progress("prepare", len(images), "images") as advance:
        for batch in map_chunks(make_squares, (rule,), chunks, workers):
            for row, position in enumerate(batch.positions):
                if batch.reasons[row]:
                    name = images[position].name
                    decoded.rejected.append(Rejection(name, batch.reasons[row]))
                    continue
                scratch.write(position, batch.pixels[row])
                decoded.digests[position] = batch.digests[row]
                decoded.gray &= batch.gray[row]
            advance(len(batch.positions))
    return decoded


def _usable(layout: Layout, captions: list[str] | None, decoded: _Decoded) -> UsableImages:
    """Return the images that were decoded, with their classes, splits and captions."""
    rows = [row for row, digest in enumerate(decoded.digests) if digest]
    return UsableImages(
        positions=np.array(rows, dtype=np.int64),
        digests=[decoded.digests[row] for row in rows],
        classes=[layout.classes[row] for row in rows],
        held_out=[layout.held_out[row] for row in rows],
        captions=[captions[row] for row in rows] if captions else None,
        gray=decoded.gray,
    )


def _refuse_untrainable(
    held_out: Sequence[bool | None], rejected: Sequence[Rejection], settings: Prepare
) -> None:
    """Raise UserError if no image is left for training."""
    reason = untrainable(held_out)
    if reason:
        message = f"No training images in {settings.source}: {reason}"
        raise UnusableSource(message, rejected) if rejected else UserError(f"{message}.")


def _lost_classes(layout: Layout, images: UsableImages) -> list[str]:
    """Return messages about classes without a usable image."""
    lost = sorted(str(name) for name in set(layout.classes) - set(images.classes))
    return [f"The class {name} has no usable images and is left out." for name in lost]


def _small_data(facts: dict[str, Any], config: Config) -> list[str]:
    """Return a message if a batch has more images than the training split."""
    count, batch = facts["count"], config.train.batch_size
    if count >= batch:
        return []
    return [
        f"{counted(count, 'training image')} for train.batch_size={batch}: each batch will contain "
        "some images several times."
    ]


def _summary(facts: dict[str, Any]) -> str:
    size, kind = facts["image_size"], "gray" if facts["channels"] == 1 else "RGB"
    return (
        f"{counted(facts['count'], 'training image')}, {facts['holdout_count']:,} held out, "
        f"{size} x {size} {kind}, {counted(len(facts['classes']), 'class')}, "
        f"{facts['rejected']:,} rejected; fingerprint {facts['fingerprint']}."
    )


@contextmanager
def _write_errors(workspace: Workspace) -> Iterator[None]:
    """Turn errors of writing into UserErrors: a full disk, or a missing permission."""
    try:
        yield
    except OSError as error:
        if error.errno in _FORBIDDEN:
            path = f" ({error.filename})" if error.filename else ""
            raise UserError(
                f"Cannot write the prepared data to {workspace.uri}: {error.strerror}{path}. Use a "
                "workspace that you can write to (-w)."
            ) from error
        if error.errno not in FULL:
            raise
        raise UserError(
            f"No space left for the prepared data in {workspace.uri} ({error.strerror}). Data "
            "prepared earlier are unchanged. Free some space.",
            run=("prepare",),
        ) from error
