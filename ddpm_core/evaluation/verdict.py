"""What the numbers say, in sentences: the first thing a person reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpm_core.evaluation.memorisation import expected_below
from ddpm_core.scores import Row, best, is_scored, ranked
from ddpm_core.text import counted

LEVEL = 0.05  # a smaller relative change of a score is called none
EARLIER = 0.75  # of the last step: what comes later shows whether training still pays
NEAR = 1.25  # times the floor, and still near it


@dataclass(frozen=True)
class Answer:
    """An answer in a word, in a clause for the summary, and in sentences with its numbers."""

    word: str
    summary: str
    detail: str
    level: str = ""  # good, caution, bad or unknown: how it is coloured


@dataclass(frozen=True)
class Verdict:
    """A headline, a summary of the answers, and the answers."""

    headline: str
    summary: str
    quality: Answer | None = None
    diversity: Answer | None = None
    memorisation: Answer | None = None
    trend: Answer | None = None


def judge(results: dict[str, Any]) -> Verdict:
    """The verdict on results.json."""
    rows, listed, others = sort_rows(results)
    row = best(listed)
    if row is None:
        return Verdict("No checkpoint could be scored.", _problems(rows))
    headline = f"Step {row['step']:,} is "
    if listed[1:]:
        headline += f"the best of {len(listed)} checkpoints"
    else:
        headline += "compared with no other checkpoint" if others else "the one checkpoint scored"
    quality, trend = _quality(row), _trend(listed, row)
    variety, memory = diversity(row.get("collapse")), _memorisation(row.get("memorisation"))
    faults = ["it has collapsed: its samples repeat one another"] * (variety.level == "bad")
    faults += ["it copies training images"] * (memory.level == "bad")
    headline += f", but {', and '.join(faults)}" if faults else ""
    answers = (variety, quality, memory, trend)
    summary = " ".join(answer.summary for answer in answers if answer.summary)
    return Verdict(f"{headline}.", summary, quality, variety, memory, trend)


def sort_rows(results: dict[str, Any]) -> tuple[list[Row], list[Row], list[Row]]:
    """All rows; those in the ranking; and those that have a score but don't compare with them."""
    rows = results["rows"]
    listed = ranked(rows, results.get("sample", {}))
    return rows, listed, [r for r in rows if is_scored(r) and r not in listed]


