"""The model card: what the model is, its scores and how they were measured, and its limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import yaml

from ddpm_core.checkpoint import Checkpoint, TrainingData
from ddpm_core.evaluation.metrics import SMALL
from ddpm_core.scores import SPACES, Collapse, Evidence, Memorisation, Row, named_metrics
from ddpm_core.storage.workspace import GRID
from ddpm_core.text import counted, shown, throughout

MAX_CLASSES = 20  # that are listed
MAX_DESCRIPTION = 5000  # characters; PostgreSQL and MySQL accept no more for a version
# Sections that do not affect the training; the evidence says how it was sampled and scored.
NOT_TRAINING = ("workspace", "device", "sample", "evaluate", "register", "tracking")

VERDICTS = {
    "none": "Its images are no nearer to the training images than held-out images are.",
    "near": "Its images are somewhat nearer to the training images than held-out images are.",
    "copies": "**It copies training images**: more of its images nearly equal a training image "
    "than held-out images do.",
}

TEMPLATE = """\
# {name}: {kind} of {size} x {size} pixels

A denoising diffusion model (DDPM) after {step} steps of training.
{grid}
## Scores
{scores}

## How they were measured
{evidence}

## Copies of training images, and repeated images
{copies}

{repeats}

## Data
{data}

This card does not know the licence of the images. Look it up before you pass on the model or its \
images.

## Use
{use}

## Caveats
{caveats}

