"""The command init: look at the images, measure this machine, and write a params file."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ddpm_core.config import Config, Prepare
from ddpm_core.config import load as params
from ddpm_core.config.durations import duration, in_words
from ddpm_core.config.identity import flat
from ddpm_core.config.template import excerpt
from ddpm_core.console import printable, say
from ddpm_core.data.check import DataReport, inspect
from ddpm_core.data.names import one_line
from ddpm_core.data.sources.base import Rejection
from ddpm_core.errors import UserError
from ddpm_core.runtime.device import device_name
from ddpm_core.runtime.distributed import World, world
from ddpm_core.setup.choices import Choice, choose
from ddpm_core.setup.machine import Measured, free_memory, measure, time_of_classifier
from ddpm_core.setup.mirror import mirror_test
from ddpm_core.setup.networks import NETWORKS, networks_for
from ddpm_core.setup.plan import NIGHT, SAMPLING, Facts, Plan
from ddpm_core.text import counted
from ddpm_core.training.dry_run import ExpectedImages

SAMPLE = 2000  # images of the mirror test
LEAST_SHARE = 0.2  # of the time that training must get
BUSY = 0.3  # share of the processors' time from which on other programs are reported
_UNKNOWN = Measured(0, 0.0, 0.0, 0.0, 0)
# Settings in the summary; the file has all of them, with reasons.
SHOWN = (
    "prepare.image_size",
    "prepare.resize",
    "model.channels",
    "model.conditioning",
    "train.steps",
    "train.batch_size",
    "train.optimizer.lr",
    "train.flip",
    "sample.count",
)


def settings_for(source: str, overrides: Sequence[str], seconds: float | None) -> tuple[str, str]:
    """Return a params file for a source, and a summary of it.

    `overrides` are settings that the user fixed, as `section.key=value`. `seconds` is the time for
    the whole run on this machine; None: as many as the network takes.

    Raises:
        UserError: the source has no images that prepare could use, the settings are invalid, or
            the time is too short.
    """
    given = _given(overrides)
    config = params.load(None, overrides)
    facts = look_at(source, config.prepare)
    with world(config.device, {}) as here:
        plan = find_plan(facts, given, here, seconds)
    choices = choose(plan)
    settings = nested({key: choice.value for key, choice in choices.items()})
    params.validate(settings)
    reasons = {key: one_line(choice.reason) for key, choice in choices.items()}
    return excerpt(settings, reasons, _about(plan)), _summary(plan, choices)


def _given(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings that the user fixed, by dotted name. Invalid ones are reported later."""
    given: dict[str, Any] = {}
    for item in overrides:
        params.override(given, item)
    return {key: value for key, value in flat(given).items() if key != "prepare.source"}


def look_at(source: str, settings: Prepare) -> Facts:
    """Return the facts about the images of a source.

    Raises:
        UserError: prepare would fail; the message says what the source contains.
    """
    start = time.perf_counter()
    report = inspect(source, settings, SAMPLE)
    seconds = time.perf_counter() - start
    for note in report.notes:
        say(f"note: {one_line(note)}")
    if report.failures:
        raise UserError(_refusal(report))
    return Facts(report, mirror_test(report.squares), seconds)


def _refusal(report: DataReport) -> str:
    """Return the message that a source cannot be used, with what it contains."""
    counts: Counter[str] = Counter()
    for split in report.splits.values():
        counts.update(split)
    used = ", ".join(
        f"{n:,} {name}" if name else f"{n:,} without a class"
        for name, n in sorted(counts.items())[:10]
    )
    lines = [f"ddpm prepare would fail for {report.source}: {' '.join(report.failures)}"]
    lines.append(f"  usable: {counted(report.count, 'image')}" + (f" ({used})" if used else ""))
    by_kind: dict[str, list[Rejection]] = {}
    for item in report.rejected:
        by_kind.setdefault(item.reason.partition(": ")[0], []).append(item)
    for items in by_kind.values():
        examples = ", ".join(item.name for item in items[:3]) + " ..." * (len(items) > 3)
        found = counted(len(items), "image")
        lines.append(f"  unusable: {found} ({examples}): {items[0].reason}")
    lines.append(
        "  Repair or remove these images, or move them to class folders. All of them: "
        f"ddpm check-data {shlex.quote(report.source)}"
    )
    first, *rest = map(one_line, lines)
    return "\n".join([first, *rest])


# Search


def find_plan(facts: Facts, given: Mapping[str, Any], here: World, seconds: float | None) -> Plan:
    """Return the largest size, and then the widest network, whose training fits in the time."""
    memory = free_memory(here.device)
    gpus = torch.cuda.device_count() if here.device.type == "cuda" else 0
    start = Plan(
        facts, 16, NETWORKS[16][0], _UNKNOWN, seconds, memory, gpus, device_name(here.device),
        given=given,
    )  # fmt: skip
    chosen, larger = None, ""
    for size in _sizes(facts, given):
        found = _measured(replace(start, size=size, network=networks_for(size)[0]), here)
        if chosen is None or found.fits:
            chosen = found
        if not found.fits:
            larger = "even " * (chosen is found) + _missing(found, str(size))
            break
    assert chosen is not None
    chosen = _widest(replace(chosen, larger=larger), here)
    _check_time(chosen)
    return chosen


