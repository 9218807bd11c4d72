"""The name of a job, which follows from the run and the stage alone.

A launcher that was started again finds the job of the one before by it.
"""

from __future__ import annotations

import hashlib
import re

# The operator names pods and services NAME-worker-12, and 63 characters are allowed for those.
LONGEST = 52


def job_name(run_id: str, stage: str) -> str:
    """A DNS label of at most 52 characters, begun with a letter.

    Where characters had to be changed or left out, a hash of what was given keeps two runs apart.
    """
    given = f"{stage}-{run_id}"
    plain = _allowed(given)
    if plain[:1].isdigit():
        plain = f"job-{plain}"
    if plain == given and len(plain) <= LONGEST:
        return plain
    return _with_hash(plain, given, LONGEST) if plain else f"job-{_digest(given)}"


def label_value(text: str) -> str:
    """The text as the value of a label: itself where that is allowed, else shortened, hashed."""
    if re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", text):
        return text
    return _with_hash(_allowed(text), text, 63).lstrip("-")


def _allowed(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _with_hash(plain: str, given: str, longest: int) -> str:
    digest = _digest(given)
    return f"{plain[: longest - len(digest) - 1].rstrip('-')}-{digest}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
