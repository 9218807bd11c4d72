"""The `ddpm` program: its commands, each a few lines around the function that does the work."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from ddpm_core import __version__
from ddpm_core.cli import command
from ddpm_core.cli.command import ParamsOption, SetOption, WorkspaceOption, load
from ddpm_core.cli.drawing import destroy, draw, sample
from ddpm_core.cli.start import check_data, init, params
from ddpm_core.console import guard
from ddpm_core.errors import UserError, require
from ddpm_core.runtime.home import provide_home
from ddpm_core.storage.workspace import REPORT, Workspace

app = typer.Typer(
    name="ddpm",
    help="Turn a folder of images into a registered, served diffusion model: "
    "prepare, train, sample, evaluate, register. `ddpm run` runs all five.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

verb = functools.partial(command.verb, to=app)


@verb
def prepare(p: ParamsOption = None, w: WorkspaceOption = None, s: SetOption = None) -> None:
    """Decode, check, split and pack the images."""
    from ddpm_core.data.prepare import prepare

    config = load(p, w, s)
    prepare(config, Workspace.open(config.workspace))


@verb
def train(
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    resume: Annotated[
        str,
        typer.Option(
            help="A run with different settings: auto moves it to superseded/, strict fails."
        ),
    ] = "auto",
    from_step: Annotated[
        int | None,
        typer.Option(help="Resume from the snapshot of this step; later ones move to superseded/."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and exit.")] = False,
) -> None:
    """Train, or resume training, up to train.steps."""
    config = load(p, w, s)
    if resume not in ("auto", "strict"):
        raise UserError(f"--resume: got {resume!r}; must be auto or strict.")
    from ddpm_core.training import launch as launcher

    launcher.train(config, os.environ, sys.argv[1:], resume == "strict", from_step, dry_run)


verb(sample)


@verb
def evaluate(p: ParamsOption = None, w: WorkspaceOption = None, s: SetOption = None) -> None:
    """Score the samples; write tables, plots and a report."""
    config = load(p, w, s, trained=True)
    from ddpm_core.evaluation.evaluate import evaluate

    evaluate(config, Workspace.open(config.workspace))


@verb
def register(p: ParamsOption = None, w: WorkspaceOption = None, s: SetOption = None) -> None:
    """Register the best checkpoint; promote if better.

    The checkpoint becomes a new version of the registered model. If it beats the champion, it
    becomes the champion.
    """
    config = load(p, w, s, trained=True)
    from ddpm_core.registry.register import register

    register(config, Workspace.open(config.workspace))


@verb
def serve(
    p: ParamsOption = None,
    s: SetOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8080,
    every: Annotated[
        float,
        typer.Option(
            min=0.1, max=86400, metavar="SECONDS", help="How often to check for a new champion."
        ),
    ] = 15.0,
    max_work: Annotated[
        int, typer.Option(min=1, help="Size limit of a request, in images x pixels x steps.")
    ] = 40_000_000,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get 429.")] = 64,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="Time for a client to send the header, and the body.",
        ),
    ] = 10.0,
    max_seconds: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="Time limit of a request, with its wait."),
    ] = 600.0,
) -> None:
    """Serve the champion: a page to draw images, and an API.

    A new champion replaces the old one without losing a request.
    """
    config = load(p, None, s, trained=True)
    require("uvicorn", "tracking")
    from ddpm_core.registry.answering import Limits
    from ddpm_core.registry.server import serve

    serve(config, host, port, every, Limits(max_work, queue, timeout, max_seconds))


@verb
def run(p: ParamsOption = None, w: WorkspaceOption = None, s: SetOption = None) -> None:
    """Run all five verbs, skipping what is up to date."""
    config = load(p, w, s)
    from ddpm_core import chain

    chain.run(config, Workspace.open(config.workspace), os.environ, sys.argv[1:])


@verb
def status(p: ParamsOption = None, w: WorkspaceOption = None, s: SetOption = None) -> None:
    """Show what the workspace contains, what is stale, and why."""
    config = load(p, w, s)
    from ddpm_core import chain

    typer.echo(chain.status(config, Workspace.open(config.workspace)))


@verb
def watch(
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0: all addresses.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8088,
) -> None:
    """Show a run in the browser while it trains."""
    config = load(p, w, s, trained=True)
    require("uvicorn", "tracking")
    require("jinja2", "eval")
    from ddpm_core.watch.server import watch

    watch(Workspace.open(config.workspace), host, port)


@verb
def wait(
    verb: Annotated[str, typer.Argument(help="prepare, train, sample, evaluate or register.")],
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    limit: Annotated[str, typer.Option(help="Give up after: 90s, 5m, 2h, 1d.")] = "2h",
    interval: Annotated[str, typer.Option(help="Time between checks.")] = "5s",
) -> None:
    """Block until the output of a verb is up to date.

    Up to date: the output is complete and was made with these settings.
    """
    config = load(p, w, s)
    from ddpm_core import chain
    from ddpm_core.config.durations import duration

    chain.wait(config, verb, duration(limit), duration(interval))


for function in (check_data, init, params):
    verb(function)


@verb
def compare(
    experiment: Annotated[Path, typer.Argument(help="The experiment file.")],
    w: Annotated[
        Path | None,
        typer.Option(
            "--workspace", "-w", help="Folder of runs and results. Default: comparisons/NAME."
        ),
    ] = None,
    s: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-S",
            metavar="KEY=VALUE",
            help="Override a field of the file, e.g. -S data=photos/. Repeatable.",
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs side by side.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure and print the cost, and exit.")
    ] = False,
) -> None:
    """Compare methods at equal training time, with seeds.

    The results, with a verdict in report.html, are in the folder.
    """
    from ddpm_core.comparison.experiment import load as load_experiment

    extra = [] if workers is None else [f"workers={workers}"]
    found = load_experiment(experiment, [*(s or ()), *extra])
    from ddpm_core.comparison.compare import compare

    compare(found, (w or Path("comparisons") / experiment.stem).resolve(), dry_run)


@verb
def methods(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Add formula, source and settings.")
    ] = False,
) -> None:
    """List the selectable methods, one line each."""
    from ddpm_core.training.methods import describe, overview

    typer.echo(describe() if verbose else overview())


@verb
def report(p: ParamsOption = None, w: WorkspaceOption = None, s: SetOption = None) -> None:
    """Rewrite report.html from existing scores."""
    config = load(p, w, s, trained=True)
    from ddpm_core.evaluation.report import render_report

    workspace = Workspace.open(config.workspace)
    render_report(workspace)
    typer.echo(workspace.shown(REPORT))


verb(draw)


verb(destroy)


@verb
def import_diffusers(
    folder: Annotated[Path, typer.Argument(help="A folder written by diffusers or accelerate.")],
    output: Annotated[Path, typer.Argument(help="The checkpoint folder to write.")],
    schedule: Annotated[
        str | None, typer.Option(help="diffusion.schedule, if FOLDER has no scheduler.")
    ] = None,
    timesteps: Annotated[int | None, typer.Option(help="diffusion.timesteps, likewise.")] = None,
    prediction: Annotated[str | None, typer.Option(help="diffusion.prediction, likewise.")] = None,
) -> None:
    """Convert a UNet2DModel of diffusers to a checkpoint.

    FOLDER contains a pipeline, only a network, or a checkpoint of accelerate. Half-precision and
    sharded safetensors work too. To train from the result, set train.init.
    """
    from ddpm_core.interop.checkpoints import import_checkpoint

    process = {"schedule": schedule, "timesteps": timesteps, "prediction": prediction}
    given = {name: value for name, value in process.items() if value is not None}
    typer.echo(import_checkpoint(folder, output, given))


@verb
def export(
    output: Annotated[Path, typer.Argument(help="The folder to write.")],
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    kind: Annotated[str, typer.Option("--format", help="Or safetensors, onnx.")] = "diffusers",
    step: Annotated[int | None, typer.Option(help="Which checkpoint; default: the best.")] = None,
    model: Annotated[str | None, typer.Option(help="Or a version: models:/ddpm@champion.")] = None,
) -> None:
    """Write a model for other programs, with its card."""
    config = load(p, w, s, trained=True)
    from ddpm_core.registry.export import export

    typer.echo(export(config, output, kind, model, step))


@functools.partial(command.verb, to=bench)
def scaling(
    p: ParamsOption = None,
    s: SetOption = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help="Highest number of workers. Default: all GPUs, or up to 4 cores without a GPU.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to measure; the first half is warm-up.")] = 30,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the numbers to this file.")
    ] = None,
) -> None:
    """Train with 1 to N workers; print speed-up and overhead."""
    config = load(p, None, s)
    from ddpm_core.training.bench import document, scaling, table

    measured = scaling(config, workers, steps)
    typer.echo(table(measured))
    if json_file:
        json_file.write_text(json.dumps(document(measured), indent=2) + "\n", encoding="utf-8")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ddpm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Define the options of the program itself."""


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def join_commands() -> None:
    """Add the commands that other installed packages provide."""
    for found in importlib.metadata.entry_points(group="ddpm.commands"):
        app.add_typer(found.load(), name=found.name)


def main() -> None:
    """Run the program with the arguments of the command line."""
    # By default SIGTERM ends a process at once and leaves its temporary folders behind. The first
    # process of a container has no default action: it would run until its grace period ends.
    signal.signal(signal.SIGTERM, _leave)
    # Threads that spin while they wait take cores away from each other when other programs run: on
    # two cores beside one busy process a training step took 4 times as long. With 0, threads sleep
    # at once and wake up late: on two idle cores a step took 1.7 times as long.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    guard()
    provide_home()
    join_commands()
    app()
