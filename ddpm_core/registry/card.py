"""The model card: what the model is, how good, measured how, and what it must not be taken for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from ddpm_core.checkpoint import Checkpoint

Row = Mapping[str, Any]

VERDICTS = {
    "none": "Its images are no nearer to the training images than held-out images are.",
    "near": "Its images lie somewhat nearer to the training images than held-out images do.",
    "copies": "**It copies training images**: its images lie much nearer to them than held-out "
    "images do.",
}


def write_card(name: str, checkpoint: Checkpoint, row: Row) -> str:
    """Markdown. `row` is the checkpoint's row of results.json."""
    data = checkpoint.data
    return "\n".join(
        [
            f"# {name}: {_kind(checkpoint)} of {data['image_size']}x{data['image_size']} pixels",
            "",
            f"A denoising diffusion model, step {checkpoint.step} of its training.",
            "",
            "## Score",
            *_table(_scores(row)),
            "",
            "Measured with:",
            "",
            *_table(_evidence(row["evidence"])),
            "",
            "## Copies of training images",
            VERDICTS.get(str(_verdict(row)), "Not examined: nothing is known about copies."),
            "",
            *_table(_plain(row.get("memorisation") or {})),
            "",
            "## Data",
            *_table(_data(data)),
            "",
            "The licence and the origin of the images are not known to this card: whoever passes "
            "the model or its images on has to look them up.",
            "",
            "## Use",
            'Ask it over HTTP: `{"dataframe_records": [{"n": 4, "seed": 1}]}` to `/invocations`. '
            "The same seed gives the same images. Weights and settings are plain safetensors and "
            "JSON, below `artifacts/checkpoint`.",
            "",
            "## Caveats",
            *(f"- {line}" for line in _caveats(row)),
            "",
            "## Settings",
            "```yaml",
            yaml.safe_dump(checkpoint.params.dump(), sort_keys=False).rstrip(),
            "```",
            "",
        ]
    )


def _kind(checkpoint: Checkpoint) -> str:
    kinds = {"none": "images", "class": "images by class", "text": "images by text"}
    colour = "gray" if checkpoint.data["channels"] == 1 else "colour"
    return f"{colour} {kinds[checkpoint.params.model.conditioning]}"


def _scores(row: Row) -> dict[str, Any]:
    """The score by its own name, then whatever else was measured."""
    rest = {
        key: value
        for key, value in _plain(row).items()
        if key not in ("step", "score", "score_name") and isinstance(value, float)
    }
    return {str(row["score_name"]): row["score"], **rest}


def _evidence(evidence: Mapping[str, Any]) -> dict[str, Any]:
    sampler = evidence.get("sampler") or {}
    settings = ", ".join(f"{key} {value}" for key, value in sampler.items() if value is not None)
    return {**_plain(evidence), "sampler": settings}


def _data(data: Mapping[str, Any]) -> dict[str, Any]:
    classes = [str(name) for name in data.get("classes", [])]
    counts = data.get("class_counts") or []
    listed = [f"{name} ({n})" for name, n in zip(classes, counts, strict=False)]
    more = f", and {len(classes) - 20} more" if len(classes) > 20 else ""
    return {
        "images": data.get("count"),
        "classes": ", ".join(listed[:20]) + more if listed else None,
        "fingerprint": data["fingerprint"],
        **{f"source {key}": value for key, value in (data.get("source") or {}).items()},
    }


def _verdict(row: Row) -> Any:
    return (row.get("memorisation") or {}).get("verdict")


def _caveats(row: Row) -> Iterable[str]:
    evidence = row["evidence"]
    count = int(evidence["count"])
    if count < 10_000:
        yield (
            f"The score rests on {count} images. A Fréchet distance of few images is too high; it "
            "compares with scores of as many images alone."
        )
    if not str(row["score_name"]).startswith("fid"):
        yield (
            f"`{row['score_name']}` is not an FID: its features come from `{evidence['extractor']}`"
            ", not from the standard Inception network. It does not compare with published scores."
        )
    yield "The images show what the training images show, with their biases."


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, texts and truths alone."""
    return {key: v for key, v in values.items() if isinstance(v, str | int | float | bool)}


def _table(values: Mapping[str, Any]) -> list[str]:
    rows = [f"| {key} | {_cell(value)} |" for key, value in values.items() if value is not None]
    return ["| | |", "|---|---|", *rows] if rows else []


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    # A class or path may hold what Markdown takes for a column or a line.
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")
