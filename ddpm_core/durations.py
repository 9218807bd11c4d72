"""Times as people write them, 90s, 5m, 2h, 1d, and as they read them."""

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


def in_words(seconds: float) -> str:
    """How long that is to a person: 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"
