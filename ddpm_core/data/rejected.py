"""Pictures that can't be used: the list of them, and when there are too many."""

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
SHOWN = 20
_HEAD = ["path", "reason"]


class Unusable(UserError):
    """Pictures of which too many fell out, or all."""

    def __init__(self, sentence: str, rejected: Sequence[Rejection], listed: str = "") -> None:
        """`listed` is where the whole list lies, if it does anywhere."""
        self.sentence, self.rejected = sentence, rejected
        lines = [f"  {one_line(f'{item.name}: {item.reason}')}" for item in rejected[:SHOWN]]
        if len(rejected) > SHOWN:
            lines.append(f"  and {len(rejected) - SHOWN:,} more")
        where = f"; all are listed in {listed}" if listed else ""
        super().__init__(f"{sentence}{where}:\n" + "\n".join(lines))


def table(rejected: Sequence[Rejection]) -> bytes:
    """Path and reason of each as CSV, UTF-8, a line each."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(_HEAD)
    writer.writerows([one_line(item.name), one_line(item.reason)] for item in rejected)
    return text.getvalue().encode()


def in_order(rejected: Sequence[Rejection]) -> list[Rejection]:
    return sorted(rejected, key=lambda item: to_bytes(item.name))


@contextmanager
def kept_list(workspace: Workspace) -> Iterator[None]:
    """Keep the whole list of an Unusable in the workspace, as data/ stays what it was before.

    The list of an earlier one goes where all goes well.
    """
    try:
        yield
    except Unusable as error:
        listed = _keep(workspace, table(error.rejected))
        raise Unusable(error.sentence, error.rejected, listed) from None
    _keep(workspace, None)


def _keep(workspace: Workspace, content: bytes | None) -> str:
    """Write the list, or remove an earlier one; where it lies now. A full disk leaves it nowhere.

    The workspace may be a folder in which a user keeps a file of that name: it stays.
    """
    storage, head = workspace.storage, ",".join(_HEAD).encode() + b"\r\n"
    with suppress(OSError, UserError):
        there = storage.exists(REJECTED)
        if there and not storage.read(REJECTED).startswith(head):
            return ""
        if content is not None:
            storage.write(REJECTED, content)
            return workspace.shown(REJECTED)
        if there:
            storage.remove(REJECTED)
    return ""


def refuse_too_many(rejected: Sequence[Rejection], pictures: int, settings: Prepare) -> None:
    """Raises Unusable where more than `max_rejected` of the pictures fell out."""
    if len(rejected) > settings.max_rejected * pictures:
        raise Unusable(
            f"{len(rejected):,} of {pictures:,} pictures in {settings.source} can't be used, more "
            f"than prepare.max_rejected ({settings.max_rejected:g}) allows. Mend or remove them, "
            "or raise it",
            rejected,
        )


def refuse_nothing(listing: Listing, settings: Prepare) -> None:
    """Raises UserError where a source holds no picture at all, with what it does hold."""
    if listing.pictures:
        return
    found = [
        f"{count:,} {'.' + kind if kind else 'without extension'}"
        for kind, count in listing.ignored.most_common(5)
    ]
    hidden = sorted(listing.hidden)[:5]
    refused = [f"{item.name}: {item.reason}" for item in listing.rejected[:5]]
    raise UserError(
        f"There are no pictures in {settings.source}."
        + (f" It holds files of other kinds: {one_line(', '.join(found))}." if found else "")
        + (f" Hidden files are passed over: {one_line(', '.join(hidden))}." if hidden else "")
        + (f" Refused: {one_line('; '.join(refused))}." if refused else "")
        + "".join(f" {one_line(note)}" for note in listing.notes[:5])
    )
