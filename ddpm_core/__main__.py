"""Where the installed `ddpm` begins: Ctrl-C while it is loading is no traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """The program."""
    try:
        from ddpm_core.cli import main as loaded

        loaded()
    except KeyboardInterrupt:
        sys.exit(130)
