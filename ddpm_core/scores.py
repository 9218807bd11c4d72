"""Rows of results.json, which of them can be compared, and the best one. Imports no torch.

`evaluate` writes one row per checkpoint: `Row` with the scores and the evidence behind them, or
`Unscored` with the reason. The models are frozen and keep unknown fields, so a row that was read
from a file has the checksum that it was written with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeGuard

from pydantic import ConfigDict, Field

from ddpm_core.config import Sample
from ddpm_core.config.results import as_sampled
from ddpm_core.errors import UserError
from ddpm_core.storage.files import Count, Schema
from ddpm_core.storage.workspace import RESULTS, Workspace, fingerprint

MEASURES = (
    "fd",
    "fd_pixel_pca",
    "kid_mean",
    "kid_std",
    "is_mean",
    "is_std",
    "precision",
    "recall",
    "density",
    "coverage",
)
# These metrics use at most 10,000 samples, so they have their own count.
_PRDC = ("precision", "recall", "density", "coverage")
COUNTS = {"kid_mean": "kid_count", "kid_std": "kid_count", **dict.fromkeys(_PRDC, "prdc_count")}

# Feature spaces in words.
SPACES = {
    "": "Inception features",
    "inception": "features of an Inception network with non-standard weights",
    "in_domain": "features of a small classifier trained on these images",
}

# Scores can be compared if these parts of their evidence are equal. The sampling seed is not one
# of them: another seed gives another sample of the same distribution.
SAME = ("data", "extractor_fingerprint", "sampler", "count")


class Record(Schema):
    """A frozen part of results.json; fields are also readable as `record["name"]`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def keys(self) -> list[str]:
        """Return the names of the fields that were given."""
        return [*self.model_fields_set]

    def plain(self) -> dict[str, Any]:
        """Return the given fields as JSON-compatible data, as they were read or are written."""
        return self.model_dump(exclude_unset=True)


class Evidence(Record):
    """Everything that a score depends on."""

    count: Count
    data: str
    extractor_fingerprint: str
    sampler: dict[str, Any]
    holdout_data: str = ""
    reference_count: Count | None = None
    extractor: str = ""
    extractor_accuracy: float | None = None
    space: str = ""
    seed: int = 0
    weights: str = ""
    samples: str | None = None  # fingerprint of the samples
    train: str = ""  # fingerprint of the training
    guide: dict[str, Any] | None = None  # step and weights of the network that guided the sampling


class Memorisation(Record):
    """Distances of samples to the training set; see `evaluation.memorisation.compare`."""

    verdict: str
    count: Count = 0
    holdout_count: Count = 0
    exact: Count = 0
    holdout_exact: Count = 0
    median: float | None = None
    holdout_median: float | None = None
    threshold: float | None = None
    share_below: float | None = None
    expected_below: float | None = None
    share_p_value: float | None = None
    p_value: float | None = None
    nearer: float | None = None
    copies: Count = 0
    holdout_copies: Count = 0
    copies_p_value: float | None = None
    verbatim: Count = 0
    holdout_verbatim: Count = 0
    verbatim_p_value: float | None = None


class Collapse(Record):
    """Near duplicates among samples; see `evaluation.memorisation.compare_repeats`."""

    verdict: str
    count: Count = 0
    exact: Count = 0
    real_exact: Count = 0
    median: float | None = None
    real_median: float | None = None
    limit: float | None = None
    repeats: Count | None = None
    real_repeats: Count | None = None
    p_value: float | None = None


class Scores(Record):
    """The metrics of one set of images; None where a metric was not measured."""

    fd: float | None = None
    fd_pixel_pca: float | None = None
    kid_mean: float | None = None
    kid_std: float | None = None
    is_mean: float | None = None
    is_std: float | None = None
    precision: float | None = None
    recall: float | None = None
    density: float | None = None
    coverage: float | None = None
    kid_count: Count | None = None
    prdc_count: Count | None = None


