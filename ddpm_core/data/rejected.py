"""Images that cannot be used: the list of them, and the errors if there are too many."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ddpm_core.config import Prepare
from ddpm_core.data.names import one_line, to_bytes
from ddpm_core.data.sources.base import Listing, Rejection
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace

REJECTED = "rejected.csv"
SHOWN = 20  # rejections in a message; the file lists all
_HEADER = ["path", "reason"]


class UnusableSource(UserError):
    """Too many images of a source are rejected, or all."""

    def __init__(self, summary: str, rejected: Sequence[Rejection], listed_in: str = "") -> None:
        """`summary` has no full stop; `listed_in` is the file with all rejections, if any."""
        self.summary, self.rejected = summary, rejected
        lines = [f"  {one_line(f'{item.name}: {item.reason}')}" for item in rejected[:SHOWN]]
        if len(rejected) > SHOWN:
            lines.append(f"  and {len(rejected) - SHOWN:,} more")
        where = f"; all are listed in {listed_in}" if listed_in else ""
        super().__init__(f"{summary}{where}:\n" + "\n".join(lines))


def to_csv(rejected: Sequence[Rejection]) -> bytes:
    """Return path and reason of each rejection as CSV in UTF-8, one line each."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(_HEADER)
    writer.writerows([one_line(item.name), one_line(item.reason)] for item in rejected)
    return text.getvalue().encode()


def sorted_by_name(rejected: Sequence[Rejection]) -> list[Rejection]:
    """Return rejections in the order of their names' bytes."""
    return sorted(rejected, key=lambda item: to_bytes(item.name))


@contextmanager
def rejected_list(workspace: Workspace) -> Iterator[None]:
    """On UnusableSource, write rejected.csv into the workspace and add its path to the error.

    After a success, remove the list of an earlier failure: data/ contains the current one.
    """
    try:
        yield
    except UnusableSource as error:
        path = _replace_list(workspace, to_csv(error.rejected))
        raise UnusableSource(error.summary, error.rejected, path) from None
    _replace_list(workspace, None)


def _replace_list(workspace: Workspace, content: bytes | None) -> str:
    """Write the list, or remove it if `content` is None. Return its path if it was written.

    Does nothing if a file of the user has that name, or if the disk is full.
    """
    storage, start = workspace.storage, ",".join(_HEADER).encode() + b"\r\n"
    with suppress(OSError, UserError):
        exists = storage.exists(REJECTED)
        if exists and not storage.read(REJECTED).startswith(start):
            return ""
        if content is not None:
            storage.write(REJECTED, content)
            return workspace.shown(REJECTED)
        if exists:
            storage.remove(REJECTED)
    return ""


def check_rejected_share(rejected: Sequence[Rejection], images: int, settings: Prepare) -> None:
    """Raise UnusableSource if more than `settings.max_rejected` of the images are rejected."""
    if len(rejected) > settings.max_rejected * images:
        raise UnusableSource(
            f"{len(rejected):,} of {images:,} images in {settings.source} cannot be used, more "
            f"than prepare.max_rejected={settings.max_rejected:g} allows. Repair or remove them, "
            "or raise prepare.max_rejected",
            rejected,
        )


def require_images(listing: Listing, settings: Prepare) -> None:
    """Raise UserError if a source contains no images. The message says what it contains."""
    if listing.images:
        return
    other = [
        f"{count:,} {'.' + kind if kind else 'without extension'}"
        for kind, count in listing.ignored.most_common(5)
    ]
    hidden = sorted(listing.hidden)[:5]
    rejected = [f"{item.name}: {item.reason}" for item in listing.rejected[:5]]
    raise UserError(
        f"{settings.source} contains no images."
        + (f" It contains other files: {one_line(', '.join(other))}." if other else "")
        + (f" Hidden files are ignored: {one_line(', '.join(hidden))}." if hidden else "")
        + (f" Rejected: {one_line('; '.join(rejected))}." if rejected else "")
        + "".join(f" {one_line(note)}" for note in listing.notes[:5])
    )
