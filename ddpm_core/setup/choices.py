"""The settings that `ddpm init` chooses: each by a small function, with the reason.

To choose another setting, add a function to CHOICES. The reason becomes the comment in the params
file, so it is short and has the numbers that decided.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ddpm_core.config.durations import in_words
from ddpm_core.data.check import IMBALANCE
from ddpm_core.data.sources.download import KNOWN
from ddpm_core.setup.plan import Plan
from ddpm_core.text import counted

FAR_SHARE = 0.25  # of the images; if more lose over half of themselves when cropped, pad
FEWEST_OF_CLASS = 10  # images of a class from which on it can be learned
SHORT = 1_000_000  # images of a training that profits from the linear denoiser
WARMUP = 0.05  # share of the steps
FEW, OFTEN = 5000, 100  # images, and passes over them, from which on they are augmented


class Choice(NamedTuple):
    """The value of a setting, and why."""

    value: Any
    reason: str


def seed(plan: Plan) -> Choice:
    return Choice(0, "the same seed gives the same model")


# Data


def source(plan: Plan) -> Choice:
    report = plan.facts.report
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.stored.items())
    return Choice(report.source, f"{counted(report.count, 'image')}: {kinds}")


def image_size(plan: Plan) -> Choice:
    side = f"the median image has a shorter side of {plan.facts.report.median_side}"
    return Choice(plan.size, "; ".join(filter(None, [side, plan.larger])))


def resize(plan: Plan) -> Choice:
    report = plan.facts.report
    far = report.far_from_square / report.count
    over_half = f"more than half of {far:.0%} of the images" if far else ""
    if far > FAR_SHARE:
        return Choice("pad", f"crop would lose {over_half}; the borders are prepare.background")
    if report.cropped == 0:
        return Choice("crop", "most images are square")
    loses = " and ".join(filter(None, [f"{report.cropped:.0%} of the median image", over_half]))
    return Choice("crop", f"loses {loses}; pad would add borders")


# Network


def channels(plan: Plan) -> Choice:
    weights = f"{plan.measured.parameters / 1e6:.1f}M weights"
    return Choice(plan.network.channels, "; ".join(filter(None, [weights, plan.wider])))


def multipliers(plan: Plan) -> Choice:
    sizes = [plan.size >> level for level in range(len(plan.network.multipliers))]
    return Choice(list(plan.network.multipliers), f"levels of {', '.join(map(str, sizes))} pixels")


def blocks(plan: Plan) -> Choice:
    return Choice(plan.network.blocks, "residual blocks per level, as in networks of this width")


def dropout(plan: Plan) -> Choice:
    small = "the network is small"
    return Choice(plan.network.dropout, "against memorizing" if plan.network.dropout else small)


def conditioning(plan: Plan) -> Choice:
    classes = plan.facts.classes
    if plan.facts.report.captioned:
        return Choice("text", "every image has a caption")
    if len(classes) < 2:
        return Choice("none", "there are neither captions nor class folders")
    least, most = min(classes.values()), max(classes.values())
    counts = f"{least:,} to {most:,}" if least < most else f"{least:,}"
    found = f"{len(classes)} classes of {counts} images"
    if least < FEWEST_OF_CLASS:
        return Choice("none", f"{found}; class takes at least {FEWEST_OF_CLASS} each")
    return Choice("class", found)


def prediction(plan: Plan) -> Choice:
    if plan.steps * plan.batch < SHORT:
        return Choice(
            "wiener", "starts as a linear denoiser, for short training; v can be exported"
        )
    return Choice("v", "balanced at all noise levels")


# Training


def steps(plan: Plan) -> Choice:
    took = f"{in_step(plan.measured.step)} per step on this {plan.device}"
    passes = f"{plan.passes:,.3g} passes over {counted(plan.facts.training, 'image')}"
    limit = "; more would memorize them" if plan.steps > 0.9 * plan.most_steps else ""
    return Choice(plan.steps, f"{took}, {passes}{limit}")


def batch_size(plan: Plan) -> Choice:
    few = plan.batch < plan.network.batch
    return Choice(plan.batch, "a quarter of the images" if few else "as usual for this width")


def microbatches(plan: Plan) -> Choice:
    needed = plan.measured.memory(plan.batch, plan.microbatches) / 1e9
    free = f" of {plan.memory / 1e9:.3g} GB free" if plan.memory < 1e15 else ""
    return Choice(plan.microbatches, f"takes about {needed:.2g} GB{free}")


def processes(plan: Plan) -> Choice | None:
    if plan.gpus < 2:
        return None
    return Choice("auto", f"this machine has {plan.gpus} GPUs; the times are for one of them")


def learning_rate(plan: Plan) -> Choice:
    return Choice(plan.network.lr, f"for {plan.network.channels} channels; wider takes less")


def warmup(plan: Plan) -> Choice:
    most = 100 if plan.network.channels < 64 else 1000
    return Choice(max(1, min(most, int(WARMUP * plan.steps))), "at most 5% of the steps")


def schedule(plan: Plan) -> Choice:
    return Choice("cosine", "the number of steps is known; constant allows to add some later")


def ema(plan: Plan) -> Choice:
    return Choice(["power:0.1", "power:0.05"], "over 10% and 5% of the run, however short")


def flip(plan: Plan) -> Choice:
    mirror = plan.facts.mirror
    if not mirror.is_known:
        tested = f"{counted(mirror.images, 'image')} are too few to test"
        return Choice(False, f"{tested}; true is better if mirrored images are right")
    tested = f"a classifier tells {mirror.share:.0%} of {mirror.images:,} images from mirrored ones"
    if mirror.matters:
        return Choice(False, f"{tested} (chance: 50%)")
    return Choice(True, f"{tested} (chance: 50%, digits: 91%)")


def augment(plan: Plan) -> Choice:
    many = f"{plan.passes:,.3g} passes over {counted(plan.facts.training, 'image')}"
    if plan.facts.training >= FEW or plan.passes < OFTEN:
        return Choice("none", f"{many} do not need it")
    if plan.facts.mirror.matters:
        return Choice("none", "changed digits or letters are wrong")
    return Choice("edm", f"{many}; the changes do not appear in samples")


def balance(plan: Plan) -> Choice | None:
    counts = plan.facts.classes.values()
    if conditioning(plan).value != "class" or max(counts) < IMBALANCE * min(counts):
        return None
    return Choice("classes", f"classes have {min(counts):,} to {max(counts):,} images")


def log_every(plan: Plan) -> Choice:
    every = max(1, min(100, plan.steps // 100))
    return Choice(every // 10 * 10 or every, "about 100 rows, or one per 100 steps")


def snapshot_every(plan: Plan) -> Choice:
    return Choice("5m", "what an interruption loses at most")


def milestone_every(plan: Plan) -> Choice:
    return Choice(plan.milestone, f"{counted(plan.samples[0], 'checkpoint')} to choose from")


# Results


def count(plan: Plan) -> Choice:
    took = in_words(plan.times["sample"])
    return Choice(plan.samples[1], f"of each checkpoint; sampling takes about {took}")


def sample_batch(plan: Plan) -> Choice:
    return Choice(min(100, plan.samples[1]), "divides the number of images")


def extractor(plan: Plan) -> Choice:
    return Choice("auto", "a classifier of these images, unless inception_weights are set")


def name(plan: Plan) -> Choice:
    return Choice(f"ddpm-{label(plan)}", "models of other images are not compared with these")


def experiment(plan: Plan) -> Choice:
    return Choice(f"ddpm-{label(plan)}", "the MLflow experiment of these images")


def workspace(plan: Plan) -> Choice:
    if plan.facts.report.source in KNOWN:
        return Choice("workspace", "its downloads/ has the archive of these images")
    return Choice(f"runs/{label(plan)}", "where all results are stored")


def label(plan: Plan) -> str:
    """Return a name for files and models from that of the source."""
    last = PurePosixPath(plan.facts.report.source.split("@")[0].rstrip("/")).name
    stem = re.sub(r"(\.(zip|tar|tgz|gz|bz2|xz|zst))+$", "", last, flags=re.IGNORECASE)
    return re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-").lower()[:60] or "images"


def in_step(seconds: float) -> str:
    """Return the time of a step in seconds or milliseconds."""
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


CHOICES: dict[str, Callable[[Plan], Choice | None]] = {
    "seed": seed,
    "workspace": workspace,
    "prepare.source": source,
    "prepare.image_size": image_size,
    "prepare.resize": resize,
    "model.channels": channels,
    "model.multipliers": multipliers,
    "model.blocks": blocks,
    "model.dropout": dropout,
    "model.conditioning": conditioning,
    "diffusion.prediction": prediction,
    "train.steps": steps,
    "train.batch_size": batch_size,
    "train.microbatches": microbatches,
    "train.processes": processes,
    "train.optimizer.lr": learning_rate,
    "train.optimizer.warmup": warmup,
    "train.optimizer.schedule": schedule,
    "train.ema": ema,
    "train.flip": flip,
    "train.augment": augment,
    "train.balance": balance,
    "train.log_every": log_every,
    "train.snapshot_every": snapshot_every,
    "train.milestone_every": milestone_every,
    "sample.count": count,
    "sample.batch_size": sample_batch,
    "evaluate.extractor": extractor,
    "register.name": name,
    "tracking.experiment": experiment,
}


def choose(plan: Plan) -> dict[str, Choice]:
    """Return all choices by dotted name; those that the user made replace the others."""
    chosen = {key: choice for key, rule in CHOICES.items() if (choice := rule(plan))}
    return chosen | {key: Choice(value, "set by -S") for key, value in plan.given.items()}
