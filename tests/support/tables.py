"""Parquet files of images, as Hugging Face's datasets writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def images(contents: Sequence[bytes | None]) -> pa.Array:
    """Return a column of images, with paths that mean nothing."""
    return pa.array([{"bytes": content, "path": "x.jpg"} for content in contents], IMAGE)


def class_label(*names: str) -> dict[str, Any]:
    return {"names": list(names), "_type": "ClassLabel"}


def write_parquet(
    path: Path,
    columns: Mapping[str, Any],
    features: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write a table; `features` go into its schema, as Hugging Face's datasets does."""
    table = pa.table(dict(columns))
    if features is not None:
        info = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": info})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path
