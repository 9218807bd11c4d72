"""What the pages have in common: their templates, and how they print numbers.

Imports no PyTorch, so that `ddpm watch` also runs in the light image.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ddpm_core.errors import require

LIVE_SCRIPT = Path(__file__).parent / "live.js"  # of all pages that follow something


@functools.cache  # it keeps compiled templates
def environment(*folders: Path) -> Any:
    """Return a Jinja environment with the templates of this folder, and of `folders`."""
    jinja2 = require("jinja2", "eval")
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=lambda name: name != "report.css",
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    found.filters |= {"number": number, "percent": percent}
    return found


def number(value: float) -> str:
    """Return a number with three or four digits: 0.0123, 4.21, 175.2, 3,120."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share with a non-breaking space: 1.2 %, 37 %."""
    digits = f"{100 * share:.2g}" if share < 0.1 else f"{100 * share:.0f}"
    return f"{digits}\N{NO-BREAK SPACE}%"
