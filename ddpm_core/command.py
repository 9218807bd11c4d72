"""What every command has: the options that name settings, and errors told in a sentence."""

from __future__ import annotations

import functools
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.console import say, telling
from ddpm_core.errors import UserError

ParamsOption = Annotated[
    Path | None,
    typer.Option(
        "--params",
        "-p",
        help="Settings file. Default: ./params.yaml where there is one, else the digits.",
    ),
]
WorkspaceOption = Annotated[
    str | None,
    typer.Option(
        "--workspace",
        "-w",
        help="Directory or s3://bucket/prefix of the run. Default: `workspace` of the settings.",
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

# Commands that keep what they have finished when they are interrupted.
KEEPING = ("train", "sample", "evaluate", "register", "run")


def load(
    file: Path | None,
    workspace: str | None,
    overrides: list[str] | None,
    trained: bool = False,
) -> Config:
    """The settings of a command: those of the file named, of ./params.yaml, or the defaults.

    `trained`: it works on checkpoints alone, whose own settings say what they can draw.
    """
    default = Path("params.yaml")
    file = file or (default if default.exists() else None)
    return params.load(file, overrides or (), workspace, trained)


# Commands that errors name as `ddpm VERB`, for what is to be done first.
_NAMED = re.compile(r"`(ddpm (?:prepare|train|sample|evaluate|register|run))`")


def completed(message: str, options: Sequence[str]) -> str:
    """A message whose commands work on the same settings and workspace as the present one."""
    return _NAMED.sub(lambda found: f"`{shlex.join([*found[1].split(), *options])}`", message)


def _options(given: Mapping[str, Any]) -> list[str]:
    """The options -p, -w and -S of a command that was called with these arguments."""
    named = [("-p", given.get("p")), ("-w", given.get("w"))]
    named += [("-S", item) for item in given.get("s") or ()]
    return [part for option, value in named if value for part in (option, str(value))]


def verb(function: Callable[..., Any], to: typer.Typer) -> Callable[..., Any]:
    """Register a command that turns our errors into one message and an exit status."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            with telling(f"ddpm {sys.argv[1] if len(sys.argv) > 1 else ''}"):
                try:
                    function(*args, **kwargs)
                except UserError as error:
                    error.args = (completed(str(error), _options(kwargs)),)
                    raise
        except KeyboardInterrupt:
            kept = sys.argv[1] in KEEPING
            say("Interrupted." + (" The same command goes on from what was finished." * kept))
            raise SystemExit(130) from None
        except BrokenPipeError:
            raise SystemExit(141) from None

    return to.command(name=function.__name__.rstrip("_").replace("_", "-"))(guarded)