def _widest(chosen: Plan, here: World) -> Plan:
    """Return the plan with the widest network whose training fits in the time."""
    if not chosen.fits:
        return chosen
    for network in networks_for(chosen.size)[1:]:
        if chosen.facts.training < network.fewest:
            wider = f"{network.channels} would memorize fewer than {network.fewest:,} images"
            return replace(chosen, wider=wider)
        found = _measured(replace(chosen, network=network), here)
        if not found.fits:
            return replace(chosen, wider=_missing(found, str(network.channels)))
        chosen = found
    return chosen


def _sizes(facts: Facts, given: Mapping[str, Any]) -> list[int]:
    """Return the image sizes to try, ascending: no image has to be enlarged much."""
    if "prepare.image_size" in given:
        return [int(given["prepare.image_size"])]
    return [size for size in NETWORKS if size <= max(min(NETWORKS), facts.report.median_side)]


def _measured(plan: Plan, here: World) -> Plan:
    """Return a plan with the measurements of its network."""
    classes = list(plan.facts.classes)
    images = ExpectedImages(plan.size, 1 if plan.facts.gray else 3, classes, "")
    settings = nested({key: choice.value for key, choice in choose(plan).items()})
    config: Config = params.validate(settings)
    say(f"init: measuring {plan.network.channels} channels at {plan.size} pixels")
    measured = measure(config, images, here, plan.memory)
    return replace(plan, measured=measured, classifier=time_of_classifier(images))


def _missing(plan: Plan, what: str) -> str:
    """Return why a plan does not fit, for a comment."""
    if plan.measured.microbatches(plan.batch, plan.memory) is None:
        return f"{what} takes more memory than there is"
    if plan.time is None:
        return f"{what} would train for {in_words(plan.available)}, more than {in_words(NIGHT)}"
    return f"{what} would train for {in_words(plan.seconds_for(plan.network.least))} at least"


def _check_time(plan: Plan) -> None:
    """Raise UserError if hardly any time remains for training."""
    if plan.time is None or plan.available >= LEAST_SHARE * plan.time:
        return
    needed = plan.other_seconds / (1 - LEAST_SHARE / (1 - SAMPLING))
    raise UserError(
        f"--time: got {in_words(plan.time)}, of which reading the images, scores and the start of "
        f"programs take about {in_words(plan.other_seconds)}. Give at least {in_words(needed)}."
    )


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name as sections."""
    sections: dict[str, Any] = {}
    for key, value in settings.items():
        *path, name = key.split(".")
        section = sections
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return sections


# Output


def _about(plan: Plan) -> str:
    """Return the comment at the top of the file."""
    asked = f" --time {in_words(plan.time)}" if plan.time else ""
    report = plan.facts.report
    return (
        f"Settings for {one_line(report.source)}, chosen by `ddpm init`{asked} on this machine "
        f"({plan.device}).\n"
        f"Time of `ddpm run`: about {in_words(sum(plan.times.values()))}. Other settings have "
        "their defaults; `ddpm params` explains all."
    )


def _summary(plan: Plan, choices: Mapping[str, Choice]) -> str:
    """Return the main settings with their reasons, and the time of each verb."""
    table = Table("setting", "value", "reason")
    for key in SHOWN:
        table.add_row(key, str(choices[key].value), choices[key].reason)
    console = Console(width=110)
    with console.capture() as capture:
        console.print(table)
    times = ", ".join(f"{verb} {in_words(seconds)}" for verb, seconds in plan.times.items())
    total = in_words(sum(plan.times.values()))
    lines = [capture.get().rstrip(), f"Time of `ddpm run`: about {total} ({times})."]
    if plan.time is None:
        lines.append("To choose the time of the run: --time 2h")
    if plan.measured.others > BUSY:
        lines.append(
            f"Other programs took {plan.measured.others:.0%} of the processors meanwhile. Without "
            "them the run would be shorter: repeat `ddpm init` when the machine is idle."
        )
    return "\n".join(lines)


def init_file(source: str, overrides: Sequence[str], time_limit: str | None, output: Path) -> None:
    """Write the params file of `settings_for`, `-` for stdout, and print its summary.

    Raises UserError as `settings_for` does, and if the file exists.
    """
    to_stdout = str(output) == "-"
    if not to_stdout and output.exists():
        raise UserError(f"{output} already exists. Give a new file (-o), or remove it.")
    if not to_stdout and not output.parent.is_dir():
        raise UserError(f"The folder {output.parent} of {output} does not exist.")
    text, summary = settings_for(source, overrides, duration(time_limit) if time_limit else None)
    if to_stdout:
        print(text, end="")
        say(summary)
        return
    with output.open("x", encoding="utf-8") as file:
        file.write(text)
    option = "" if output == Path("params.yaml") else f" -p {shlex.quote(str(output))}"
    print(f"{printable(summary)}\nWrote {output}. Next: ddpm run{option}")