class Measurement(Scores):
    """The metrics of a set of images, the one that ranks, and those of held-out real images."""

    score_name: str
    score: float  # the metric that ranks checkpoints; lower is better
    floor: Scores | None = None  # of `floor_count` held-out real images
    at_floor: Scores | None = None  # of as many samples
    floor_count: Count | None = None


class Row(Measurement):
    """The row of a checkpoint with scores."""

    step: Count
    evidence: Evidence
    memorisation: Memorisation | None = None
    collapse: Collapse | None = None
    problem: None = None
    key: str | None = None  # fingerprint of everything that the scores depend on
    checksum: str | None = None

    def samples_of(self, metric: str) -> int:
        """Return how many samples a metric was measured on."""
        return int(self.get(COUNTS.get(metric, "")) or self.evidence.count)

    def with_checksum(self) -> Self:
        """Return the row with the checksum of its content."""
        return self.model_copy(update={"checksum": self._content_checksum()})

    def is_unchanged(self) -> bool:
        """Return whether the row is what `evaluate` wrote: not edited and not damaged."""
        return self.checksum == self._content_checksum()

    def _content_checksum(self) -> str:
        return fingerprint({k: v for k, v in self.plain().items() if k != "checksum"})


class Unscored(Record):
    """The row of a checkpoint that could not be scored, with the reason."""

    step: Count
    score_name: None = None
    score: None = None
    problem: str

    @classmethod
    def because(cls, step: int, problem: str) -> Self:
        return cls(step=step, score_name=None, score=None, problem=problem)


AnyRow = Row | Unscored


class Rows(Record):
    """The rows of results.json, and the settings of `sample` that they were ranked for."""

    rows: list[AnyRow]
    sample: dict[str, Any] = Field(default_factory=dict)


class ExtractorFacts(Record):
    """`extractor` in results.json."""

    fingerprint: str
    space: str
    accuracy: float | None = None
    name: str = ""
    task: str = ""


class Results(Rows):
    """results.json as a whole."""

    extractor: ExtractorFacts
    settings: dict[str, Any] = Field(default_factory=dict)  # of `evaluate`
    data: dict[str, Any] = Field(default_factory=dict)
    straddling: dict[str, Any] | None = None
    run: dict[str, Any] = Field(default_factory=dict)
    sizes: dict[str, Count | None] = Field(default_factory=dict)  # of the files beside it
    validation: list[dict[str, float]] = Field(default_factory=list)  # losses by training step


def read_rows(workspace: Workspace) -> Rows:
    """Return the rows of results.json; no rows if the file is missing or damaged."""
    return workspace.read_model(RESULTS, Rows) or Rows(rows=[])


def read_results(workspace: Workspace) -> Results | None:
    """Return results.json, or None if it is missing, damaged or has no rows."""
    found = workspace.read_model(RESULTS, Results)
    return found if found and found.rows else None


def differences(a: Row, b: Row) -> list[str]:
    """Return why two scores cannot be compared: names from SAME, or `score`; empty if they can."""
    found = [name for name in SAME if _meaning(a.evidence, name) != _meaning(b.evidence, name)]
    # The name contains feature space and count. If those are equal, the metric is a different one.
    return found or ["score"] * (a.score_name != b.score_name)


def _meaning(evidence: Evidence, name: str) -> Any:
    """Return a part of SAME; a sampler's settings as the current version would write them."""
    return as_sampled(evidence.sampler) if name == "sampler" else evidence[name]


def is_scored(row: AnyRow) -> TypeGuard[Row]:
    """Return whether a row has a finite score."""
    return row.score is not None and math.isfinite(row.score)


def must_be_unchanged(rows: Iterable[AnyRow]) -> None:
    """Raise UserError for the first score that is not what `evaluate` wrote."""
    for row in filter(is_scored, rows):
        if not row.is_unchanged():
            raise UserError(
                f"The score of step {row.step} was edited or damaged after it was measured, or was "
                "written by an older version.",
                run=("evaluate",),
            )


