"""What every command has: the options that name settings, and errors told in a sentence."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ddpm_core import params
from ddpm_core.config import Config
from ddpm_core.console import say, telling

ParamsOption = Annotated[
    Path | None,
    typer.Option("--params", "-p", help="The params file; default params.yaml, else the digits."),
]
WorkspaceOption = Annotated[
    str | None, typer.Option("--workspace", "-w", help="Where the run lives; default: params'.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-S", metavar="SECTION.KEY=VALUE", help="Override one setting."),
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


def verb(function: Callable[..., Any], to: typer.Typer) -> Callable[..., Any]:
    """Register a command that turns our errors into one message and an exit status."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            with telling(f"ddpm {sys.argv[1] if len(sys.argv) > 1 else ''}"):
                function(*args, **kwargs)
        except KeyboardInterrupt:
            kept = sys.argv[1] in KEEPING
            say("Interrupted." + (" The same command goes on from what was finished." * kept))
            raise SystemExit(130) from None
        except BrokenPipeError:
            raise SystemExit(141) from None

    return to.command(name=function.__name__.rstrip("_").replace("_", "-"))(guarded)
