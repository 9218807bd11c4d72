"""What readers of logs, records and pages may see: no secrets, and no characters that deceive.

`masked` removes passwords, tokens and signatures from URIs, `visible` escapes control characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

# User and password of a URI. With http(s) all that stands before the host, since tokens are given
# as user (TOKEN:x-oauth-basic@), as password (oauth2:TOKEN@) and alone; elsewhere the password. It
# may itself contain an @; ssh://git@host contains no secret.
_LOGIN = re.compile(r'(https?://)[^/\s"]*@|(://[^/\s":]*:)[^/\s"]*@', re.IGNORECASE)
# A query, also of a path without a host, as HTTP libraries print it in their errors.
_QUERY = re.compile(r"""\?([^\s"'<>#\\?]+)""")
# Names of query parameters that are secret or sign the URI, in the spellings of the usual stores.
_SECRET_NAME = re.compile(
    r"token|secret|passw|pwd|credential|auth(?!or)|signature|(?:api|access)[-_]?key"
    r"|(?:^|[-_])(?:sig|sas|key|pass|jwt|code|session)(?:$|[-_])",
    re.IGNORECASE,
)
_OPAQUE = 32  # characters from which on the value of any query parameter may be a token


def masked(text: str) -> str:
    """Return a text without the passwords, tokens and signatures of its URIs.

    A query with one secret parameter is masked as a whole, because the others (dates, expiry)
    change with every new signature: so a text that is compared after masking stays the same when a
    credential is rotated. The names of buckets, paths and fragments such as #sha256=HEX stay.
    """
    return _QUERY.sub(_without_secret, _LOGIN.sub(r"\1\2***@", text))


def _without_secret(query: re.Match[str]) -> str:
    for parameter in re.split("[&;]", query[1]):
        name, _, value = parameter.partition("=")
        if value and value != "***" and (_SECRET_NAME.search(name) or len(value) >= _OPAQUE):
            return "?***"
    return query[0]


def visible(text: str, keep: str = "") -> str:
    """Return a text in which characters that do not print are escaped, as in `\\x1b` or `\\u202e`.

    Terminals obey control characters, and bidirectional ones reorder what stands beside them.
    The characters of `keep` stay as they are.
    """
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def shown(text: str) -> str:
    """Return a text as a person may see it: masked, and visible except for line breaks and tabs."""
    return visible(masked(text), keep="\n\t")


def throughout(change: Callable[[str], str], value: Any) -> Any:
    """Return plain data with each of its texts changed, those of keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {throughout(change, key): throughout(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [throughout(change, item) for item in value]
    return value
