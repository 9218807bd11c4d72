"""The verb prepare: from pictures of any kind to packed arrays in the workspace."""

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
from ddpm_core.data.arrays import Scratch
from ddpm_core.data.captions import captions, written
from ddpm_core.data.dataset import bound
from ddpm_core.data.freshness import stale
from ddpm_core.data.layout import Layout, arrange, select
from ddpm_core.data.names import one_line
from ddpm_core.data.pack import Pictures, pack
from ddpm_core.data.place import refuse_own_places, written_places
from ddpm_core.data.pool import chunked, spread, workers_for
from ddpm_core.data.rejected import (
    REJECTED,
    Unusable,
    in_order,
    kept_list,
    refuse_nothing,
    refuse_too_many,
    table,
)
from ddpm_core.data.sources.base import Entry, Listing, Rejection, Source
from ddpm_core.data.sources.cifar import recognise
from ddpm_core.data.sources.open import open_source
from ddpm_core.data.split import untrainable
from ddpm_core.data.square import Square, squares
from ddpm_core.errors import UserError
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.lease import hold
from ddpm_core.storage.staging import FULL
from ddpm_core.storage.workspace import DATA, Workspace
from ddpm_core.text import counted, masked, throughout

__all__ = ["prepare", "stale"]

_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


def prepare(config: Config, workspace: Workspace) -> dict[str, Any]:
    """Make data/ from prepare.source, unless it is up to date; its manifest.

    Raises UserError where the source can't be read, too much of it is unusable or the disk is
    full, or somebody else prepares or trains here; what was prepared before then stays as it was.
    """
    settings = config.prepare
    reason = stale(config, workspace)
    if reason is None:
        console.say(f"The data in {workspace.uri} are up to date.")
        return workspace.read_json(f"{DATA}/{MANIFEST}")
    refuse_own_places(settings.source, workspace)
    console.say(f"Preparing {settings.source}: {reason}.")
    facts: dict[str, Any] = {"prepare": config.record()["prepare"]}
    # What was fetched goes after the lease: whoever waited for the data may train by then.
    with _told_unwritable(workspace), kept_list(workspace), ExitStack() as later, hold(workspace):
        source = open_source(
            settings, workspace.storage.scratch(), written_places(config, workspace)
        )
        opened = later.enter_context(source)
        with workspace.storage.new_folder(DATA, facts) as folder:
            notes = _fill(folder, facts, opened, config)
    for note in notes:
        console.warn(one_line(note))
    console.say(_summary(facts))
    return workspace.read_json(f"{DATA}/{MANIFEST}")


def _fill(folder: Path, facts: dict[str, Any], opened: Source, config: Config) -> list[str]:
    """Write everything into the folder that becomes data/; the sentences to tell at the end."""
    settings, size = config.prepare, config.prepare.image_size
    source, listing = recognise(opened)
    refuse_nothing(listing, settings)
    layout = arrange(listing)
    if settings.classes is not None:
        _choose(listing, layout, settings.classes)
    _refuse_untrainable(layout.held_out, [], settings)
    found = written(listing, settings.caption_column, layout.notes)
    texts = captions(found, layout.classes, settings.caption, layout.notes)
    channels = 1 if settings.channels == 1 else 3
    with closing(Scratch(folder, (size, size, channels))) as scratch:
        decoded = _decode(source, listing.pictures, settings, scratch)
        rejected = in_order([*listing.rejected, *decoded.rejected])
        (folder / REJECTED).write_bytes(table(rejected))
        refuse_too_many(rejected, len(listing.pictures) + len(listing.rejected), settings)
        pictures = _usable(layout, texts, decoded)
        _refuse_untrainable(pictures.held_out, rejected, settings)
        if settings.channels == "auto" and pictures.gray:
            channels = 1
        told, notes = pack(folder, scratch, pictures, settings.holdout, channels)
    facts.update(
        told,
        bound=bound(told),
        source=throughout(masked, source.facts),
        rejected=len(rejected),
        ignored=dict(listing.ignored),
    )
    return [*layout.notes, *_lost_classes(layout, pictures), *notes, *_few(facts, config)]


