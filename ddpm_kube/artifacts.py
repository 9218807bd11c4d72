"""What the pipeline's artifacts hold: small files with the workspace and fingerprints as metadata.

KFP downloads every input artifact into each pod and fails one whose URI is not its own, so images
and weights stay in the workspace, and artifacts say where they are and what they are of.
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
Pictures = Iterable[tuple[str, bytes | None]]  # each with its caption; None: absent

_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:1.5em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em 1em .2em 0;text-align:left}"
    "img{max-width:100%;image-rendering:pixelated}figure{margin:1.5em 0}figcaption{color:#666}"
)


class Artifact(Protocol):
    """What is used of KFP's artifacts."""

    metadata: dict[str, Any]

    @property
    def path(self) -> str: ...


def put(artifact: Artifact, content: str, facts: Mapping[str, Any]) -> None:
    """Write the file, and the facts as metadata; a fact that is not known is left out."""
    Path(artifact.path).write_text(masked(content), encoding="utf-8")
    given = throughout(shown, facts)
    artifact.metadata.update({key: value for key, value in given.items() if value is not None})


def put_json(artifact: Artifact, content: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    put(artifact, json.dumps(content, indent=1, sort_keys=True) + "\n", facts)


def put_metrics(artifact: Artifact, values: Mapping[str, Any], workspace: Workspace) -> None:
    """Numbers, as KFP's Metrics show them. A file is written too: without one nothing is cached."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    put_json(artifact, numbers, {**numbers, "workspace": workspace.uri})


def put_page(artifact: Artifact, title: str, facts: Facts, pictures: Pictures) -> None:
    """A page of HTML that fetches nothing: a table of the facts, and the pictures."""
    rows = "".join(
        f"<tr><th>{html.escape(key)}</th><td>{html.escape(str(value))}</td></tr>"
        for key, value in throughout(shown, facts).items()
        if value is not None
    )
    figures = "".join(_figure(caption, data) for caption, data in pictures if data)
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


def picture(workspace: Workspace, key: str) -> bytes | None:
    """A picture of the workspace, where there is one."""
    try:
        return workspace.storage.read(key)
    except (FileNotFoundError, NotADirectoryError):
        return None


def data_facts(workspace: Workspace, manifest: Facts) -> Facts:
    """Which data a step works on. `revision` is the commit of a source that DVC tracks."""
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
    """A checkpoint: where it lies, what its weights are, and what they were made of."""
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
    """The numbers of the last row of log.jsonl; without a log none."""
    from ddpm_core.tracking.tracker import Log

    rows, _ = Log(workspace.path(LOG)).peek(limit=2**62)
    return {"step": rows[-1].step, **rows[-1].values} if rows else {}


def samples_facts(workspace: Workspace, step: int, part: str) -> Facts:
    """The samples of a checkpoint: with their manifest's facts once all shards are there."""
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
    """Of an evaluation: its facts, metrics.json, and a table of its rows in Markdown."""
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
