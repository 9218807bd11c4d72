"""report.html: one self-contained page, from results.json and the image grids beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ddpm_core.errors import Corrupt, UserError
from ddpm_core.evaluation import verdict
from ddpm_core.evaluation.chart import chart
from ddpm_core.evaluation.curves import curves, loss_curves
from ddpm_core.evaluation.pages import environment
from ddpm_core.sampling.figures import KINDS
from ddpm_core.scores import SPACES, AnyRow, Results, Row, best, is_scored, ranked, read_results
from ddpm_core.storage.workspace import PICTURES, REPORT, RESULTS, Workspace, figure_name
from ddpm_core.text import shown, throughout
from ddpm_core.tracking.validation import trend

# Facts of a source (see ddpm_core.data.sources): labels of those that are shown, then of those
# that are folded.
SOURCE = {
    "uri": "source",
    "format": "format",
    "revision": "revision",
    "state.files": "files examined",
    "state.objects": "objects examined",
    "state.size": "bytes of the archive",
}
CHECKSUMS = {
    "sha256": "SHA-256 of the content",
    "listing_sha256": "SHA-256 of names and sizes",
    "dvc_md5": "DVC's MD5",
    "etag": "ETag",
    "state.sha256": "SHA-256 that detects changes",
    "state.modified": "last change, nanoseconds since 1970",
    "state.commit": "commit",
}
GRIDS = 24  # checkpoints whose samples are shown
PHOTO = 200_000  # pixels; larger images are embedded with lossy compression
LARGEST = 20_000_000  # pixels; `evaluate` writes no larger image


def render_report(workspace: Workspace) -> Path:
    """Write evaluation/report.html and return its path.

    Updates the size of the report in results.json, so that it still counts as complete.

    Raises:
        UserError: there is no evaluation.
    """
    results = read_results(workspace)
    if results is None:
        raise UserError(f"{workspace.uri} has no scores.", run=("evaluate",))
    page = render(results, Images(workspace)).encode()
    workspace.storage.write(REPORT, page)
    if results.sizes and results.sizes.get(REPORT) != len(page):
        sizes = {**results.sizes, REPORT: len(page)}
        workspace.write_json(RESULTS, {**results.plain(), "sizes": sizes})
    return workspace.path(REPORT)


class Images:
    """The image grids of a workspace as data URIs."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def get(self, name: str, end: str = ".png") -> dict[str, Any] | None:
        """Return `uri`, `width` and `height` of a file; None if it is missing or corrupt."""
        try:
            data = self._workspace.storage.read(f"{PICTURES}/{name}{end}")
        except (FileNotFoundError, NotADirectoryError, Corrupt):
            return None
        return embedded(data)


def embedded(data: bytes) -> dict[str, Any] | None:
    """Return `uri`, `width` and `height` of a PNG or GIF file; None if it is corrupt."""
    try:
        kind, width, height, data = _compress(data)
    except Exception:  # Pillow raises many classes for corrupt images
        return None
    uri = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"uri": uri, "width": width, "height": height}


def _compress(data: bytes) -> tuple[str, int, int, bytes]:
    """Return format, width, height and content of a PNG or GIF; a large PNG becomes a WebP."""
    with Image.open(io.BytesIO(data), formats=["PNG", "GIF"]) as image:
        width, height = image.size
        if max(width * height, len(data)) > LARGEST:
            raise ValueError("the image is larger than any that evaluate writes")
        if image.format == "GIF" or width * height <= PHOTO:
            return str(image.format).lower(), width, height, data
        stream = io.BytesIO()
        image.save(stream, "WEBP", quality=85)
    return "webp", width, height, stream.getvalue()


def render(results: Results, images: Images) -> str:
    """Return the page. It loads nothing from elsewhere, and escapes names from other sources."""
    # Mask secrets and escape control characters in every text before it reaches the template.
    results = Results.model_validate(throughout(shown, results.plain()))
    return str(environment().get_template("report.html.j2").render(_page(results, images)))


def _page(results: Results, images: Images) -> dict[str, Any]:
    """Return the variables of the template."""
    scored = ranked(results.rows, results.sample)
    row = best(scored)
    space = results.extractor.space
    return {
        "verdict": verdict.find_verdict(results),
        "caveats": verdict.caveats(results),
        "results": results,
        "best": row,
        "rows": results.rows,
        "features": SPACES.get(space, space),
        "charts": [chart(curve) for curve in curves(scored).values() if curve.lines],
        "losses": [chart(curve) for curve in loss_curves(results.validation)],
        "learning": _learning(results),
        "grids": _grids(results.rows, scored, row, images),
        "real": images.get("real"),
        "drawn": _drawn(row, images),
        **_pairs(results, row, images),
        "settings": _flat(results.run),
        "sampler": _flat(row.evidence.sampler) if row else [],
        **_source(dict(_flat(results.data.get("source") or {}))),
    }


def _learning(results: Results) -> str:
    """Return what the held-out loss says about longer training; "" if it was not measured."""
    found = trend(results.validation)
    return found.sentence([row.step for row in results.rows]) if found else ""


def _pairs(results: Results, row: Row | None, images: Images) -> dict[str, Any]:
    """Return the nearest pairs, unless an earlier evaluation wrote them for other images."""
    name = f"neighbours-{row.step:08d}" if row and row.memorisation else ""
    return {
        "neighbours": images.get(name) if name else None,
        "held_out": images.get("neighbours-held-out") if results.straddling else None,
    }


def _grids(
    rows: Sequence[AnyRow], ranked: Sequence[Row], best: Row | None, images: Images
) -> list[dict[str, Any]]:
    """Return the samples of 24 evenly spread checkpoints, with the first, last and best one."""
    scored = [row for row in rows if is_scored(row)]
    places = {round(i * (len(scored) - 1) / (GRIDS - 1)) for i in range(GRIDS)} if scored else set()
    chosen = [r for i, r in enumerate(scored) if len(scored) <= GRIDS or i in places or r is best]
    named = [(row, images.get(f"grid-{row.step:08d}")) for row in chosen]
    return [
        {"row": row, "image": image, "best": row is best, "ranked": row in ranked}
        for row, image in named
        if image
    ]


def _drawn(row: Row | None, images: Images) -> list[dict[str, Any]]:
    """Return the figures that `ddpm draw` made of the best checkpoint, with their titles."""
    if row is None:
        return []
    weights = row.evidence.weights
    files = [(one, images.get(figure_name(kind, weights), one.end)) for kind, one in KINDS.items()]
    return [{"title": one.title, "text": one.text, "image": image} for one, image in files if image]


def _source(facts: dict[str, str]) -> dict[str, list[tuple[str, str]]]:
    """Return what describes the source, and the checksums that detect changes."""
    described = [(words, facts.pop(name)) for name, words in SOURCE.items() if name in facts]
    checksums = [(CHECKSUMS.get(name, name), value) for name, value in facts.items()]
    return {"source": described, "checksums": checksums}


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as pairs: ("train.optimizer.lr", "0.001")."""
    lines: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines += _flat(value, f"{prefix}{key}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            lines.append((f"{prefix}{key}", text))
    return lines
