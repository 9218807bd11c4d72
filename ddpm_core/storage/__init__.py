"""Where a workspace lives, behind one small interface: a directory, or a prefix in S3.

base      the interface, and what can go wrong
sealing   a folder's manifest: sizes and checksums, written last, verified by readers
staging   what a killed writer leaves beside the final names, and how it is swept
local     a directory
s3        s3://bucket/prefix
client    boto3's client, and what it raises as sentences
transfer  files and folders to S3 and back, checked
cache     this machine's copies of what lies in S3
mirror    a file that grows, in S3
"""

from __future__ import annotations

import re
from pathlib import Path

from ddpm_core.errors import UserError
from ddpm_core.storage.base import (
    Changed,
    Locked,
    Mirror,
    Storage,
    Tagged,
    Unreachable,
    fetch_whole,
)
from ddpm_core.storage.local import LocalStorage
from ddpm_core.storage.sealing import MANIFEST, seal, sha256_of, verify

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
    """The storage of a URI: a directory, or s3://bucket/prefix. Raises UserError."""
    if uri.startswith("s3://"):
        from ddpm_core.storage.s3 import S3Storage

        return S3Storage(uri)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", uri):
        raise UserError(f"workspace: {uri!r} given; a directory is needed, or s3://bucket/prefix.")
    try:
        return LocalStorage(Path(uri).expanduser())
    except RuntimeError as error:  # ~name of nobody
        raise UserError(f"workspace: {uri!r} given; {error}") from error
