"""What all commands share: the options that choose settings, and the handling of errors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.console import report_errors, say
from ddpm_core.errors import UserError

ParamsOption = Annotated[
    Path | None,
    typer.Option(
        "--params",
        "-p",
        help="Params file. Default: ./params.yaml if it exists, else the built-in settings.",
    ),
]
WorkspaceOption = Annotated[
    str | None,
    typer.Option(
        "--workspace",
        "-w",
        help="Directory or s3://bucket/prefix of the run. Default: the setting `workspace`.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-S",
        metavar="SECTION.KEY=VALUE",
        help="Override one setting, e.g. -S train.steps=2000. Repeatable.",
    ),
]

# Commands that can be interrupted without losing finished work.
RESUMABLE = ("train", "sample", "evaluate", "register", "run", "compare")


def load(
    file: Path | None,
    workspace: str | None,
    overrides: list[str] | None,
    trained: bool = False,
) -> Config:
    """Return the config of a command, from `file`, else ./params.yaml, else the defaults.

    `trained`: the command only uses checkpoints, which contain the settings they were trained
    with. So `sample` does not have to fit `model` and `diffusion` of this config.
    """
    default = Path("params.yaml")
    file = file or (default if default.exists() else None)
    return params.load(file, overrides or (), workspace, trained)


def _options(given: Mapping[str, Any]) -> list[str]:
    """Return the options -p, -w and -S of a command that was called with these arguments."""
    named = [("-p", given.get("p")), ("-w", given.get("w"))]
    named += [("-S", item) for item in given.get("s") or ()]
    return [part for option, value in named if value for part in (option, str(value))]


def verb(function: Callable[..., Any], to: typer.Typer) -> Callable[..., Any]:
    """Add a function to an app as a command that ends with a message and an exit status."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            with report_errors(f"ddpm {sys.argv[1] if len(sys.argv) > 1 else ''}"):
                try:
                    function(*args, **kwargs)
                except UserError as error:
                    error.options = _options(kwargs)  # so that a suggested command can be copied
                    raise
        except KeyboardInterrupt:
            resumable = sys.argv[1] in RESUMABLE
            say("Interrupted." + " Run the same command again to resume." * resumable)
            raise SystemExit(130) from None
        except BrokenPipeError:
            raise SystemExit(141) from None

    return to.command(name=function.__name__.rstrip("_").replace("_", "-"))(guarded)
