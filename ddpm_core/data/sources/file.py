"""One file with many images: an archive, a parquet file, or an array."""

from __future__ import annotations

from pathlib import Path

from ddpm_core.data.sources.archive import open_archive
from ddpm_core.data.sources.arrays import Arrays, is_arrays
from ddpm_core.data.sources.base import Source
from ddpm_core.data.sources.limits import user_errors
from ddpm_core.data.sources.parquet import Parquet, is_parquet
from ddpm_core.data.sources.sidecars import FIND, Columns


def open_file(path: Path, uri: str, columns: Columns = FIND) -> Source:
    """Open a file with many images, recognised by its content. Raises UserError for others."""
    with user_errors(uri, "file", "use image files in a directory"):
        if is_parquet(path):
            return Parquet(path, uri, columns)
        if is_arrays(path):
            return Arrays(path, uri)
        return open_archive(path, uri, columns)