## Training settings
```yaml
{settings}
```
"""

IN_MLFLOW = """\
`mlflow models serve` answers `{"dataframe_records": [{"n": 4, "seed": 1}]}` at `/invocations` \
with PNGs; the same seed gives the same images. Weights and settings are plain safetensors and \
JSON, in `artifacts/checkpoint`."""
UNSCORED = "These weights have no scores."


def write_card(
    name: str,
    checkpoint: Checkpoint,
    row: Row | None,
    use: str = IN_MLFLOW,
    caveats: Sequence[str] = (),
    grid: bool = False,
) -> str:
    """Return the card as Markdown.

    Args:
        name: The name of the model.
        checkpoint: The checkpoint that it is about.
        row: The checkpoint's row of results.json, if it has scores.
        use: How to use the files beside the card.
        caveats: More caveats than those of the scores.
        grid: Whether the image grid.png is beside the card.
    """
    if row:
        row = Row.model_validate(throughout(shown, row.plain()))
    data = TrainingData.model_validate(throughout(shown, checkpoint.training_data.model_dump()))
    return TEMPLATE.format(
        name=name,
        kind=_kind(checkpoint),
        size=checkpoint.training_data.image_size,
        step=f"{checkpoint.step:,}",
        grid=f"\n![Images that this model generates]({GRID})\n" if grid else "",
        scores=_list(_scores(row)) if row else UNSCORED,
        evidence=_list(_evidence(row.evidence)) if row else UNSCORED,
        copies=_copies(row.memorisation if row else None),
        repeats=_repeats(row.collapse if row else None),
        data=_list(_data(data)),
        use=use,
        caveats=_list([*caveats, *_caveats(row)]),
        settings=_settings(checkpoint),
    )


def as_description(card: str) -> str:
    """Return a card as the description of a version; a long one is cut after a line."""
    if len(card) <= MAX_DESCRIPTION:
        return card
    note = "\n… The rest is in this version's files: `artifacts/README.md`.\n"
    fence = "```\n"
    start = card[: MAX_DESCRIPTION - len(fence + note)].rpartition("\n")[0] + "\n"
    is_in_code = start.count("```") % 2 == 1
    return start + fence * is_in_code + note


def _kind(checkpoint: Checkpoint) -> str:
    kinds = {"none": "images", "class": "images by class", "text": "images by text"}
    colour = "gray" if checkpoint.training_data.channels == 1 else "colour"
    return f"{colour} {kinds[checkpoint.params.model.conditioning]}"


def _scores(row: Row) -> Iterator[str]:
    """Yield the ranking score, the others, and the score of held-out real images."""
    yield f"**{row.score_name}: {row.score:.4g}** (lower is better)"
    for name, value in named_metrics(row).items():
        if name != row.score_name and not name.startswith(("memorisation", "repeats")):
            yield f"{name}: {value:.4g}"
    floor, same = row.floor and row.floor.fd, row.at_floor and row.at_floor.fd
    if floor is not None and same is not None:
        yield (
            f"{row.floor_count} real held-out images have a distance of {floor:.4g}, as many "
            f"images of this model {same:.4g}"
        )


def _evidence(evidence: Evidence) -> Iterator[str]:
    settings = {k: v for k, v in evidence.sampler.items() if v is not None}
    listed = ", ".join(f"{key} {_plain(value)}" for key, value in settings.items())
    yield f"{counted(evidence.count, 'image')}, seed {evidence.seed}; {listed}"
    reference = evidence.reference_count
    against = f"{reference:,} training images" if reference else "the training images"
    yield f"against {against}, fingerprint `{evidence.data}`"
    space = SPACES.get(evidence.space, evidence.extractor)
    accuracy = evidence.extractor_accuracy
    note = f", accuracy {accuracy:.1%} on held-out images" if accuracy is not None else ""
    yield f"{space}{note}; fingerprint `{evidence.extractor_fingerprint}`"
    yield f"weights `{evidence.weights}`"


def _copies(found: Memorisation | None) -> str:
    verdict = VERDICTS.get(found.verdict if found else "", "The check for copies was not made.")
    if found is None or found.share_below is None:
        return verdict
    chance = found.expected_below or 0.01
    return (
        f"{verdict} Of {found.count:,} images, {found.share_below:.1%} are nearer to a "
        f"training image than 99 % of held-out images are. By chance it would be {chance:.1%}."
    )


def _repeats(found: Collapse | None) -> str:
    if found is None or found.repeats is None or found.real_repeats is None:
        return "The check for repeated images was not made."
    verdict = "**It has collapsed.** " if found.verdict == "collapsed" else ""
    return (
        f"{verdict}Of {found.count:,} images, {found.repeats / found.count:.1%} nearly equal "
        "another one. "
        f"Of as many training images, {found.real_repeats / found.count:.1%} do."
    )


def _data(data: TrainingData) -> Iterator[str]:
    if data.count:
        yield f"{counted(data.count, 'image')}, fingerprint `{data.fingerprint}`"
    for key, value in data.source.items():
        if isinstance(value, str | int):
            yield f"source {key}: {_plain(value)}"
    pairs = zip(data.classes, data.class_counts, strict=False)
    listed = [f"{_plain(name)} ({count})" for name, count in pairs]
    if listed:
        more = f", and {len(listed) - MAX_CLASSES} more" if len(listed) > MAX_CLASSES else ""
        yield f"classes: {', '.join(listed[:MAX_CLASSES])}{more}"


def _caveats(row: Row | None) -> Iterator[str]:
    if row and row.evidence.count < SMALL:
        yield (
            f"The scores are from {row.evidence.count:,} images. With few images a Fréchet "
            "distance is too high; compare it only with scores from as many images."
        )
    if row and not row.score_name.startswith("fid"):
        yield (
            f"`{row.score_name}` is not an FID. Its features are not those of the standard "
            "Inception network, so it does not compare with published scores."
        )
    yield "The images show what the training images show, with their biases."


def _settings(checkpoint: Checkpoint) -> str:
    """Return the training settings as YAML, without the paths of one machine."""
    settings = {k: v for k, v in checkpoint.params.record().items() if k not in NOT_TRAINING}
    return yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=100).rstrip()


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _plain(value: Any) -> str:
    """Return a class name or path on one line, with Markdown's special characters escaped."""
    text = " ".join(str(value).split())
    return "".join(f"\\{c}" if c in "\\`*_<>[]|#" else c for c in text)
