"""Pictures that can't be used: the list of them, and when there are too many."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from ddpm_core.config import Prepare
from ddpm_core.data import names
from ddpm_core.data.sources import Listing, Rejection
from ddpm_core.errors import UserError

SHOWN = 20


def write_rejected(path: Path, rejected: Sequence[Rejection]) -> None:
    """Path and reason of each as CSV, UTF-8."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "reason"])
        writer.writerows([names.shown(item.name), names.shown(item.reason)] for item in rejected)


def in_order(rejected: Sequence[Rejection]) -> list[Rejection]:
    return sorted(rejected, key=lambda item: names.to_bytes(item.name))


def refuse_too_many(rejected: Sequence[Rejection], pictures: int, settings: Prepare) -> None:
    """Raises UserError with the list where more than `max_rejected` of the pictures fell out."""
    if len(rejected) <= settings.max_rejected * pictures:
        return
    lines = [f"  {names.shown(item.name)}: {item.reason}" for item in rejected[:SHOWN]]
    if len(rejected) > SHOWN:
        lines.append(f"  and {len(rejected) - SHOWN:,} more")
    raise UserError(
        f"{len(rejected):,} of {pictures:,} pictures in {settings.source} can't be used, more than "
        f"prepare.max_rejected ({settings.max_rejected:g}) allows. Mend or remove them, or raise "
        "it:\n" + "\n".join(lines)
    )


def refuse_nothing(listing: Listing, settings: Prepare) -> None:
    """Raises UserError where a source holds no picture at all, with what it does hold."""
    if listing.pictures:
        return
    found = [
        f"{count:,} {'.' + kind if kind else 'without extension'}"
        for kind, count in listing.ignored.most_common(5)
    ]
    refused = [f"{names.shown(item.name)}: {item.reason}" for item in listing.rejected[:5]]
    raise UserError(
        f"There are no pictures in {settings.source}."
        + (f" It holds files of other kinds: {', '.join(found)}." if found else "")
        + (f" Refused: {'; '.join(refused)}." if refused else "")
    )
