"""Small parts of messages: numbers with their nouns, and full stops."""

from __future__ import annotations

import re


def counted(number: int, noun: str) -> str:
    """Return "1 row", "2 rows", "1 class", "1,000 classes", "3 entries"."""
    if number != 1:
        noun = re.sub("(?<=[^aeiou])y$", "ie", noun)
        noun += "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {noun}"


def sentence(text: str) -> str:
    """Return a text of others with a full stop at its end, so that a sentence may follow."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
