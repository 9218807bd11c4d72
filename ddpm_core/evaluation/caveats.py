"""What a reader must know before using the numbers of an evaluation, in sentences."""

from __future__ import annotations

from typing import Any

from ddpm_core.evaluation.metrics import FEWEST_FOR_IS, SMALL
from ddpm_core.evaluation.rows import MEASURES, samples_of
from ddpm_core.evaluation.verdict import percent, sort_rows
from ddpm_core.scores import Row, best, is_scored
from ddpm_core.text import counted

LISTED = 10  # steps named in a sentence


def caveats(results: dict[str, Any]) -> list[str]:
    """The sentences on results.json; none where nothing has a score."""
    rows, listed, others = sort_rows(results)
    row = best(listed)
    if row is None:
        return []
    facts, extractor = row["evidence"], results["extractor"]
    notes = _unscored(rows)
    images = counted(facts["count"], "image")
    if facts["count"] < SMALL:
        notes.append(
            f"A Fréchet distance of {images} is too high, by an amount that "
            f"depends on their number: compare it only with distances of as many images. "
            f"Published ones are of 10,000 or 50,000."
        )
    notes += _on_features(extractor)
    if row["floor_count"] and row["floor_count"] < 100:
        notes.append(
            f"The floor is measured on only {counted(row['floor_count'], 'held-out image')}."
        )
    if row.get("kid_mean") is not None and row.get("kid_std") is None:
        notes.append(f"KID of {images} has no deviation: each of its subsets has them all.")
    notes += _on_counts(row, results)
    if others:
        steps = ", ".join(f"{r['step']:,}" for r in others)
        notes.append(
            f"Step {steps}: measured with another number of images, sampler or extractor, so not "
            "ranked with the others."
        )
    absent = [name for name in ("fd", "kid_mean", "precision") if row.get(name) is None]
    if absent and set(absent) < set(MEASURES):
        notes.append(f"Not measured: {', '.join(absent)}.")
    return notes


def _on_counts(row: Row, results: dict[str, Any]) -> list[str]:
    """Which metrics are of fewer samples than there are, or of too few for a number."""
    count, notes = row["evidence"]["count"], []
    if (n := samples_of(row, "precision")) < count:
        notes.append(
            f"Precision, recall, density and coverage are of the first {n:,} samples and of as "
            "many training images."
        )
    if (n := samples_of(row, "kid_mean")) < count:
        notes.append(f"KID is of the first {n:,} samples.")
    wanted = "is" in results.get("settings", {}).get("metrics", ())
    if wanted and results["extractor"].get("task") != "rotations" and count < FEWEST_FOR_IS:
        notes.append(f"An inception score needs {FEWEST_FOR_IS} images; there are {count}.")
    return notes


def _unscored(rows: list[Row]) -> list[str]:
    """One sentence on all checkpoints that have no score, with the reason of the first."""
    lacking = [r for r in rows if not is_scored(r)]
    if not lacking:
        return []
    steps = ", ".join(f"{r['step']:,}" for r in lacking[:LISTED])
    steps += f" and {len(lacking) - LISTED} more" if lacking[LISTED:] else ""
    reason = lacking[0].get("problem") or "its score is not a finite number."
    if not lacking[1:]:
        return [f"Step {steps} could not be scored: {reason}"]
    return [f"Steps {steps} could not be scored. Step {lacking[0]['step']:,}: {reason}"]


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
