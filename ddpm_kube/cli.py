"""The commands `ddpm jobs train`, `list` and `gc`, which join the program `ddpm`."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ddpm_core.cli.command import ParamsOption, SetOption, WorkspaceOption, load, verb
from ddpm_core.config import yaml_text
from ddpm_core.config.durations import duration, in_words
from ddpm_core.console import printable
from ddpm_core.errors import UserError, require
from ddpm_core.text import counted

jobs = typer.Typer(
    help="Train as an elastic PyTorchJob or TrainJob on Kubernetes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
command = functools.partial(verb, to=jobs)

NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Default: the pod's own, or that of the kubeconfig."),
]


@command
def train(
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    backend: Annotated[
        str | None,
        typer.Option(help="pytorchjob, trainjob, or auto: what the cluster has (default)."),
    ] = None,
    min_replicas: Annotated[
        int | None, typer.Option("--min", help="Training continues while this many workers run.")
    ] = None,
    max_replicas: Annotated[int | None, typer.Option("--max", help="Workers requested.")] = None,
    image: Annotated[str | None, typer.Option(help="Default: the image of this pod.")] = None,
    volume: Annotated[
        list[str] | None, typer.Option(metavar="CLAIM:PATH", help="A claim that the workers mount.")
    ] = None,
    k: Annotated[
        list[str] | None,
        typer.Option("--job", "-K", metavar="OPTION=VALUE", help="An option of docs/launcher.md."),
    ] = None,
    options: Annotated[
        Path | None,
        typer.Option(help="A YAML file of options; -K and flags override it."),
    ] = None,
    run_id: Annotated[
        str | None, typer.Option(help="Names the job. Default: the workspace.")
    ] = None,
    namespace: NamespaceOption = None,
    patience: Annotated[
        str | None,
        typer.Option(help="To wait for nodes, quota, images and the controller. Default: 15m."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the job after it has ended.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job and exit; for auto, the PyTorchJob.")
    ] = False,
) -> None:
    """Train in a job of the cluster and follow it to its end.

    Prints the cause if the job fails, and deletes the job. If training is up to date, creates none.
    """
    given = {"min_replicas": min_replicas, "max_replicas": max_replicas, "image": image}
    named = {**given, "backend": backend, "volumes": volume, "patience": patience}
    wanted = merge_options(options, named, k or [])
    config = load(p, w, s)
    require("kubernetes", "pipeline")
    from ddpm_kube.launch import preview, train
    from ddpm_kube.options import read

    chosen, run = read(wanted), run_id or config.workspace
    if dry_run:
        typer.echo(yaml.safe_dump(preview(config, chosen, run, os.environ, namespace)))
        return
    train(config, chosen, run, os.environ, namespace, keep=keep)


@command
def list_(namespace: NamespaceOption = None) -> None:
    """List the jobs that launchers created, and their states."""
    require("kubernetes", "pipeline")
    from ddpm_kube.gc import jobs
    from ddpm_kube.location import locate

    found = list(jobs(locate(os.environ, namespace).cluster))
    if not found:
        typer.echo("No jobs.")
        return
    table = Table("job", "state", "workers", "age", "run", "launcher", box=None, pad_edge=False)
    for one in found:
        cells = (one.name, one.state, str(one.workers), in_words(one.age), one.run_id, one.launcher)
        table.add_row(*(escape(printable(cell)) for cell in cells))
    Console(width=10_000).print(table)  # nobody can copy a name that is wrapped or cut


@command
def gc(
    older_than: Annotated[str, typer.Option(help="For example 30m, 1h or 2d.")] = "1h",
    namespace: NamespaceOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list them.")] = False,
) -> None:
    """Delete jobs that finished, or lost their launcher, some time ago."""
    limit = parse_duration(older_than)
    require("kubernetes", "pipeline")
    from ddpm_kube.gc import collect
    from ddpm_kube.location import locate

    leftover = collect(locate(os.environ, namespace).cluster, limit, dry_run)
    for one in leftover:
        typer.echo(f"{'would delete' if dry_run else 'deleted'} {one.name} ({one.state})")
    typer.echo(counted(len(leftover), "job") + (" would be deleted." if dry_run else " deleted."))


def merge_options(file: Path | None, flags: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Return the options of a file, overridden by flags, and by `-K name=value`; not validated."""
    from ddpm_kube.options import read_file

    merged = read_file(file)
    volumes = [_parse_volume(text) for text in flags.pop("volumes", None) or []]
    merged |= {name: value for name, value in flags.items() if value is not None}
    merged |= {"volumes": volumes} if volumes else {}
    for item in settings:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise UserError(f"-K {item}: must be OPTION=VALUE, for example -K memory=4Gi")
        try:
            merged[name] = yaml_text.value(text)
        except ValueError as error:
            raise UserError(f"-K {item}: {error}") from error
    return merged


def parse_duration(text: str) -> float:
    """Return the seconds of 90s, 30m, 1h or 2d. Raises UserError, also without a unit."""
    if not re.fullmatch(r"\d+[smhd]", text):
        raise UserError(f"Invalid duration {text!r}; must be one such as 90s, 30m, 1h or 2d.")
    return duration(text)


def _parse_volume(text: str) -> dict[str, str]:
    claim, colon, path = text.partition(":")
    if not colon:
        raise UserError(
            f"--volume {text}: must be CLAIM:PATH, for example ddpm-workspace:/workspace"
        )
    return {"claim": claim, "path": path}
