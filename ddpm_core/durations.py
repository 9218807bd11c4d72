"""Times as people write them: 90s, 5m, 2h, 1d."""

from __future__ import annotations

import re

from ddpm_core.errors import UserError

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Seconds of `90`, `90s`, `5m`, `2h` or `1d`. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not match:
        raise UserError(f"{text!r} given; a time such as 90s, 5m, 2h or 1d is needed.")
    return float(match[1]) * _UNITS[match[2]]