def number(value: float) -> str:
    """Three or four digits, for people: 0.0123, 4.21, 175.2, 3,120."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """With a space that does not break: 1.2 %, 37 %."""
    digits = f"{100 * share:.2g}" if share < 0.1 else f"{100 * share:.0f}"
    return f"{digits}\N{NO-BREAK SPACE}%"


def _problems(rows: list[Row]) -> str:
    return " ".join(f"Step {row['step']:,}: {row['problem']}" for row in rows if row["problem"])


def _quality(row: Row) -> Answer:
    score = number(row["score"])
    floor = (row.get("floor") or {}).get("fd")
    if floor is None or row["fd"] is None:
        detail = "There are no held-out real images to say how low it could be."
        if row.get("floor") is not None:
            detail = "The Fréchet distance, which would say how low it could be, was not measured."
        return Answer(
            score, "How low its score could be is not known.", f"Lower is better. {detail}"
        )
    same, n = row["at_floor"]["fd"], row["floor_count"]
    detail = (
        f"At {n:,} images each, samples lie {number(same)} from the training images, and real "
        f"images that were held out lie {number(floor)} from them. Lower is better."
    )
    ratio = same / floor if floor > 0 else float("inf")
    if ratio <= NEAR:
        return Answer(score, "Its samples are about as near to the data as real images.", detail)
    far = f"Its samples are {number(ratio)} times as far from the data as real images are."
    return Answer(score, far, detail)


def diversity(facts: dict[str, Any] | None) -> Answer:
    """Answer whether samples repeat one another more than real images do."""
    if facts is None:
        return Answer("unknown", "", "Repeats among the samples were not looked at.", "unknown")
    if facts["verdict"] == "unknown":
        detail = "There are too few real images of their kind to tell whether samples repeat."
        return Answer("unknown", "", detail, "unknown")
    count, share = facts["count"], percent(facts["repeats"] / facts["count"])
    real = percent(facts["real_repeats"] / count)
    detail = f"{share} of {count:,} samples are nearly the same as another one"
    if facts["exact"]:
        detail += f", {facts['exact']:,} of them exactly"
    detail += f"; of as many real images {real} are."
    if facts["verdict"] == "collapsed":
        summary = f"Do not use it: {share} of its samples are nearly the same as another one."
        return Answer("collapsed", summary, detail, "bad")
    if facts["verdict"] == "repeats":
        summary = f"{share} of its samples are nearly the same as another one."
        return Answer("repeats", summary, detail, "caution")
    return Answer("no sign of collapse", "", detail, "good")


def _memorisation(facts: dict[str, Any] | None) -> Answer:
    if facts is None:
        return Answer("unknown", "", "Memorisation was not looked at.", "unknown")
    if facts["verdict"] == "unknown":
        return _unknown(facts)
    count, copies = facts["count"], facts["copies"] / facts["count"]
    chance = facts.get("expected_below") or expected_below(facts["holdout_count"])
    share = (
        f"{percent(facts['share_below'])} of {count:,} samples lie nearer to a training image "
        f"than {percent(0.99)} of held-out images do; {percent(chance)} is what chance gives."
    )
    if facts["verdict"] == "copies":
        real = percent(facts["holdout_copies"] / facts["holdout_count"])
        same = facts.get("verbatim")
        verbatim = f", {same:,} of them the same but for noise" if same else ""
        detail = (
            f"{percent(copies)} of {count:,} samples are nearly the same as a training image"
            f"{verbatim}; of held-out images {real} are."
        )
        return Answer("copies", "Some are copies of training images.", detail, "bad")
    if facts["verdict"] == "near":
        detail = (
            f"No copies beyond chance, but {share} That may be memory, or smoothness alone: see "
            "the pairs."
        )
        summary = "They are no copies, but lie suspiciously near to training images."
        return Answer("suspicious", summary, detail, "caution")
    return Answer("no sign", "There is no sign of memorised images.", share, "good")


def _unknown(facts: dict[str, Any]) -> Answer:
    """Without held-out images that training has not; copies to the pixel are told all the same."""
    held = "that are not training images too " if facts.get("holdout_exact") else ""
    detail = f"There are no held-out images {held}to compare with."
    exact = facts.get("exact")
    if not exact:
        return Answer("unknown", "Whether it memorises is not known.", detail, "unknown")
    detail += f" {exact:,} of {facts['count']:,} samples are the same as a training image."
    summary = "Whether it memorises is not known, but some samples are training images."
    return Answer("unknown", summary, detail, "caution")


def _trend(rows: list[Row], row: Row) -> Answer:
    """Whether longer training pays, by the ranked rows and the best of them.

    What the last quarter of the training has brought counts: of dense checkpoints each is as good
    as its neighbours, but for noise, also where the curve still falls.
    """
    if len(rows) < 2:
        return Answer("unknown", "", "One checkpoint says nothing of the trend.")
    later = [r for r in rows if r["step"] > row["step"]]
    worse = _lowest(later)["score"] / row["score"] - 1 if later and row["score"] > 0 else 0.0
    if worse > LEVEL:
        them = f"The {len(later)} checkpoints after it are at least"
        detail = f"{them if later[1:] else 'The last checkpoint is'} {percent(worse)} worse."
        return Answer("no", "After it the score gets worse.", detail)
    before = [r for r in rows if r["step"] <= EARLIER * rows[-1]["step"]]
    if row in before:
        detail = f"Of the {counted(len(later), 'checkpoint')} after it none is better."
        return Answer("little", "It no longer improves.", detail)
    old = _lowest(before or rows[:1])
    gain = 1 - row["score"] / old["score"] if old["score"] > 0 else 0.0
    than = f"{percent(gain)} better than step {old['step']:,}"
    than += ", the best of the first three quarters." if before else ", the first one scored."
    if gain > LEVEL:
        detail = f"Step {row['step']:,} is {than}"
        return Answer("likely", "It still improves, so longer training should pay.", detail)
    if not before:
        detail = "All checkpoints scored are of the last quarter of the training, and much alike."
        return Answer("unknown", "", detail)
    return Answer("little", "It hardly improves any more.", f"Step {row['step']:,} is only {than}")


def _lowest(rows: list[Row]) -> Row:
    return min(rows, key=lambda r: float(r["score"]))