def _choose(listing: Listing, layout: Layout, wanted: Sequence[str]) -> None:
    """Keep the pictures of some classes alone, and what was wrong with theirs."""
    known = sorted({name for name in layout.classes if name is not None})
    missing = [name for name in wanted if name not in known]
    if missing:
        raise UserError(
            f"prepare.classes: {', '.join(missing)} given; the source has "
            f"{one_line(', '.join(known)) or 'no classes'}."
        )
    rows = [row for row, name in enumerate(layout.classes) if name in wanted]
    select(listing, layout, rows)
    asked = {None, *wanted}
    class_of = layout.meaning.class_of
    listing.rejected = [item for item in listing.rejected if class_of(item.name) in asked]


@dataclass(slots=True)
class Decoded:
    """What became of the pictures of a listing: a digest each, empty for the rejected."""

    digests: list[bytes]
    gray: bool
    rejected: list[Rejection]


def _decode(
    source: Source, pictures: Sequence[Entry], settings: Prepare, scratch: Scratch
) -> Decoded:
    """Decode every picture into its place in the scratch, on as many processes as it deserves."""
    background = ImageColor.getrgb(settings.background)[:3]
    rule = Square(settings.image_size, settings.resize, background, scratch.shape[2])
    decoded = Decoded([b""] * len(pictures), True, [])
    workers = workers_for(pictures, settings.workers)
    chunks = chunked(source.read(pictures), scratch.row_bytes)
    with console.progress("prepare", len(pictures), "images") as advance:
        for done in spread(squares, (rule,), chunks, workers):
            for row, position in enumerate(done.positions):
                if done.reasons[row]:
                    name = pictures[position].name
                    decoded.rejected.append(Rejection(name, done.reasons[row]))
                    continue
                scratch.write(position, done.pixels[row])
                decoded.digests[position] = done.digests[row]
                decoded.gray &= done.gray[row]
            advance(len(done.positions))
    return decoded


def _usable(layout: Layout, texts: list[str] | None, decoded: Decoded) -> Pictures:
    rows = [row for row, digest in enumerate(decoded.digests) if digest]
    return Pictures(
        positions=np.array(rows, dtype=np.int64),
        digests=[decoded.digests[row] for row in rows],
        classes=[layout.classes[row] for row in rows],
        held_out=[layout.held_out[row] for row in rows],
        captions=[texts[row] for row in rows] if texts else None,
        gray=decoded.gray,
    )


def _refuse_untrainable(
    held_out: Sequence[bool | None], rejected: Sequence[Rejection], settings: Prepare
) -> None:
    reason = untrainable(held_out)
    if reason:
        sentence = f"There is nothing to train on in {settings.source}: {reason}"
        raise Unusable(sentence, rejected) if rejected else UserError(f"{sentence}.")


def _lost_classes(layout: Layout, pictures: Pictures) -> list[str]:
    lost = sorted(str(name) for name in set(layout.classes) - set(pictures.classes))
    return [f"No picture of the class {name} can be used: it is left out." for name in lost]


def _few(facts: dict[str, Any], config: Config) -> list[str]:
    count, batch = facts["count"], config.train.batch_size
    if count >= batch:
        return []
    return [
        f"There are {count:,} pictures for training, fewer than train.batch_size, {batch}: each "
        "batch will hold some of them more than once."
    ]


def _summary(facts: dict[str, Any]) -> str:
    size, kind = facts["image_size"], "gray" if facts["channels"] == 1 else "RGB"
    return (
        f"{counted(facts['count'], 'picture')} for training and "
        f"{facts['holdout_count']:,} held out, "
        f"{size} x {size} {kind}, {counted(len(facts['classes']), 'class')}, "
        f"{facts['rejected']:,} rejected; "
        f"fingerprint {facts['fingerprint']}."
    )


@contextmanager
def _told_unwritable(workspace: Workspace) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FORBIDDEN:
            place = f" ({error.filename})" if error.filename else ""
            raise UserError(
                f"The prepared data can't be written to {workspace.uri}: {error.strerror}{place}. "
                "Give a workspace that you may write to, with -w."
            ) from error
        if error.errno not in FULL:
            raise
        raise UserError(
            f"There is no room left for the prepared data in {workspace.uri} ({error.strerror}); "
            "what was prepared before is still whole. Free some space and run prepare again."
        ) from error
