"""Which of several models is the champion: only the same score of the same evidence compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddpm_core.scores import Row, differences

# Why a network may not become the champion, whatever its score: check -> verdict, and in words.
FAULTS = {
    "memorisation": ("copies", "copies training images"),
    "collapse": ("collapsed", "draws the same images repeatedly"),
}


class Unfit(Exception):
    """Why the champion cannot be measured with the present evidence, ever."""


@dataclass(frozen=True)
class Champion:
    """A version that has the alias or is about to, with the rows it was measured by.

    The newest row is the first. `fault` is the check that it failed later, or empty.
    """

    version: str
    rows: list[Row]
    fault: str = ""


@dataclass(frozen=True)
class Decision:
    """Whether the candidate takes the alias, why, and the champion's row if it is a new one."""

    promote: bool
    why: str
    rescored: Row | None = None


def verdicts(row: Row | Mapping[str, Any]) -> dict[str, str]:
    """Return the verdict of each check; `unknown` where a check was not made."""
    return {check: str((row.get(check) or {}).get("verdict", "unknown")) for check in FAULTS}


def failed(found: Mapping[str, str]) -> str:
    """Return the first check that a network with these verdicts fails; empty if it passes all."""
    return next((check for check in FAULTS if found.get(check) == FAULTS[check][0]), "")


def decide(candidate: Row, champion: Champion | None, rescore: Callable[[], Row]) -> Decision:
    """Compare the candidate's row with the champion's.

    Where no row of the champion compares, `rescore` measures it as the candidate was, or raises
    Unfit: then the candidate takes its place, since nothing could ever be better than what can't
    be measured.
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
            return compare(candidate, champion, row, "")
    changed = [", ".join(differences(r, candidate)) for r in champion.rows]
    told = f" (measured anew, as it differs in {changed[0]})" if changed else ""
    try:
        row = rescore()
    except Unfit as unfit:
        return Decision(
            True,
            f"Promoted: the champion, version {champion.version}, cannot be measured with the "
            f"present evidence: {unfit}",
        )
    decision = compare(candidate, champion, row, told)
    return Decision(decision.promote, decision.why, row)


def compare(candidate: Row, champion: Champion, row: Row, told: str) -> Decision:
    """By the score, of which the lower is the better; an equal one changes nothing."""
    better = float(candidate["score"]) < float(row["score"])
    relation = "is below" if better else "is not below"
    new, old = told_apart(float(candidate["score"]), float(row["score"]))
    return Decision(
        better,
        f"{'Promoted' if better else 'Not promoted'}: {candidate['score_name']} "
        f"{new} {relation} the {old} of the champion, version {champion.version}{told}.",
    )


def told_apart(one: float, other: float) -> tuple[str, str]:
    """Two numbers in four digits, or in as many as it takes to see that they differ."""
    enough = (n for n in range(4, 18) if f"{one:.{n}g}" != f"{other:.{n}g}")
    digits = next(enough, 4)
    return f"{one:.{digits}g}", f"{other:.{digits}g}"


def best_of(candidate: Row, version: str, rivals: list[Champion]) -> str:
    """The version with the lowest score, of the candidate's and of rivals that compare with it.

    Of equal ones it is the oldest, so that all who ask this of the same versions agree.
    """
    scores = {version: float(candidate["score"])}
    for rival in rivals:
        same = [row for row in rival.rows if row and not differences(row, candidate)]
        if same:
            scores.setdefault(rival.version, float(same[0]["score"]))
    return min(scores, key=lambda one: (scores[one], int(one)))
