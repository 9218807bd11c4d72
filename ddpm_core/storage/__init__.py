"""Workspace storage: a directory or an S3 prefix behind one interface.

base       the `Storage` interface and its errors
local      a directory
s3         s3://bucket/prefix
bucket     boto3 calls: transfers with checksums, errors as messages
retry      the retry policies, in a table
web        the retry policy of downloads over HTTP
cache      local copies of files in S3
staging    temporary names for unfinished files and folders
manifest   the sizes and checksums of a folder's files
files      safe readers for untrusted files
lease      one run at a time in a workspace
workspace  the names of a run's files
"""

from __future__ import annotations

import re
from pathlib import Path

from ddpm_core.errors import UserError
from ddpm_core.storage.base import Changed, Locked, Mirror, Storage, Tagged, Unreachable
from ddpm_core.storage.local import LocalStorage
from ddpm_core.storage.manifest import MANIFEST, seal, sha256_of, verify
from ddpm_core.storage.retry import fetch_whole

__all__ = [
    "MANIFEST",
    "Changed",
    "LocalStorage",
    "Locked",
    "Mirror",
    "Storage",
    "Tagged",
    "Unreachable",
    "fetch_whole",
    "open_storage",
    "seal",
    "sha256_of",
    "verify",
]


def open_storage(uri: str) -> Storage:
    """Return the storage of a URI: a directory or s3://bucket/prefix. Raises UserError."""
    if uri.startswith("s3://"):
        from ddpm_core.storage.s3 import S3Storage

        return S3Storage(uri)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", uri):
        raise UserError(f"workspace: got {uri!r}; must be a directory or s3://bucket/prefix.")
    try:
        return LocalStorage(Path(uri).expanduser())
    except RuntimeError as error:  # ~name of an unknown user
        raise UserError(f"workspace: got {uri!r}: {error}") from error
