"""Passwords and tokens are not shown to whoever reads a log, a card or a page."""

from __future__ import annotations

import re

# Of a URI: with http(s) all that stands before the host, since tokens are given as user
# (TOKEN:x-oauth-basic@), as password (oauth2:TOKEN@) and alone; elsewhere the password. It may
# itself hold an @; ssh://git@host holds nothing secret.
_SECRET = re.compile(r'(https?://)[^/\s"]*@|(://[^/\s":]*:)[^/\s"]*@', re.IGNORECASE)


def masked(text: str) -> str:
    """A text without the passwords and tokens that its URIs may hold."""
    return _SECRET.sub(r"\1\2***@", text)
