"""The gate: decide which of several models is the champion.

Scores compare only if they are the same metric, measured with the same evidence. This module is
pure: champion.py reads and moves the alias on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddpm_core.scores import Row, differences
from ddpm_core.storage.workspace import fingerprint

# The checks that a champion must pass: check -> the verdict that fails it, and what that means.
FAULTS = {
    "memorisation": ("copies", "copies training images"),
    "collapse": ("collapsed", "draws the same images repeatedly"),
}


class Unfit(Exception):
    """The champion can never be measured with the present evidence, with the reason."""


@dataclass(frozen=True)
class Champion:
    """A version that has the alias, or is about to get it."""

    version: str
    rows: list[Row]  # its measurements, the newest first
    fault: str = ""  # the check that it failed after its promotion


@dataclass(frozen=True)
class Decision:
    """Whether the candidate gets the alias, and why."""

    promote: bool
    why: str
    rescored: Row | None = None  # a new measurement of the champion


def version_key(row: Row) -> dict[str, str]:
    """Return the tags that identify a version: its weights, and how they were measured."""
    return {
        "weights": row.evidence.weights,
        "score_name": str(row["score_name"]),
        "evidence_key": fingerprint(row.evidence.plain()),
    }


def verdicts(row: Row | Mapping[str, Any]) -> dict[str, str]:
    """Return the verdict of each check; `unknown` for a check that was not made."""
    return {check: str((row.get(check) or {}).get("verdict", "unknown")) for check in FAULTS}


def failed(found: Mapping[str, str]) -> str:
    """Return the first check that a model with these verdicts fails, or "" if it passes all."""
    return next((check for check in FAULTS if found.get(check) == FAULTS[check][0]), "")


def decide(candidate: Row, champion: Champion | None, rescore: Callable[[], Row]) -> Decision:
    """Compare the candidate's row with the champion's.

    If no row of the champion compares, `rescore` measures the champion as the candidate was
    measured, or raises Unfit. An unfit champion loses: no candidate could ever beat it otherwise.
    """
    if check := failed(verdicts(candidate)):
        return Decision(False, f"Not promoted: it {FAULTS[check][1]}, by the {check} check.")
    if champion is None:
        return Decision(True, "Promoted: there was no champion.")
    if champion.fault:
        fault = FAULTS[champion.fault][1]
        return Decision(True, f"Promoted: the champion, version {champion.version}, {fault}.")
    for row in champion.rows:
        if row and not differences(row, candidate):
            return compare(candidate, champion, row)
    changed = [", ".join(differences(row, candidate)) for row in champion.rows]
    note = f" (measured again, because it differs in {changed[0]})" if changed else ""
    try:
        row = rescore()
    except Unfit as unfit:
        return Decision(
            True,
            f"Promoted: the champion, version {champion.version}, cannot be measured with the "
            f"present evidence: {unfit}",
        )
    decision = compare(candidate, champion, row, note)
    return Decision(decision.promote, decision.why, row)


def compare(candidate: Row, champion: Champion, row: Row, note: str = "") -> Decision:
    """Promote the candidate if its score is lower than the champion's `row`."""
    better = float(candidate["score"]) < float(row["score"])
    relation = "is below" if better else "is not below"
    new, old = distinct(float(candidate["score"]), float(row["score"]))
    return Decision(
        better,
        f"{'Promoted' if better else 'Not promoted'}: {candidate['score_name']} "
        f"{new} {relation} the {old} of the champion, version {champion.version}{note}.",
    )


def distinct(first: float, second: float) -> tuple[str, str]:
    """Format two numbers with four digits, or with as many as distinguish them."""
    enough = (n for n in range(4, 18) if f"{first:.{n}g}" != f"{second:.{n}g}")
    digits = next(enough, 4)
    return f"{first:.{digits}g}", f"{second:.{digits}g}"


def best_of(candidate: Row, version: str, rivals: list[Champion]) -> str:
    """Return the version with the lowest score among the candidate and its comparable rivals.

    Of equal scores the oldest version wins, so that concurrent callers agree.
    """
    scores = {version: float(candidate["score"])}
    for rival in rivals:
        comparable = [row for row in rival.rows if row and not differences(row, candidate)]
        if comparable:
            scores.setdefault(rival.version, float(comparable[0]["score"]))
    return min(scores, key=lambda number: (scores[number], int(number)))
