"""The pipeline's artifacts: small files, with workspace and fingerprints as metadata.

KFP downloads every input artifact into each pod, and fails if a component changes its URI. So
images and weights stay in the workspace, and artifacts refer to them.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ddpm_core.storage.workspace import (
    DATA,
    LOG,
    METRICS,
    REPORT,
    RESULTS,
    Workspace,
    samples_key,
    snapshot_key,
)
from ddpm_core.text import masked, shown, throughout

Facts = dict[str, Any]
Images = Iterable[tuple[str, bytes | None]]  # captions and PNG files; None: missing

_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:1.5em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em 1em .2em 0;text-align:left}"
    "img{max-width:100%;image-rendering:pixelated}figure{margin:1.5em 0}figcaption{color:#666}"
)


class Artifact(Protocol):
    """The part of KFP's artifacts that this module uses."""

    metadata: dict[str, Any]

    @property
    def path(self) -> str: ...


def put(artifact: Artifact, content: str, facts: Mapping[str, Any]) -> None:
    """Write the artifact's file, and the facts that are not None as its metadata."""
    Path(artifact.path).write_text(masked(content), encoding="utf-8")
    safe = throughout(shown, facts)
    artifact.metadata.update({key: value for key, value in safe.items() if value is not None})


def put_json(artifact: Artifact, content: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write a JSON file, and the facts as metadata."""
    put(artifact, json.dumps(content, indent=1, sort_keys=True) + "\n", facts)


def put_metrics(artifact: Artifact, values: Mapping[str, Any], workspace: Workspace) -> None:
    """Write the numbers of `values` as metadata, which KFP shows, and to the artifact's file."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    put_json(artifact, numbers, {**numbers, "workspace": workspace.uri})


def put_page(artifact: Artifact, title: str, facts: Facts, images: Images) -> None:
    """Write a self-contained HTML page: a table of the facts, and the images."""
    rows = "".join(
        f"<tr><th>{html.escape(key)}</th><td>{html.escape(str(value))}</td></tr>"
        for key, value in throughout(shown, facts).items()
        if value is not None
    )
    figures = "".join(_figure(caption, data) for caption, data in images if data)
    name = html.escape(title)
    put(
        artifact,
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style><h1>{name}</h1><table>{rows}</table>{figures}</html>\n",
        facts,
    )


def _figure(caption: str, data: bytes) -> str:
    text = html.escape(caption)
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return f'<figure><img src="{uri}" alt="{text}"><figcaption>{text}</figcaption></figure>'


def read_image(workspace: Workspace, key: str) -> bytes | None:
    """Return an image file of the workspace; None if it does not exist."""
    try:
        return workspace.storage.read(key)
    except (FileNotFoundError, NotADirectoryError):
        return None


def data_facts(workspace: Workspace, manifest: Facts) -> Facts:
    """Return the facts of prepared data; `revision` is the commit of a source in DVC."""
    source = manifest.get("source") or {}
    return {
        "workspace": workspace.uri,
        "data": workspace.shown(DATA),
        "data_fingerprint": manifest["fingerprint"],
        "source": source.get("uri"),
        "revision": source.get("revision"),
        "dvc_md5": source.get("dvc_md5"),
    }


def model_facts(workspace: Workspace, step: int) -> Facts:
    """Return the facts of a checkpoint: its snapshot, its weights, and the data behind them."""
    from ddpm_core.checkpoint import look_at_checkpoint

    checkpoint = look_at_checkpoint(workspace, step)
    return {
        **data_facts(workspace, checkpoint.data),
        "snapshot": workspace.shown(snapshot_key(step)),
        "step": step,
        "weights": checkpoint.weights_hash(),
        "train_fingerprint": checkpoint.train_fingerprint,
    }


def last_row(workspace: Workspace) -> dict[str, float]:
    """Return the numbers of the last row of log.jsonl; empty without a log."""
    from ddpm_core.tracking.tracker import Log

    rows, _ = Log(workspace.path(LOG)).peek(limit=2**62)
    return {"step": rows[-1].step, **rows[-1].values} if rows else {}


def samples_facts(workspace: Workspace, step: int, part: str) -> Facts:
    """Return the facts of a checkpoint's samples; more of them once all shards are complete."""
    key = samples_key(step)
    manifest = workspace.read_json(f"{key}/manifest.json")
    facts = {
        "workspace": workspace.uri,
        "samples": workspace.shown(key),
        "part": part,
        "step": step,
        "whole": bool(manifest),
    }
    wanted = ("count", "seed", "weights", "samples_fingerprint", "data_fingerprint")
    return facts | {name: manifest[name] for name in wanted if name in manifest}


def scores(workspace: Workspace) -> tuple[Facts, Facts, str]:
    """Return the facts of an evaluation, metrics.json, and its rows as a Markdown table."""
    results = throughout(shown, workspace.read_json(RESULTS))
    rows, best = results["rows"], results["best"]
    facts = {
        "workspace": workspace.uri,
        "report": workspace.shown(REPORT),
        "data_fingerprint": results["data"]["fingerprint"],
        "extractor": results["extractor"]["name"],
        "extractor_fingerprint": results["extractor"]["fingerprint"],
        "best_step": best["step"],
        best["score_name"]: best["score"],
    }
    lines = [
        f"| step | {best['score_name']} | precision | recall | memorisation | collapse |",
        "|--" * 6 + "|",
    ]
    for row in rows:
        if row.get("problem"):
            lines.append(f"| {row['step']} | not scored: {row['problem']} | | | | |")
            continue
        shares = [row.get("precision"), row.get("recall")]
        cells = [f"{row['score']:.4g}", *("" if s is None else f"{s:.2f}" for s in shares)]
        cells += [(row.get(c) or {}).get("verdict", "") for c in ("memorisation", "collapse")]
        lines.append(f"| {row['step']} | {' | '.join(cells)} |")
    return facts, workspace.read_json(METRICS), "\n".join(lines) + "\n"
