"""The entry point of the installed `ddpm`. Ctrl-C prints no traceback, even during imports."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the program."""
    try:
        from ddpm_core.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
