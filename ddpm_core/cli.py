"""The `ddpm` program: one command a verb, each a few lines around its function."""

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

from ddpm_core import __version__, command
from ddpm_core.command import ParamsOption, SetOption, WorkspaceOption, load
from ddpm_core.config.template import presets, template
from ddpm_core.console import guard
from ddpm_core.errors import UserError, require
from ddpm_core.runtime.home import provide_home
from ddpm_core.storage.workspace import REPORT, Workspace

app = typer.Typer(
    name="ddpm",
    help="A folder of images goes in; a registered, served diffusion model comes out: "
    "prepare, train, sample, evaluate, register. `ddpm run` does all five.",
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
        typer.Option(help="auto: move a run with other settings to superseded/; strict: refuse."),
    ] = "auto",
    from_step: Annotated[
        int | None,
        typer.Option(help="Resume from this step's snapshot; later ones move to superseded/."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, and stop.")] = False,
) -> None:
    """Train, or go on training, up to train.steps."""
    config = load(p, w, s)
    if resume not in ("auto", "strict"):
        raise UserError(f"--resume {resume}: auto or strict is needed.")
    from ddpm_core.training import launch as launcher

    launcher.train(config, os.environ, sys.argv[1:], resume == "strict", from_step, dry_run)


@verb
def sample(
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Draw shard I of N alone; I from 0.")
    ] = None,
) -> None:
    """Draw images from the chosen checkpoints."""
    config = load(p, w, s, trained=True)
    from ddpm_core.runtime.distributed import world
    from ddpm_core.sampling.plan import parse_shard
    from ddpm_core.sampling.run import sample

    if config.sample.checkpoints == "best" and "DVC_STAGE" in os.environ:
        raise UserError(
            "sample.checkpoints: best, but in DVC's chain evaluate depends on sample: give all, "
            "latest or a list of steps."
        )
    one = parse_shard(shard) if shard else None
    with world(config.device, os.environ) as here:
        sample(config, Workspace.open(config.workspace), here, one)


@verb
def evaluate(p: ParamsOption = None, w: WorkspaceOption = None, s: SetOption = None) -> None:
    """Score the samples; write tables, plots, a report."""
    config = load(p, w, s, trained=True)
    from ddpm_core.evaluation.evaluate import evaluate

    evaluate(config, Workspace.open(config.workspace))


@verb
def register(p: ParamsOption = None, w: WorkspaceOption = None, s: SetOption = None) -> None:
    """Register the best checkpoint; promote if better.

    It becomes a version of the registered model, and the champion where it beats the last.
    """
    config = load(p, w, s, trained=True)
    from ddpm_core.registry.register import register

    register(config, Workspace.open(config.workspace))


@verb
def serve(
    p: ParamsOption = None,
    s: SetOption = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0: everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8080,
    every: Annotated[
        float,
        typer.Option(
            min=0.1, max=86400, metavar="SECONDS", help="How often to look for a new champion."
        ),
    ] = 15.0,
    max_work: Annotated[
        int, typer.Option(min=1, help="Largest request, in images x pixels x steps.")
    ] = 40_000_000,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get 429.")] = 16,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Time for a client to send a header, or a body."
        ),
    ] = 10.0,
) -> None:
    """Serve the champion over HTTP.

    The next champion answers as soon as there is one; no request is lost.
    """
    config = load(p, None, s, trained=True)
    require("uvicorn", "tracking")
    from ddpm_core.registry.server import Limits, serve

    serve(config, host, port, every, Limits(max_work, queue, timeout))


@verb
def run(p: ParamsOption = None, w: WorkspaceOption = None, s: SetOption = None) -> None:
    """Do all five verbs, skipping what is up to date."""
    config = load(p, w, s)
    from ddpm_core import chain

    chain.run(config, Workspace.open(config.workspace), os.environ, sys.argv[1:])


@verb
def status(p: ParamsOption = None, w: WorkspaceOption = None, s: SetOption = None) -> None:
    """Tell what the workspace holds, what is stale, and why."""
    config = load(p, w, s)
    from ddpm_core import chain

    typer.echo(chain.status(config, Workspace.open(config.workspace)))


@verb
def wait(
    verb: Annotated[str, typer.Argument(help="prepare, train, sample, evaluate or register.")],
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    limit: Annotated[str, typer.Option(help="Give up after: 90s, 5m, 2h, 1d.")] = "2h",
    interval: Annotated[str, typer.Option(help="Time between two checks.")] = "5s",
) -> None:
    """Block until a verb's output is up to date.

    It is when it is in the workspace, whole and of these settings.
    """
    config = load(p, w, s)
    from ddpm_core.config.durations import duration
    from ddpm_core.waiting import wait

    wait(config, verb, duration(limit), duration(interval))


