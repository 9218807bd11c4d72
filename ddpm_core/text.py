"""Text for people: messages without secrets and control characters, and counts with their nouns.

`masked` removes passwords, tokens and signatures from URIs. `visible` escapes control characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

# User and password of a URI. With http(s) that is everything before the host, because a token can
# be the user (TOKEN:x-oauth-basic@), the password (oauth2:TOKEN@) or stand alone. With other
# schemes it is the password only: ssh://git@host contains no secret. A password may contain an @.
_LOGIN = re.compile(r'(https?://)[^/\s"]*@|(://[^/\s":]*:)[^/\s"]*@', re.IGNORECASE)
# A query, also after a path without a host: HTTP libraries print those in their errors.
_QUERY = re.compile(r"""\?([^\s"'<>#\\?]+)""")
# Names of query parameters that are secret or sign the URI, in the spellings of the usual stores.
_SECRET_NAME = re.compile(
    r"token|secret|passw|pwd|credential|auth(?!or)|signature|(?:api|access)[-_]?key"
    r"|(?:^|[-_])(?:sig|sas|key|pass|jwt|code|session)(?:$|[-_])",
    re.IGNORECASE,
)
_OPAQUE = 32  # characters; a value of this length may be a token whatever its parameter is called


def masked(text: str) -> str:
    """Return a text without the passwords, tokens and signatures of its URIs.

    A query with one secret parameter is masked as a whole, because the other parameters (dates,
    expiry) change with every new signature. A masked text therefore stays the same when a
    credential is rotated. Bucket names, paths and fragments such as #sha256=HEX stay.
    """
    return _QUERY.sub(_without_secret, _LOGIN.sub(r"\1\2***@", text))


def _without_secret(query: re.Match[str]) -> str:
    for parameter in re.split("[&;]", query[1]):
        name, _, value = parameter.partition("=")
        if value and value != "***" and (_SECRET_NAME.search(name) or len(value) >= _OPAQUE):
            return "?***"
    return query[0]


def visible(text: str, keep: str = "") -> str:
    """Return a text with its unprintable characters escaped, as in `\\x1b` or `\\u202e`.

    Terminals obey control characters, and bidirectional characters reorder the text around them.
    The characters in `keep` stay as they are.
    """
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def shown(text: str) -> str:
    """Return a text that is safe to print: masked, and escaped except for line breaks and tabs."""
    return visible(masked(text), keep="\n\t")


def throughout(change: Callable[[str], str], value: Any) -> Any:
    """Return plain data with `change` applied to every string, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {throughout(change, key): throughout(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [throughout(change, item) for item in value]
    return value


def counted(number: int, noun: str) -> str:
    """Return "1 row", "2 rows", "1 class", "1,000 classes", "3 entries"."""
    if number != 1:
        noun = re.sub("(?<=[^aeiou])y$", "ie", noun)
        noun += "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {noun}"


def sentence(text: str) -> str:
    """Return a text that ends with a full stop, so that another sentence can follow it."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
