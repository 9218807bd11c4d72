"""An old champion, sampled and scored with the evidence of the present."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import Config, Sample
from ddpm_core.console import progress
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.evaluation.scorer import Scorer
from ddpm_core.registry.gate import Unfit
from ddpm_core.runtime import compiling, memory
from ddpm_core.sampling.images import Pixels
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.scores import Row
from ddpm_core.storage.workspace import Workspace


def rescore(config: Config, workspace: Workspace, folder: Path, candidate: Row) -> Row:
    """The row of the checkpoint in `folder`, measured as `candidate` was.

    Raises Unfit where it cannot draw such images, and UserError where the data, the extractor or
    the score are no longer those of the candidate.
    """
    evidence = candidate["evidence"]
    scorer = Scorer(config, workspace)
    must_equal("data", scorer.train.fingerprint, evidence["data"])
    try:
        checkpoint = Checkpoint.open(folder)
    except Corrupt as error:
        raise Unfit(str(error)) from error
    shape = (checkpoint.data["image_size"], checkpoint.data["channels"])
    if shape != (scorer.train.image_size, scorer.train.channels):
        raise Unfit(
            f"it draws images of {shape[0]} pixels and {shape[1]} channels, the data have "
            f"{scorer.train.image_size} and {scorer.train.channels}."
        )
    must_equal("extractor", scorer.extractor.fingerprint, evidence["extractor_fingerprint"])
    must_equal("score", scorer.score_name(int(evidence["count"])), candidate["score_name"])
    settings, count = as_candidate(config.sample, evidence, checkpoint), int(evidence["count"])
    try:
        sampler = ImageSampler(
            checkpoint.load(settings.ema, scorer.device),
            checkpoint.data,
            settings,
            checkpoint.params.diffusion,
            compiled=compiling.wanted(settings.compile, scorer.device, count * settings.steps),
        )
    except UserError as error:  # such as a class that it does not know
        raise Unfit(str(error)) from error
    advice = f"sample.batch_size {settings.batch_size}: lower it."
    with memory.translate_errors(advice), compiling.translate_errors("sample.compile"):
        images = draw(sampler, count, settings.batch_size)
    evidence = evidence.plain() | {
        "weights": checkpoint.weights_hash(settings.ema),
        "train": checkpoint.train_fingerprint,
        "samples": None,
    }
    scores = scorer.score([images], "the champion")
    return Row.model_validate({"step": checkpoint.step, **scores, "evidence": evidence})


def must_equal(what: str, now: str, scored: str) -> None:
    """Raise UserError where the champion would be measured otherwise than the candidate was."""
    if now != scored:
        raise UserError(
            f"The {what} is now {now}; the checkpoints here were scored with {scored}: run "
            "`ddpm evaluate` first."
        )


def as_candidate(own: Sample, evidence: dict[str, Any], checkpoint: Checkpoint) -> Sample:
    """The sampler and seed of the evidence, on the weights that the champion has."""
    sampler = {key: v for key, v in evidence["sampler"].items() if key in Sample.model_fields}
    given = {**own.model_dump(mode="json"), **sampler, "seed": evidence["seed"]}
    return Sample.model_validate({**given, "ema": checkpoint.params.sample.ema})


def draw(sampler: ImageSampler, count: int, batch_size: int) -> Pixels:
    """Images 0 to `count` - 1, uint8 (n, H, W, C), in whole batches as `ddpm sample` draws them."""
    parts = []
    with progress("register: sampling the champion", count, "images") as advance:
        for start in range(0, count, batch_size):
            images = sampler.images(range(start, start + batch_size))[: count - start]
            parts.append(images)
            advance(len(images))
    return np.concatenate(parts)
