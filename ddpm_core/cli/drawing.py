"""The commands that draw images."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ddpm_core.cli.command import ParamsOption, SetOption, WorkspaceOption, load
from ddpm_core.errors import Problem, UserError, got
from ddpm_core.storage.workspace import REPORT, Workspace

ImageOption = Annotated[
    Path | None, typer.Option("--from", help="Start from this image, and write to --output.")
]
StrengthOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Share of the time up to which noise is added to it; 0: the image itself, 1: no trace "
        "of it. Default: 0.6; with --mask 1.",
    ),
]
MaskOption = Annotated[
    Path | None,
    typer.Option(help="Redraw only where this image is white, and keep the rest exactly."),
]


def sample(
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Draw only shard I of N; I counts from 0.")
    ] = None,
    image: ImageOption = None,
    strength: StrengthOption = None,
    mask: MaskOption = None,
    passes: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Times that --mask draws each part. Default: 5."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Images to draw from it. Default: 8.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder for them. Default: edited.")
    ] = None,
) -> None:
    """Draw images from the chosen checkpoints.

    With --from, the best of them starts from an image, beside the samples that are scored.
    """
    config = load(p, w, s, trained=True)
    edit = {"strength": strength, "mask": mask, "passes": passes, "count": count, "output": output}
    given: dict[str, Any] = {name: value for name, value in edit.items() if value is not None}
    _check_options(image, shard, given)
    if image is not None:
        from ddpm_core.sampling.from_image import Edit, draw_from_image

        folder = given.pop("output", Path("edited"))
        workspace = Workspace.open(config.workspace)
        typer.echo(draw_from_image(config, workspace, Edit(image, **given), folder))
        return
    from ddpm_core.runtime.distributed import world
    from ddpm_core.sampling.plan import parse_shard
    from ddpm_core.sampling.run import sample

    if config.sample.checkpoints == "best" and "DVC_STAGE" in os.environ:
        raise UserError(
            "sample.checkpoints: got best; must be all, latest or a list of steps in a DVC "
            "pipeline, where the stage evaluate depends on sample."
        )
    one = parse_shard(shard) if shard else None
    with world(config.device, os.environ) as here:
        sample(config, Workspace.open(config.workspace), here, one)


def _check_options(image: Path | None, shard: str | None, given: Mapping[str, object]) -> None:
    """Raise UserError with the options of `sample` that do not go together."""
    if image is None:
        problems = [
            Problem(f"--{name}", got(str(given[name])), "requires --from") for name in given
        ]
    else:
        problems = [Problem("--shard", got(shard), "not possible with --from")] if shard else []
        if "passes" in given and "mask" not in given:
            problems.append(Problem("--passes", got(given["passes"]), "requires --mask"))
    if problems:
        raise UserError("These options do not go together:", problems)


def destroy(
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    images: Annotated[int, typer.Option(min=1, max=16, help="Number of images.")] = 4,
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("destroy.gif"),
) -> None:
    """Animate the forward process, a row per schedule."""
    config = load(p, w, s, trained=True)
    from ddpm_core.sampling.animations import destroy_prepared

    typer.echo(destroy_prepared(config, Workspace.open(config.workspace), images, output))


def draw(
    kind: Annotated[
        str | None,
        typer.Argument(help="denoising, guidance, interpolation, destruction. Default: all."),
    ] = None,
    p: ParamsOption = None,
    w: WorkspaceOption = None,
    s: SetOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file of one KIND: .gif or .png.")
    ] = None,
) -> None:
    """Draw figures of what a network does.

    They show how noise becomes images, classes or prompts under growing guidance, the way between
    two images, and how images become noise. Without KIND, they become part of the report.
    """
    config = load(p, w, s, trained=True)
    workspace = Workspace.open(config.workspace)
    from ddpm_core.sampling.figures import draw_figure, draw_for_report

    if kind is not None:
        typer.echo(draw_figure(config, workspace, kind, output))
        return
    if output is not None:
        raise UserError("--output: requires KIND. Without KIND, figures go into the report.")
    from ddpm_core.evaluation.report import render_report

    typer.echo(draw_for_report(config, workspace))
    render_report(workspace)
    typer.echo(workspace.shown(REPORT))