def settings_to_rank(settings: Sample, results: Rows) -> dict[str, Any]:
    """Return the settings of `sample` to rank by.

    `precision: auto` becomes the precision that these results were sampled with.
    """
    given = settings.model_dump(mode="json")
    if given["precision"] == "auto":
        given["precision"] = results.sample.get("precision", "auto")
    return given


def ranked(rows: Iterable[AnyRow], sample: Mapping[str, Any] | None = None) -> list[Row]:
    """Return the largest set of rows whose scores can be compared, by step.

    A set that was sampled with the settings `sample` comes first, whatever its size. So one
    checkpoint that was sampled with a different count or sampler does not hide the others, unless
    that is what `sample` asks for. Ties go to the set with more images, then to the later one.
    """
    groups: list[list[Row]] = []
    for row in sorted(filter(is_scored, rows), key=lambda row: row.step):
        for group in groups:
            if not differences(group[0], row):
                group.append(row)
                break
        else:
            groups.append([row])
    return max(groups, key=lambda group: _priority(group, sample or {}), default=[])


def _priority(
    group: list[Row], sample: Mapping[str, Any]
) -> tuple[tuple[bool, bool], int, int, int]:
    first, last = group[0], group[-1]
    return _matches(first, sample), len(group), first.evidence.count, last.step


def _matches(row: Row, sample: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a row was sampled with these settings: without, and with the precision.

    The seed does not count.
    """
    sampler = row.evidence.sampler
    differing = {name for name, v in sampler.items() if name in sample and sample[name] != v}
    fits = row.evidence.count == sample.get("count") and differing <= {"precision"}
    return fits, fits and not differing


def best(rows: Iterable[AnyRow], sample: Mapping[str, Any] | None = None) -> Row | None:
    """Return the comparable row with the lowest score, the earliest one of equals."""
    return min(ranked(rows, sample), key=lambda row: row.score, default=None)


def best_to_sample(results: Rows, settings: Sample) -> Row | None:
    """Return the row that `sample.checkpoints: best` refers to.

    Rows that were sampled with exactly these settings, seed included, come first. So once the best
    checkpoint has been sampled, it stays the best one, whatever its new score is.
    """
    sample = settings_to_rank(settings, results)
    listed = ranked(results.rows, sample)
    same = [row for row in listed if all(_matches(row, sample))]
    same = [row for row in same if row.evidence.seed == sample["seed"]]
    return best(same or listed)


def best_inception(rows: Iterable[AnyRow]) -> Row | None:
    """Return the comparable row with the highest inception score, if any was measured."""
    measured = [row for row in ranked(rows) if row.is_mean is not None]
    return max(measured, key=lambda row: row.is_mean or 0.0, default=None)


def metric_name(metric: str, space: str, count: int) -> str:
    """Return a name with feature space and count: `fd_in_domain_500`, `kid_10k`.

    `space` is empty for the standard Inception only. Only then is the Fréchet distance called
    `fid`.
    """
    metric = "fid" if metric == "fd" and not space else metric
    return "_".join(part for part in (metric, space, count_label(count)) if part)


def count_label(count: int) -> str:
    """Return 500 as 500, 10000 as 10k, 10500 as 10500."""
    return f"{count // 1000}k" if count and count % 1000 == 0 else str(count)


def named_metrics(row: Row) -> dict[str, float]:
    """Return a row's numbers under full names (feature space and count), for MLflow and DVC."""
    named = {}
    for metric in MEASURES:
        value = row[metric]
        if value is not None:
            pixels = metric == "fd_pixel_pca"
            space = "pixel_pca" if pixels else row.evidence.space
            name = metric_name("fd" if pixels else metric, space, row.samples_of(metric))
            named[name] = float(value)
    if row.memorisation:
        for key in ("share_below", "p_value"):
            if (value := row.memorisation[key]) is not None:
                named[f"memorisation_{key}"] = float(value)
    if row.collapse and row.collapse.repeats is not None:
        named["repeats_share"] = row.collapse.repeats / row.collapse.count
    return named