@verb
def check_data(
    source: Annotated[str, typer.Argument(help="A folder of images, or any prepare.source.")],
    s: SetOption = None,
) -> None:
    """Report what an image source holds.

    Says also what is wrong with it, before it is prepared. -S sets how it is read, as in
    -S prepare.caption_column=prompt.
    """
    from ddpm_core.data.check import check_data

    check_data(source, load(None, None, s).prepare)


@verb
def params(
    preset: Annotated[
        str | None,
        typer.Argument(help=f"{', '.join(presets())}. Default: the built-in settings."),
    ] = None,
) -> None:
    """Print a params file with every setting explained.

    To start from: ddpm params dtd-10 > params.yaml
    """
    typer.echo(template(preset), nl=False)


@verb
def methods() -> None:
    """List the selectable methods with formula and source."""
    from ddpm_core.training.methods import describe

    typer.echo(describe())


@verb
def report(p: ParamsOption = None, w: WorkspaceOption = None, s: SetOption = None) -> None:
    """Rewrite report.html from existing scores."""
    config = load(p, w, s, trained=True)
    from ddpm_core.evaluation.report import render_report

    workspace = Workspace.open(config.workspace)
    render_report(workspace)
    typer.echo(workspace.shown(REPORT))


@verb
def destroy(
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    images: Annotated[int, typer.Option(min=1, max=16, help="How many images.")] = 4,
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("destroy.gif"),
) -> None:
    """Animate the forward process, a row per schedule."""
    config = load(p, w, s, trained=True)
    from ddpm_core.sampling.animations import destroy_prepared

    typer.echo(destroy_prepared(config, Workspace.open(config.workspace), images, output))


@verb
def import_diffusers(
    folder: Annotated[Path, typer.Argument(help="A folder that diffusers or accelerate saved.")],
    output: Annotated[Path, typer.Argument(help="The checkpoint folder to write.")],
    schedule: Annotated[
        str | None, typer.Option(help="diffusion.schedule, for a network without a scheduler.")
    ] = None,
    timesteps: Annotated[int | None, typer.Option(help="diffusion.timesteps, likewise.")] = None,
    prediction: Annotated[str | None, typer.Option(help="diffusion.prediction, likewise.")] = None,
) -> None:
    """Convert a UNet2DModel of diffusers to a checkpoint.

    FOLDER is a pipeline, a bare network or a checkpoint folder of accelerate; half-precision and
    sharded safetensors are read too. Training can start from the checkpoint: train.init.
    """
    from ddpm_core.interop.checkpoints import import_checkpoint

    process = {"schedule": schedule, "timesteps": timesteps, "prediction": prediction}
    given = {name: value for name, value in process.items() if value is not None}
    typer.echo(import_checkpoint(folder, output, given))


@verb
def export_diffusers(
    output: Annotated[Path, typer.Argument(help="The folder to write.")],
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    step: Annotated[int | None, typer.Option(help="Which checkpoint; default: newest.")] = None,
) -> None:
    """Convert a checkpoint to a diffusers pipeline."""
    config = load(p, w, s, trained=True)
    from ddpm_core.interop.checkpoints import export_checkpoint

    typer.echo(export_checkpoint(config, Workspace.open(config.workspace), step, output))


@functools.partial(command.verb, to=bench)
def scaling(
    p: ParamsOption = None,
    s: SetOption = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help="Largest number to measure. Default: all GPUs, else up to 4 cores.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Steps per measurement; the first half is warm-up.")
    ] = 30,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers here too.")
    ] = None,
) -> None:
    """Train with 1 to N workers; tell speed-up and its costs."""
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
    """Options of the program itself."""


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def join_commands() -> None:
    """Add the commands of packages that are installed beside this one."""
    for found in importlib.metadata.entry_points(group="ddpm.commands"):
        app.add_typer(found.load(), name=found.name)


def main() -> None:
    """The installed program."""
    # By default a process ends at once, and its temporary folders stay; the first one of a
    # container has no default action, and would last until the end of its grace period.
    signal.signal(signal.SIGTERM, _leave)
    # Threads that spin while they wait take the cores from each other as soon as anything else
    # runs: on two cores beside one busy process a training step took 4 times as long. Those that
    # sleep at once, with 0, wake late: on two quiet cores it took 1.7 times as long.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    guard()
    provide_home()
    join_commands()
    app()


if __name__ == "__main__":
    main()
