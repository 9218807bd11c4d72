"""The commands before a run: what a source contains, and a params file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddpm_core.cli.command import SetOption, load
from ddpm_core.config.template import presets, template


def check_data(
    source: Annotated[str, typer.Argument(help="A folder of images, or any other prepare.source.")],
    s: SetOption = None,
) -> None:
    """Report what an image source contains.

    Also reports what is wrong with it, before you prepare it. -S changes how it is read, as in
    -S prepare.caption_column=prompt.
    """
    from ddpm_core.data.check import check_data

    check_data(source, load(None, None, s).prepare)


def init(
    source: Annotated[str, typer.Argument(help="A folder of images, or any other prepare.source.")],
    s: SetOption = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The new params file; -: stdout.")
    ] = Path("params.yaml"),
    time: Annotated[
        str | None,
        typer.Option(help="Time for the whole run here: 10m, 8h. Default: what the images take."),
    ] = None,
) -> None:
    """Write settings that fit an image source.

    They also fit this machine, which is measured, and the time. Comments in the file explain each.
    -S fixes a setting, as in -S prepare.image_size=64.
    """
    from ddpm_core.setup.init import init_file

    init_file(source, s or (), time, output)


def params(
    preset: Annotated[
        str | None,
        typer.Argument(help=f"{', '.join(presets())}. Default: the built-in settings."),
    ] = None,
) -> None:
    """Print a params file with every setting explained.

    To start from a preset: ddpm params dtd-10 > params.yaml
    """
    typer.echo(template(preset), nl=False)
