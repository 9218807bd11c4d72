"""`ddpm jobs`: training as a PyTorchJob, and the jobs that are there. Joins the program `ddpm`."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ddpm_core.cli.command import ParamsOption, SetOption, WorkspaceOption, load, verb
from ddpm_core.config import yaml_text
from ddpm_core.config.durations import duration
from ddpm_core.errors import UserError, require
from ddpm_core.text import counted

jobs = typer.Typer(
    help="Train as an elastic PyTorchJob on Kubernetes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
command = functools.partial(verb, to=jobs)

NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Default: the pod's own, or that of KUBECONFIG."),
]


@command
def train(
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    min_replicas: Annotated[
        int | None, typer.Option("--min", help="Workers with which training goes on.")
    ] = None,
    max_replicas: Annotated[int | None, typer.Option("--max", help="Workers asked for.")] = None,
    image: Annotated[str | None, typer.Option(help="Default: that of this pod.")] = None,
    volume: Annotated[
        list[str] | None, typer.Option(metavar="CLAIM:PATH", help="A claim that workers mount.")
    ] = None,
    k: Annotated[
        list[str] | None,
        typer.Option("--job", "-K", metavar="OPTION=VALUE", help="An option of docs/launcher.md."),
    ] = None,
    options: Annotated[
        Path | None, typer.Option(help="A YAML file of such options; those above win.")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option(help="Names the job; default: made of the workspace.")
    ] = None,
    namespace: NamespaceOption = None,
    patience: Annotated[
        str, typer.Option(help="How long workers may lack room, quota or image.")
    ] = "30s",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the job when it has ended.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job, and stop.")] = False,
) -> None:
    """Train in a PyTorchJob, and follow it to its end.

    It tells why the job failed, if it does, and leaves nothing behind.
    """
    given = {"min_replicas": min_replicas, "max_replicas": max_replicas, "image": image}
    wanted = gathered(options, {**given, "volumes": volume}, k or [])
    config = load(p, w, s)
    waits = seconds(patience)
    require("kubernetes", "pipeline")
    require("kubeflow.training", "pipeline")
    from ddpm_kube.launch import preview, train
    from ddpm_kube.options import read

    chosen, run = read(wanted), run_id or config.workspace
    if dry_run:
        typer.echo(yaml.safe_dump(preview(config, chosen, run, os.environ, namespace)))
        return
    train(config, chosen, run, os.environ, namespace, patience=waits, keep=keep)


@command
def list_(namespace: NamespaceOption = None) -> None:
    """The jobs that launchers made, and what became of them."""
    require("kubernetes", "pipeline")
    from ddpm_kube.gc import jobs
    from ddpm_kube.here import find

    found = list(jobs(find(os.environ, namespace).cluster))
    if not found:
        typer.echo("No jobs.")
    for one in found:
        typer.echo(
            f"{one.name}  {one.state}, {one.workers} workers, {ago(one.age)} old, "
            f"run {one.run_id}, launcher {one.launcher}"
        )


@command
def gc(
    older_than: Annotated[str, typer.Option(help="Such as 30m, 1h or 2d.")] = "1h",
    namespace: NamespaceOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only name them.")] = False,
) -> None:
    """Delete jobs that ended, or lost their launcher, long ago."""
    limit = seconds(older_than)
    require("kubernetes", "pipeline")
    from ddpm_kube.gc import collect
    from ddpm_kube.here import find

    gone = collect(find(os.environ, namespace).cluster, limit, dry_run)
    for one in gone:
        typer.echo(f"{'would delete' if dry_run else 'deleted'} {one.name} ({one.state})")
    typer.echo(counted(len(gone), "job") + (" would be deleted." if dry_run else " deleted."))


def gathered(file: Path | None, flags: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """The options of a file, of flags and of `-K name=value`, as plain data. Raises UserError."""
    from ddpm_kube.options import of_file

    given = of_file(file)
    volumes = [_claim(text) for text in flags.pop("volumes", None) or []]
    given |= {name: value for name, value in flags.items() if value is not None}
    given |= {"volumes": volumes} if volumes else {}
    for item in settings:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise UserError(f"-K {item}: option=value is needed, as in -K memory=4Gi")
        try:
            given[name] = yaml_text.value(text)
        except ValueError as error:
            raise UserError(f"-K {item}: {error}") from error
    return given


def seconds(text: str) -> float:
    """A time such as 90s, 30m, 1h or 2d: with its unit, and whole. Raises UserError."""
    if not re.fullmatch(r"\d+[smhd]", text):
        raise UserError(f"{text!r} is no time; one such as 90s, 30m, 1h or 2d is needed.")
    return duration(text)


def ago(age: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if age >= 2 * size:
            return f"{age / size:.0f}{unit}"
    return f"{age:.0f}s"


def _claim(text: str) -> dict[str, str]:
    claim, colon, path = text.partition(":")
    if not colon:
        raise UserError(f"--volume {text}: CLAIM:PATH is needed, as in ddpm-workspace:/workspace")
    return {"claim": claim, "path": path}
