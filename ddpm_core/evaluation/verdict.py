"""The verdict of an evaluation in plain words, and the caveats that belong to its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpm_core.evaluation.memorisation import expected_below
from ddpm_core.evaluation.metrics import FEWEST_FOR_IS, SMALL
from ddpm_core.evaluation.pages import number, percent
from ddpm_core.scores import (
    MEASURES,
    AnyRow,
    Collapse,
    ExtractorFacts,
    Memorisation,
    Results,
    Row,
    Unscored,
    best,
    is_scored,
    ranked,
)
from ddpm_core.text import counted

SIGNIFICANT = 0.05  # smaller relative changes of a score count as no change
EARLIER = 0.75  # share of the training; the rest shows whether training still helps
NEAR = 1.25  # times the floor; up to here samples count as near as real images
LISTED = 10  # steps named in a sentence
FEW_HELD_OUT = 100  # images


@dataclass(frozen=True)
class Finding:
    """One part of a verdict: a word, a sentence for the summary, and details with numbers."""

    word: str
    summary: str
    detail: str
    level: str = ""  # good, caution, bad or unknown; sets the colour


@dataclass(frozen=True)
class Verdict:
    """A headline, a summary of the findings, and the findings."""

    headline: str
    summary: str
    quality: Finding | None = None
    diversity: Finding | None = None
    memorisation: Finding | None = None
    trend: Finding | None = None


def find_verdict(results: Results) -> Verdict:
    """Return the verdict on an evaluation."""
    listed, others = _split(results)
    row = best(listed)
    if row is None:
        problems = [f"Step {row.step:,}: {row.problem}" for row in results.rows if row.problem]
        return Verdict("No checkpoint could be scored.", " ".join(problems))
    headline = f"Step {row.step:,} is "
    if listed[1:]:
        headline += f"the best of {len(listed)} checkpoints"
    elif others:
        headline += "not comparable with any other checkpoint"
    else:
        headline += "the only checkpoint with a score"
    quality, trend = _quality(row), _trend(listed, row)
    repeats, copies = diversity(row.collapse), _memorisation(row.memorisation)
    faults = ["it has collapsed: its samples repeat one another"] * (repeats.level == "bad")
    faults += ["it copies training images"] * (copies.level == "bad")
    headline += f", but {', and '.join(faults)}" if faults else ""
    findings = (repeats, quality, copies, trend)
    summary = " ".join(finding.summary for finding in findings if finding.summary)
    return Verdict(f"{headline}.", summary, quality, repeats, copies, trend)


def _split(results: Results) -> tuple[list[Row], list[Row]]:
    """Return the rows in the ranking, and the scored rows that cannot be compared with them."""
    listed = ranked(results.rows, results.sample)
    return listed, [row for row in results.rows if is_scored(row) and row not in listed]


def _quality(row: Row) -> Finding:
    score = number(row.score)
    same = row.at_floor.fd if row.at_floor else None
    floor = row.floor.fd if row.floor else None
    if same is None or floor is None or row.fd is None:
        reason = "there are no held-out images"
        if row.floor is not None:
            reason = "the Fréchet distance was not measured"
        detail = f"Lower is better. The best possible value is unknown, because {reason}."
        return Finding(score, "The best possible score is unknown.", detail)
    detail = (
        f"With {row.floor_count or 0:,} images each, samples are at distance {number(same)} from "
        f"the training images, and held-out real images at {number(floor)}. Lower is better."
    )
    ratio = same / floor if floor > 0 else float("inf")
    if ratio <= NEAR:
        return Finding(score, "Its samples are about as near to the data as real images.", detail)
    far = f"Its samples are {number(ratio)} times as far from the data as real images."
    return Finding(score, far, detail)


def diversity(facts: Collapse | None) -> Finding:
    """Return whether samples repeat one another more than real images do."""
    if facts is None:
        return Finding("unknown", "", "Repeats among the samples were not measured.", "unknown")
    if facts.verdict == "unknown" or facts.repeats is None or facts.real_repeats is None:
        detail = "There are too few comparable real images to judge whether samples repeat."
        return Finding("unknown", "", detail, "unknown")
    count, share = facts.count, percent(facts.repeats / facts.count)
    real = percent(facts.real_repeats / count)
    exact = f" ({facts.exact:,} of them exactly)" if facts.exact else ""
    detail = (
        f"{share} of {count:,} samples are nearly the same as another sample{exact}. Among as many "
        f"real images it is {real}."
    )
    if facts.verdict == "collapsed":
        summary = f"Do not use it: {share} of its samples are nearly the same as another one."
        return Finding("collapsed", summary, detail, "bad")
    if facts.verdict == "repeats":
        summary = f"{share} of its samples are nearly the same as another one."
        return Finding("repeats", summary, detail, "caution")
    return Finding("no sign of collapse", "", detail, "good")


def _memorisation(facts: Memorisation | None) -> Finding:
    if facts is None:
        return Finding("unknown", "", "Memorisation was not measured.", "unknown")
    if facts.verdict == "unknown" or facts.share_below is None:
        return _unknown_memorisation(facts)
    count, expected = facts.count, facts.expected_below or expected_below(facts.holdout_count)
    share = (
        f"{percent(facts.share_below)} of {count:,} samples are nearer to a training image than "
        f"{percent(0.99)} of held-out images; by chance it would be {percent(expected)}."
    )
    if facts.verdict == "copies":
        verbatim = (
            f" ({facts.verbatim:,} of them identical except for noise)" if facts.verbatim else ""
        )
        detail = (
            f"{percent(facts.copies / count)} of {count:,} samples are nearly the same as a "
            f"training image{verbatim}. Among held-out images it is "
            f"{percent(facts.holdout_copies / facts.holdout_count)}."
        )
        return Finding("copies", "Some samples are copies of training images.", detail, "bad")
    if facts.verdict == "near":
        detail = (
            f"No more copies than by chance, but {share} The cause may be memorisation, or smooth "
            "samples: see the pairs."
        )
        summary = "Its samples are not copies, but suspiciously near to training images."
        return Finding("suspicious", summary, detail, "caution")
    return Finding("no sign", "There is no sign of memorised images.", share, "good")


def _unknown_memorisation(facts: Memorisation) -> Finding:
    """Return the finding without suitable held-out images; exact copies are still reported."""
    kind = "that are not training images too " if facts.holdout_exact else ""
    detail = f"There are no held-out images {kind}to compare with."
    if not facts.exact:
        return Finding("unknown", "Whether it memorises is unknown.", detail, "unknown")
    detail += f" {facts.exact:,} of {facts.count:,} samples are identical to a training image."
    summary = "Whether it memorises is unknown, but some samples are training images."
    return Finding("unknown", summary, detail, "caution")


def _trend(rows: Sequence[Row], row: Row) -> Finding:
    """Return whether longer training helps, from the ranked rows and the best of them.

    Compares the last quarter of the training with what came before. Single checkpoints are not
    compared: if they are close together, each is as good as its neighbours except for noise, even
    while the curve still falls.
    """
    if len(rows) < 2:
        return Finding("unknown", "", "One checkpoint shows no trend.")
    later = [r for r in rows if r.step > row.step]
    worse = _lowest(later).score / row.score - 1 if later and row.score > 0 else 0.0
    if worse > SIGNIFICANT:
        them = f"The {len(later)} later checkpoints are at least"
        detail = f"{them if later[1:] else 'The last checkpoint is'} {percent(worse)} worse."
        return Finding("no", "Later checkpoints are worse.", detail)
    before = [r for r in rows if r.step <= EARLIER * rows[-1].step]
    if row in before:
        detail = f"None of the {counted(len(later), 'later checkpoint')} is better."
        return Finding("little", "It no longer improves.", detail)
    old = _lowest(before or rows[:1])
    gain = 1 - row.score / old.score if old.score > 0 else 0.0
    than = f"{percent(gain)} better than step {old.step:,}"
    than += ", the best of the first three quarters." if before else ", the first one with a score."
    if gain > SIGNIFICANT:
        detail = f"Step {row.step:,} is {than}"
        return Finding("likely", "It still improves, so longer training should help.", detail)
    if not before:
        detail = "All scored checkpoints are from the last quarter of the training, and similar."
        return Finding("unknown", "", detail)
    return Finding("little", "It hardly improves any more.", f"Step {row.step:,} is only {than}")


def _lowest(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: row.score)


def caveats(results: Results) -> list[str]:
    """Return what a reader must know before using the numbers; nothing without scores."""
    listed, others = _split(results)
    row = best(listed)
    if row is None:
        return []
    notes = _unscored(results.rows)
    images = counted(row.evidence.count, "image")
    if row.evidence.count < SMALL:
        notes.append(
            f"A Fréchet distance with {images} is biased upwards, and the bias depends on the "
            "count: compare it only with distances of as many images. Published distances use "
            "10,000 or 50,000."
        )
    notes += _on_features(results.extractor)
    if row.floor_count and row.floor_count < FEW_HELD_OUT:
        held = counted(row.floor_count, "held-out image")
        notes.append(f"The floor is measured with only {held}.")
    if row.kid_mean is not None and row.kid_std is None:
        notes.append(f"KID with {images} has no deviation, because each subset contains them all.")
    notes += _on_counts(row, results)
    if others:
        steps = ", ".join(f"{r.step:,}" for r in others)
        notes.append(
            f"Step {steps}: measured with a different number of images, sampler or extractor, so "
            "not ranked with the others."
        )
    missing = [name for name in ("fd", "kid_mean", "precision") if row[name] is None]
    if missing and set(missing) < set(MEASURES):
        notes.append(f"Not measured: {', '.join(missing)}.")
    return notes


def _on_counts(row: Row, results: Results) -> list[str]:
    """Return which metrics use fewer samples than there are, or have too few."""
    count, notes = row.evidence.count, []
    if (n := row.samples_of("precision")) < count:
        notes.append(
            f"Precision, recall, density and coverage use the first {n:,} samples and as many "
            "training images."
        )
    if (n := row.samples_of("kid_mean")) < count:
        notes.append(f"KID uses the first {n:,} samples.")
    wanted = "is" in results.settings.get("metrics", ())
    if wanted and results.extractor.task != "rotations" and count < FEWEST_FOR_IS:
        notes.append(f"An inception score requires {FEWEST_FOR_IS} images; there are {count}.")
    return notes


def _unscored(rows: Sequence[AnyRow]) -> list[str]:
    """Return one sentence on all checkpoints without a score, with the reason of the first."""
    missing = [row for row in rows if not is_scored(row)]
    if not missing:
        return []
    first = missing[0]
    steps = ", ".join(f"{row.step:,}" for row in missing[:LISTED])
    steps += f" and {len(missing) - LISTED} more" if missing[LISTED:] else ""
    reason = first.problem if isinstance(first, Unscored) else "its score is not a finite number."
    if not missing[1:]:
        return [f"Step {steps} could not be scored: {reason}"]
    return [f"Steps {steps} could not be scored. Step {first.step:,}: {reason}"]


def _on_features(extractor: ExtractorFacts) -> list[str]:
    if extractor.space == "in_domain":
        task = "the rotation" if extractor.task == "rotations" else "the classes"
        accuracy = extractor.accuracy
        correct = f" It classifies {percent(accuracy or 0.0)} of held-out images correctly."
        notes = [
            f"The features come from a small network that learned {task} of these images."
            f"{'' if accuracy is None else correct} Its distances are not FID: they compare "
            "checkpoints and runs with the same data and extractor, and nothing else."
        ]
        if accuracy is not None and accuracy < 0.5:
            notes.append("This network is weak, so small differences are unreliable.")
        return notes
    if extractor.space:
        return ["The Inception weights are not the standard file, so the distance is not FID."]
    return []
