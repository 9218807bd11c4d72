"""What the numbers say, in sentences: the first thing a person reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpm_core.evaluation.metrics import SMALL, count_label
from ddpm_core.evaluation.rows import METRICS, Row, best, is_scored, ranked

LEVEL = 0.05  # a smaller relative change of a score is called none
NEAR = 1.25  # times the floor, and still near it


@dataclass(frozen=True)
class Verdict:
    """A headline, and the three answers behind it; `memory` is good, caution, bad or unknown."""

    headline: str
    quality: str
    memorisation: str
    trend: str
    memory: str = "unknown"
    outlook: str = "unknown"


def judge(results: dict[str, Any]) -> Verdict:
    """The verdict on results.json."""
    rows = results["rows"]
    row = best(rows)
    if row is None:
        return Verdict("No checkpoint could be scored.", _problems(rows), "", "")
    count = len(ranked(rows))
    first = f"Step {row['step']:,} is "
    headline = first + (f"the best of {count} checkpoints" if count > 1 else "the one scored")
    memory, level = _memorisation(row.get("memorisation"))
    outlook, trend = _trend(ranked(rows), row)
    return Verdict(f"{headline}.", _quality(row), memory, trend, level, outlook)


def number(value: float) -> str:
    """Three or four digits, for people: 0.0123, 4.21, 175.2, 3,120."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def _problems(rows: list[Row]) -> str:
    return " ".join(f"Step {row['step']:,}: {row['problem']}" for row in rows if row["problem"])


def _quality(row: Row) -> str:
    score, name = number(row["score"]), row["score_name"]
    text = f"Its {name} is {score}, of {row['evidence']['count']:,} images"
    floor = (row.get("floor") or {}).get("fd")
    if floor is None or row["fd"] is None:
        return f"{text}. There are no held-out real images to say how low it could be."
    same, n = row["at_floor"]["fd"], row["floor_count"]
    text += "" if n == row["evidence"]["count"] else f", and {number(same)} of {n:,} images"
    ratio = same / floor if floor > 0 else float("inf")
    text += f". {n:,} real images that were held out of training get {number(floor)}: "
    if ratio <= NEAR:
        return text + "the samples are about as near to the training images as real ones."
    return text + f"the samples are {number(ratio)} times as far from the training images."


def _memorisation(facts: dict[str, Any] | None) -> tuple[str, str]:
    if facts is None:
        return "Memorisation was not looked at.", "unknown"
    if facts["verdict"] == "unknown":
        return "Memorisation is unknown: there are no held-out images to compare with.", "unknown"
    share = (
        f"{percent(facts['share_below'])} of {facts['count']:,} samples lie nearer to a training "
        "image than 99 % of held-out images do (1 % is what chance gives)"
    )
    if facts["verdict"] == "copies":
        return f"It copies training images: {share}.", "bad"
    if facts["verdict"] == "near":
        return (
            f"No copies, but its samples lie nearer to training images than held-out ones do: "
            f"{share}. That may be memory, or only blur.",
            "caution",
        )
    return f"No sign of memorised training images: {share}.", "good"


def _trend(rows: list[Row], row: Row) -> tuple[str, str]:
    """Whether training goes on to pay, in a word and in a sentence, by the ranked rows."""
    if len(rows) < 2:
        return "unknown", "One checkpoint says nothing of the trend."
    last = rows[-1]
    if row is last:
        before = min(rows[:-1], key=lambda r: float(r["score"]))
        gain = 1 - last["score"] / before["score"] if before["score"] > 0 else 0.0
        if gain > LEVEL:
            return "likely", (
                f"It still improves: the last checkpoint is {percent(gain)} better than any "
                "before it, so longer training should pay."
            )
        gained = percent(max(0.0, gain))
        return "little", f"It hardly improves any more: the last checkpoint gained {gained}."
    worse = last["score"] / row["score"] - 1 if row["score"] > 0 else 0.0
    if worse > LEVEL:
        return "no", f"It gets worse again: the last checkpoint is {percent(worse)} above the best."
    later = len(rows) - rows.index(row) - 1
    return "little", f"It no longer improves: {later} later checkpoints are no better."


def caveats(results: dict[str, Any]) -> list[str]:
    """What a reader must know before using the numbers."""
    row = best(results["rows"])
    if row is None:
        return []
    facts, extractor = row["evidence"], results["extractor"]
    notes = []
    if facts["count"] < SMALL:
        notes.append(
            f"A Fréchet distance of {facts['count']:,} images is too high, by an amount that "
            f"depends on their number: compare it only with distances of {facts['count']:,} "
            f"images. Published ones are of {count_label(10_000)} or {count_label(50_000)}."
        )
    notes += _on_features(extractor)
    if row["floor_count"] and row["floor_count"] < 100:
        notes.append(f"The floor is measured on only {row['floor_count']} held-out images.")
    others = [r for r in results["rows"] if is_scored(r) and r not in ranked(results["rows"])]
    if others:
        steps = ", ".join(f"{r['step']:,}" for r in others)
        notes.append(
            f"Step {steps}: measured with another number of images, sampler or extractor, so not "
            "ranked with the others."
        )
    absent = [name for name in ("fd", "kid_mean", "precision") if row.get(name) is None]
    if absent and set(absent) < set(METRICS):
        notes.append(f"Not measured: {', '.join(absent)}.")
    return notes


def _on_features(extractor: dict[str, Any]) -> list[str]:
    if extractor["space"] == "in_domain":
        task = "which way up an image is" if extractor["task"] == "rotations" else "the classes"
        accuracy = extractor["accuracy"]
        known = "" if accuracy is None else f" It tells {percent(accuracy)} of held-out ones right."
        notes = [
            f"The features are those of a small network that learned {task} of these images."
            f"{known} Its distances are not FID: they compare checkpoints and runs on the same "
            "data and extractor, and nothing else."
        ]
        if accuracy is not None and accuracy < 0.5:
            notes.append("That network is a weak one: trust small differences less.")
        return notes
    if extractor["space"]:
        return ["The Inception weights are not the standard file, so the distance is not FID."]
    return []
