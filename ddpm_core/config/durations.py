"""Durations as people write them (90s, 5m, 2h, 1d) and as they read them (1 min 30 s)."""

from __future__ import annotations

import re

from ddpm_core.errors import UserError

YEAR = 366 * 86400.0  # seconds; longer waits overflow the integers that the system counts in
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `5m`, `2h` or `1d`; at most a year. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not match:
        raise UserError(f"Got {text!r}; must be a time such as 90s, 5m, 2h or 1d.")
    seconds = float(match[1]) * _UNITS[match[2]]
    if seconds > YEAR:
        raise UserError(f"Got {text!r}; must be at most {YEAR / _UNITS['d']:g}d.")
    return seconds


def in_words(seconds: float) -> str:
    """Return a time in at most two units: 45 s, 3 min 20 s, 2 h, 2 h 5 min, 2 d 4 h."""
    total = round(seconds)
    hours, minutes = total // 3600, total // 60
    parts = [(hours // 24, "d"), (hours % 24, "h"), (minutes % 60, "min"), (total % 60, "s")]
    first = next((index for index, (number, _) in enumerate(parts) if number), 0)
    words = [f"{number} {unit}" for number, unit in parts[first : first + 2] if number]
    return " ".join(words) or "0 s"
