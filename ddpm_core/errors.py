"""Errors that the user can fix. The program prints their message without a traceback."""

from __future__ import annotations

import importlib
import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from ddpm_core.text import counted, masked

MAX_SHOWN = 60  # characters of a value in a message
# Kubernetes puts this file into each container.
TERMINATION_LOG = Path(os.environ.get("DDPM_TERMINATION_LOG", "/dev/termination-log"))
_MAX_TERMINATION = 4096  # bytes of it that Kubernetes keeps


@dataclass(frozen=True)
class Problem:
    """One invalid setting: where it is, what it is, what is allowed, and what to do.

    `str` renders it: "train.steps: got 0; must be at least 1".
    """

    path: str  # dotted, as after -S
    got: str  # "got 0", "missing", "unknown key"
    expected: str = ""  # "must be at least 1"
    hint: str = ""  # "did you mean train.optimizer.lr?"
    option: str = ""  # the command-line option that set it, such as -S
    involves: tuple[str, ...] = ()  # the other settings without which it could be valid

    def __str__(self) -> str:
        said = "; ".join(part for part in (self.got, self.expected, self.hint) if part)
        return f"{self.option} {self.path}: {said}".lstrip()

    def below(self, section: str) -> Problem:
        """Return the problem with its paths relative to the parent of `section`.

        A problem without a path becomes that of `section` itself, which is then a value.
        """
        path, *involves = (f"{section}.{path}" for path in (self.path, *self.involves))
        return replace(self, path=path.rstrip("."), involves=tuple(involves))


def got(value: object) -> str:
    """Return "got VALUE", with the value as a person would write it in YAML, cut if it is long."""
    named = {None: "null", True: "true", False: "false"}
    try:
        text = named[value] if value is None or isinstance(value, bool) else repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; nested lists
        return f"got a value of type {type(value).__name__}"
    text = masked(text)  # before it is cut, which might remove the end of a secret's context
    return f"got {text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + '...'}"


class UserError(Exception):
    """An error that the user can fix; exit status 1.

    The message says what is wrong, what is allowed and what to do. `problems` are listed below it,
    one a line. `run` are the verbs of `ddpm` that solve it; the program sets `options` to the
    command-line options that they need as well. The text may reach a log, an HTTP answer or a page,
    so `str` masks the secrets of URIs.
    """

    def __init__(
        self, message: str = "", problems: Sequence[Problem] = (), run: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.problems, self.run = tuple(problems), tuple(run)
        self.options: Sequence[str] = ()

    def __str__(self) -> str:
        commands = [f"`{shlex.join(['ddpm', verb, *self.options])}`" for verb in self.run]
        message = super().__str__() + (f" Run {' and '.join(commands)}." if commands else "")
        return masked("\n".join([message, *(f"  {problem}" for problem in self.problems)]))


def invalid(problems: Sequence[Problem], place: str = "") -> UserError:
    """Return the error that lists invalid settings: "2 problems in params.yaml:" and a line each.

    `place` is the file or object that contains the settings; empty: it is left out.
    """
    where = f" in {place}" if place else ""
    return UserError(f"{counted(len(problems), 'problem')}{where}:", problems)


class Invalid(ValueError):
    """Problems that a pydantic validator found. Their paths are relative to the validated section.

    `problems.problems_of` takes them out of the ValidationError again.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class Unavailable(UserError):
    """A server does not respond, or reports an internal problem. The same call may work later."""


class Denied(UserError):
    """A server denied access: keys are missing, wrong or without permission."""


class NotFinite(UserError):
    """Training or sampling gave values that are not finite: a learning rate may be too high."""


class Corrupt(UserError):
    """A file or folder does not contain what was written: it is damaged, incomplete or forged."""


class Interrupted(Exception):
    """The work stopped on request (SIGTERM, Ctrl-C) after everything was saved.

    `status` is the exit status that makes a scheduler start the same command again.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency and return it.

    Raises:
        UserError: the package is missing, and `extra` installs it; or its import failed.
    """
    try:
        return importlib.import_module(module)
    except MemoryError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(not_installed((error.name or module).partition(".")[0], extra)) from error
    except Exception as error:  # a package may raise anything while it is imported
        package = module.partition(".")[0]
        raise UserError(
            f"The package {package!r} is installed but cannot be imported "
            f"({type(error).__name__}: {error}). To reinstall it: "
            f"pip install --force-reinstall 'ddpm-core[{extra}]'"
        ) from error


def not_installed(package: str, extra: str) -> str:
    """Return the message that a package is missing, and which extra installs it."""
    return (
        f"The package {package!r} is not installed. It comes with the extra {extra!r}: "
        f"pip install 'ddpm-core[{extra}]'"
    )


def write_termination_message(error: BaseException | str) -> None:
    """Write {"error": MESSAGE} where Kubernetes reads why a container ended; "" clears it.

    `kubectl describe pod` shows it, and programs read it from the pod's status even if the log is
    gone. A long message is cut. Does nothing where the file does not exist or is not writable.
    """
    message = masked(str(error))
    while len(data := json.dumps({"error": message}).encode()) > _MAX_TERMINATION:
        message = message[: len(message) * 3 // 4]
    with suppress(OSError), TERMINATION_LOG.open("r+b") as file:  # never creates the file
        file.truncate()
        file.write(data if message else b"")
