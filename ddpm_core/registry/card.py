"""The model card: what the model is, how good, measured how, and what it must not be taken for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.evaluation.metrics import SMALL
from ddpm_core.masking import shown, throughout
from ddpm_core.scores import SPACES, Row, named_metrics
from ddpm_core.wording import counted

LISTED = 20  # classes that are named
LONGEST = 5000  # characters of a version's description, of which PostgreSQL and MySQL take no more
# Sections that did not make the model; how it was sampled and scored stands in the evidence.
ELSEWHERE = ("workspace", "device", "sample", "evaluate", "register", "tracking")

VERDICTS = {
    "none": "Its images are no nearer to the training images than held-out images are.",
    "near": "Its images lie somewhat nearer to the training images than held-out images do.",
    "copies": "**It copies training images**: of its images more are nearly the same as one of "
    "them than of held-out images.",
}

TEMPLATE = """\
# {name}: {kind} of {size} x {size} pixels

A denoising diffusion model (DDPM) after {step} steps of training.

## Scores
{scores}

## How they were measured
{evidence}

## Copies of training images, and of one another
{copies}

{repeats}

## Data
{data}

The licence of the images is not known to this card: look it up before you pass on the model or \
its images.

## Use
`mlflow models serve` answers `{{"dataframe_records": [{{"n": 4, "seed": 1}}]}}` at `/invocations` \
with PNGs; the same seed gives the same images. Weights and settings are plain safetensors and \
JSON, below `artifacts/checkpoint`.

## Caveats
{caveats}

## Settings it was trained with
```yaml
{settings}
```
"""


def write_card(name: str, checkpoint: Checkpoint, row: Row) -> str:
    """Markdown. `row` is the checkpoint's row of results.json."""
    row = Row.model_validate(throughout(shown, row.plain()))
    return TEMPLATE.format(
        name=name,
        kind=_kind(checkpoint),
        size=checkpoint.data["image_size"],
        step=f"{checkpoint.step:,}",
        scores=_list(_scores(row)),
        evidence=_list(_evidence(row["evidence"])),
        copies=_copies(row.get("memorisation") or {}),
        repeats=_repeats(row.get("collapse") or {}),
        data=_list(_data(throughout(shown, checkpoint.data))),
        caveats=_list(_caveats(row)),
        settings=_settings(checkpoint),
    )


def as_description(card: str) -> str:
    """A card as the description of a version; of a long one its beginning, up to a whole line."""
    if len(card) <= LONGEST:
        return card
    rest = "\n… The rest is in this version's files: `artifacts/README.md`.\n"
    fence = "```\n"
    begun = card[: LONGEST - len(fence + rest)].rpartition("\n")[0] + "\n"
    return begun + fence * (begun.count("```") % 2) + rest


def _kind(checkpoint: Checkpoint) -> str:
    kinds = {"none": "images", "class": "images by class", "text": "images by text"}
    colour = "gray" if checkpoint.data["channels"] == 1 else "colour"
    return f"{colour} {kinds[checkpoint.params.model.conditioning]}"


def _scores(row: Row) -> Iterator[str]:
    """The score that counts, the others, and what held-out real images would get."""
    yield f"**{row['score_name']}: {row['score']:.4g}** (the lower the better)"
    for name, value in named_metrics(row).items():
        if name != row["score_name"] and not name.startswith(("memorisation", "repeats")):
            yield f"{name}: {value:.4g}"
    floor, same = (row.get("floor") or {}).get("fd"), (row.get("at_floor") or {}).get("fd")
    if floor is not None and same is not None:
        count = row["floor_count"]
        yield (
            f"{count} real held-out images get a distance of {floor:.4g}, as many of this model's "
            f"{same:.4g}"
        )


def _evidence(evidence: Mapping[str, Any]) -> Iterator[str]:
    settings = {k: v for k, v in (evidence.get("sampler") or {}).items() if v is not None}
    listed = ", ".join(f"{key} {_plain(value)}" for key, value in settings.items())
    yield f"{counted(evidence['count'], 'image')}, seed {evidence['seed']}; {listed}"
    reference = evidence.get("reference_count")
    against = f"{reference:,} training images" if reference else "the training images"
    yield f"against {against}, fingerprint `{evidence['data']}`"
    space = SPACES.get(evidence.get("space", ""), evidence["extractor"])
    accuracy = evidence.get("extractor_accuracy")
    told = f", right on {accuracy:.1%} of held-out images" if accuracy is not None else ""
    yield f"{space}{told}; fingerprint `{evidence['extractor_fingerprint']}`"
    yield f"weights `{evidence['weights']}`"


def _copies(facts: Mapping[str, Any]) -> str:
    verdict = VERDICTS.get(str(facts.get("verdict")), "Not examined: nothing is known of copies.")
    if facts.get("share_below") is None:
        return verdict
    chance = facts.get("expected_below") or 0.01
    return (
        f"{verdict} Of {facts['count']:,} images {facts['share_below']:.1%} lie nearer to a "
        f"training image than 99 % of held-out images do; {chance:.1%} is what chance gives."
    )


def _repeats(facts: Mapping[str, Any]) -> str:
    if facts.get("verdict", "unknown") == "unknown":
        return "Not examined: whether its images repeat one another is not known."
    count = facts["count"]
    return (
        f"{'**It has collapsed.** ' if facts['verdict'] == 'collapsed' else ''}Of {count:,} images "
        f"{facts['repeats'] / count:.1%} are nearly the same as another one; of as many training "
        f"images {facts['real_repeats'] / count:.1%} are."
    )


def _data(data: Mapping[str, Any]) -> Iterator[str]:
    if data.get("count"):
        yield f"{counted(data['count'], 'image')}, fingerprint `{data['fingerprint']}`"
    for key, value in (data.get("source") or {}).items():
        if isinstance(value, str | int):
            yield f"source {key}: {_plain(value)}"
    names, counts = data.get("classes") or [], data.get("class_counts") or []
    listed = [f"{_plain(name)} ({count})" for name, count in zip(names, counts, strict=False)]
    if listed:
        more = f", and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
        yield f"classes: {', '.join(listed[:LISTED])}{more}"


def _caveats(row: Row) -> Iterator[str]:
    evidence = row["evidence"]
    if evidence["count"] < SMALL:
        yield (
            f"The scores rest on {evidence['count']:,} images. A Fréchet distance of few images "
            "is too high; it compares with scores of as many images alone."
        )
    if not str(row["score_name"]).startswith("fid"):
        yield (
            f"`{row['score_name']}` is no FID: its features are not those of the standard "
            "Inception network, and it does not compare with published scores."
        )
    yield "The images show what the training images show, with their biases."


def _settings(checkpoint: Checkpoint) -> str:
    """What made the model, without the places of one machine and passwords in URIs."""
    given = {k: v for k, v in checkpoint.params.record().items() if k not in ELSEWHERE}
    return yaml.safe_dump(given, sort_keys=False, default_flow_style=None, width=100).rstrip()


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _plain(value: Any) -> str:
    """A class name or path on one line, with nothing that Markdown takes for its own."""
    text = " ".join(str(value).split())
    return "".join(f"\\{c}" if c in "\\`*_<>[]|#" else c for c in text)
