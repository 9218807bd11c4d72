"""The verb check-data: what a folder of pictures holds, what is wrong with it, what to do."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core import console
from ddpm_core.config import Config, Prepare
from ddpm_core.data import names
from ddpm_core.data.captions import captions, written
from ddpm_core.data.examine import Examined, examine
from ddpm_core.data.findings import SIDES, DataReport, class_totals, lines
from ddpm_core.data.layout import Layout, arrange
from ddpm_core.data.pool import chunked, spread, workers_for
from ddpm_core.data.rejected import in_order, refuse_nothing
from ddpm_core.data.sources.base import Entry, Listing, Rejection, Source
from ddpm_core.data.sources.cifar import recognise
from ddpm_core.data.sources.download import KNOWN
from ddpm_core.data.sources.open import open_source
from ddpm_core.data.split import untrainable
from ddpm_core.errors import UserError

IMBALANCE = 3.0  # of the largest class to the smallest, from where on it is told


def check_data(source: str | Path, settings: Prepare | None = None) -> DataReport:
    """Look at every image of a source, print what there is to stdout, and return it.

    Takes all that prepare.source takes, and reads it by the other `settings`. Raises UserError
    where there is nothing to look at.
    """
    # A path is one, also that of a folder that is called digits.
    source = source if isinstance(source, str) else str(source.absolute())
    settings = (settings or Prepare()).model_copy(update={"source": source})
    # A known archive is looked for where prepare puts it; nothing is written there.
    kept = Path(Config().workspace) if source in KNOWN else None
    with (
        tempfile.TemporaryDirectory(prefix="ddpm-check-data-") as place,
        open_source(settings, kept or Path(place)) as opened,
    ):
        pictures, listing = recognise(opened)
        refuse_nothing(listing, settings)
        layout = arrange(listing)
        texts = _captions(listing, layout, settings)
        examined = _examine_all(pictures, listing.pictures)
    report = summarise(source, listing, layout, examined)
    given = settings.model_dump(mode="json", exclude_defaults=True)
    report.suggested["prepare"] = given | report.suggested["prepare"]
    if report.count and all(texts[item.position] for item in examined if not item.reason):
        report.suggested["model"]["conditioning"] = "text"
    print(console.printable("\n".join(lines(report))))
    return report


def _captions(listing: Listing, layout: Layout, settings: Prepare) -> list[str | None]:
    """Return the written caption of each image, and note what prepare would say of captions."""
    try:
        texts = written(listing, settings.caption_column, layout.notes)
    except UserError as error:
        layout.notes.append(f"prepare stops: {error}")
        return [None] * len(listing.pictures)
    captions(texts, layout.classes, settings.caption, layout.notes)
    return texts


def _examine_all(source: Source, entries: Sequence[Entry]) -> list[Examined]:
    found: list[Examined] = []
    count = workers_for(entries, "auto")
    with console.progress("check", len(entries), "images") as advance:
        for done in spread(examine, (), chunked(source.read(entries), 0), count):
            found += done
            advance(len(done))
    return sorted(found, key=lambda item: item.position)


def summarise(
    source: str, listing: Listing, layout: Layout, examined: Sequence[Examined]
) -> DataReport:
    """Counts, sizes, copies and advice from what is known of each picture."""
    report = DataReport(source, notes=list(layout.notes))
    used = [item for item in examined if not item.reason]
    report.count = len(used)
    report.rejected = in_order(
        listing.rejected
        + [Rejection(listing.pictures[i.position].name, i.reason) for i in examined if i.reason]
    )
    if used:
        _measure(report, np.array([(item.width, item.height) for item in used]))
    report.stored = dict(Counter(item.stored for item in used).most_common())
    report.splits = _by_split(layout, used)
    report.copies = _copies(listing, used)
    reason = untrainable([layout.held_out[item.position] for item in used])
    report.notes += [f"prepare stops: {reason}."] if reason else []
    report.notes += _advice(report, listing)
    report.suggested = suggest(report)
    return report


def _measure(report: DataReport, sizes: NDArray[np.int64]) -> None:
    sides = sizes.min(axis=1)
    bins = Counter(max((s for s in SIDES if s <= side), default=0) for side in sides.tolist())
    report.sides = dict(sorted(bins.items()))
    order = np.argsort(sizes.prod(axis=1), kind="stable")
    report.smallest = (int(sizes[order[0], 0]), int(sizes[order[0], 1]))
    report.largest = (int(sizes[order[-1], 0]), int(sizes[order[-1], 1]))
    report.median_side = int(np.median(sides))
    report.far_from_square = int((sizes.max(axis=1) > 2 * sides).sum())


def _by_split(layout: Layout, used: Sequence[Examined]) -> dict[str, dict[str, int]]:
    label = {False: "train", True: "holdout", None: "undecided"}
    splits: dict[str, Counter[str]] = {}
    for item in used:
        split = label[layout.held_out[item.position]]
        splits.setdefault(split, Counter())[layout.classes[item.position] or ""] += 1
    return {
        split: dict(sorted(splits[split].items())) for split in label.values() if split in splits
    }


def _copies(listing: Listing, used: Sequence[Examined]) -> list[list[str]]:
    groups: dict[bytes, list[str]] = {}
    for item in used:
        groups.setdefault(item.digest, []).append(names.shown(listing.pictures[item.position].name))
    return [group for group in groups.values() if len(group) > 1]


def _advice(report: DataReport, listing: Listing) -> list[str]:
    advice = []
    per_class = class_totals(report)
    if len(per_class) > 1 and max(per_class.values()) > IMBALANCE * min(per_class.values()):
        most, least = (
            max(per_class, key=per_class.__getitem__),
            min(per_class, key=per_class.__getitem__),
        )
        advice.append(
            f"Unbalanced: {per_class[most]:,} pictures of {most}, {per_class[least]:,} of {least}."
        )
    share = len(report.rejected) / max(1, report.count + len(report.rejected))
    if share > Prepare().max_rejected:
        advice.append(
            f"{share:.1%} of the pictures are unusable: prepare stops above "
            f"prepare.max_rejected, {Prepare().max_rejected:g}."
        )
    if report.far_from_square > report.count / 10:
        advice.append(
            f"{report.far_from_square:,} pictures are more than twice as long as wide: "
            "prepare.resize=crop loses half of them or more, pad keeps all."
        )
    if listing.ignored:
        kinds = ", ".join(f"{n:,} .{kind}" for kind, n in listing.ignored.most_common(5))
        advice.append(f"Files that are no pictures are passed over: {kinds}.")
    return advice


def suggest(report: DataReport) -> dict[str, Any]:
    """Params to start from: an image size that most pictures have, and a network that fits it."""
    fitting = [s for s in (16, 32, 64) if report.median_side >= s]
    size = fitting[-1] if fitting else 16
    network = {16: [1, 2, 2], 32: [1, 2, 2, 2], 64: [1, 2, 3, 4]}[size]
    several = len(class_totals(report)) > 1
    return {
        "prepare": {"source": report.source, "image_size": size},
        "model": {
            "channels": 32 if size == 16 else 64,
            "multipliers": network,
            "attention": [8 if size == 16 else 16],
            "conditioning": "class" if several else "none",
        },
        "train": {"batch_size": max(1, min(64, report.count // 4))},
    }
