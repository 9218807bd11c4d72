"""The mistakes that are the user's to mend: one sentence each, never a traceback."""

from __future__ import annotations

import importlib
from types import ModuleType

from ddpm_core.masking import masked


class UserError(Exception):
    """What was given, where, what is allowed, and what to do; exit status 1.

    Its text may reach a log, an HTTP answer or a page, so it comes without the secrets of URIs.
    """

    def __str__(self) -> str:
        return masked(super().__str__())


class Corrupt(UserError):
    """A file or folder that is not what was written: damaged, half there, or made up."""


class Interrupted(Exception):
    """The work stopped at a request (SIGTERM, Ctrl-C) with everything saved.

    `status` is the exit status that tells a scheduler to start the same command again.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency.

    Raises:
        UserError: it is missing, and which extra brings it; or its import failed, and why.
    """
    try:
        return importlib.import_module(module)
    except MemoryError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(not_installed((error.name or module).partition(".")[0], extra)) from error
    except Exception as error:  # whatever a package does while it is imported
        package = module.partition(".")[0]
        raise UserError(
            f"The package {package!r} is installed but cannot be imported "
            f"({type(error).__name__}: {error}). To reinstall it: "
            f"pip install --force-reinstall 'ddpm-core[{extra}]'"
        ) from error


def not_installed(package: str, extra: str) -> str:
    """Return the message that a package is missing, and which extra brings it."""
    return (
        f"The package {package!r} is not installed. It comes with the extra {extra!r}: "
        f"pip install 'ddpm-core[{extra}]'"
    )
