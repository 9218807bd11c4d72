"""report.html: one file that a person reads, from results.json and the pictures beside it."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image

from ddpm_core.errors import Corrupt, UserError, require
from ddpm_core.evaluation import verdict
from ddpm_core.evaluation.caveats import caveats
from ddpm_core.evaluation.chart import Chart, Line, chart
from ddpm_core.evaluation.features import SPACES
from ddpm_core.evaluation.metrics import count_label, metric_name
from ddpm_core.evaluation.pictures import FOLDER
from ddpm_core.evaluation.rows import Results, samples_of
from ddpm_core.scores import Row, best, best_inception, is_scored, ranked
from ddpm_core.storage.workspace import REPORT, RESULTS, Workspace
from ddpm_core.text import shown, throughout

# Facts of a source, see the classes of ddpm_core.data: in words, and those that are folded.
WORDS = {
    "uri": "source",
    "format": "format",
    "revision": "revision",
    "state.files": "files looked at",
    "state.objects": "objects looked at",
    "state.size": "bytes of the archive",
}
CHECKS = {
    "sha256": "SHA-256 of its content",
    "listing_sha256": "SHA-256 of names and sizes",
    "dvc_md5": "DVC's MD5",
    "etag": "ETag",
    "state.sha256": "SHA-256 that tells a change",
    "state.modified": "last change, nanoseconds since 1970",
    "state.commit": "commit",
}
GRIDS = 24  # checkpoints whose samples are shown
PHOTO = 200_000  # pixels above which a picture is embedded as a lossy one
LARGEST = 20_000_000  # pixels of a picture of ours, and some


def render_report(workspace: Workspace) -> Path:
    """Write evaluation/report.html anew, and its size into results.json where sizes are; its path.

    Raises UserError where nothing is scored.
    """
    results = workspace.read_json(RESULTS, Results)
    if not results.get("rows"):
        raise UserError(f"Nothing is scored in {workspace.uri} yet: run `ddpm evaluate` first.")
    page = render(results, Pictures(workspace)).encode()
    workspace.storage.write(REPORT, page)
    sizes = results.get("sizes")
    if sizes and sizes.get(REPORT) != len(page):  # else it would count as cut
        workspace.write_json(RESULTS, {**results, "sizes": {**sizes, REPORT: len(page)}})
    return workspace.path(REPORT)


class Pictures:
    """Pictures of evaluation/pictures as data URIs; of an absent one None."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def get(self, name: str) -> dict[str, Any] | None:
        """`uri`, `width` and `height` of NAME.png."""
        try:
            data = self._workspace.storage.read(f"{FOLDER}/{name}.png")
        except (FileNotFoundError, NotADirectoryError, Corrupt):
            return None
        try:
            kind, width, height, data = _small_enough(data)
        except Exception:  # whatever Pillow raises for a damaged picture
            return None
        uri = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        return {"uri": uri, "width": width, "height": height}


def _small_enough(data: bytes) -> tuple[str, int, int, bytes]:
    """Format, width, height and content of a PNG, made a WebP if it is large."""
    with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
        width, height = picture.size
        if width * height > LARGEST:
            raise ValueError("a picture that we have not drawn")
        if width * height <= PHOTO:
            return "png", width, height, data
        stream = io.BytesIO()
        picture.save(stream, "WEBP", quality=85)
    return "webp", width, height, stream.getvalue()


def render(results: dict[str, Any], pictures: Pictures) -> str:
    """The page of results.json. Names from strangers are escaped, and nothing is fetched."""
    results = throughout(shown, results)
    jinja2 = require("jinja2", "eval")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: name != "report.css",
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": verdict.number, "percent": verdict.percent}
    return str(environment.get_template("report.html.j2").render(_page(results, pictures)))


def _page(results: dict[str, Any], pictures: Pictures) -> dict[str, Any]:
    rows = results["rows"]
    scored = ranked(rows, results.get("sample", {}))
    row = best(scored)
    extractor = results["extractor"]
    return {
        "verdict": verdict.judge(results),
        "caveats": caveats(results),
        "results": results,
        "best": row,
        "rows": rows,
        "features": SPACES.get(extractor["space"], extractor["space"]),
        "charts": charts(scored) if scored else [],
        "grids": _grids([r for r in rows if is_scored(r)], scored, row, pictures),
        "real": pictures.get("real"),
        **_pairs(results, row, pictures),
        "settings": _flat(results["run"]),
        "sampler": _flat(row["evidence"]["sampler"]) if row else [],
        **_source(dict(_flat(results["data"].get("source") or {}))),
    }


def _pairs(results: dict[str, Any], row: Row | None, pictures: Pictures) -> dict[str, Any]:
    """Nearest neighbours, of what this evaluation looked at: others' pictures may lie there too."""
    examined = row and row.get("memorisation")
    return {
        "neighbours": pictures.get(f"neighbours-{row['step']:08d}") if row and examined else None,
        "held_out": pictures.get("neighbours-held-out") if results.get("straddling") else None,
    }


def charts(rows: list[Row]) -> list[Chart]:
    """The curves: distance, kernel distance, precision and recall, inception score."""
    space = rows[0]["evidence"]["space"]
    drawn = []
    for key, metric, good in (
        ("fd", "fd", "lower"),
        ("kid_mean", "kid", "lower"),
        ("is_mean", "is", "higher"),
    ):
        name = metric_name(metric, space, samples_of(rows[0], key))
        lines, floors = _lines(rows, key)
        mark = (best_inception if key == "is_mean" else best)(rows)
        step = int(mark["step"]) if mark else None
        if lines:
            drawn.append(chart(name, f"{good} is better", lines, floors, step))
    names = ("precision", "recall")
    shares = [Line(name, _points(rows, name), name == "recall") for name in names]
    if all(line.points for line in shares):
        title = f"precision and recall, {count_label(samples_of(rows[0], 'precision'))} images"
        floors = [floor for name in names for floor in _floor(rows, name, f", {name}")]
        drawn.insert(2, chart(title, "higher is better", shares, floors, None, top=1.0))
    return drawn


def _lines(rows: list[Row], key: str) -> tuple[list[Line], list[tuple[str, float]]]:
    """A score's line; with the floor of held-out images, and a line of as many samples."""
    count, n = samples_of(rows[0], key), rows[0]["floor_count"]
    lines = [Line(f"{count:,} samples", _points(rows, key))]
    if not lines[0].points:
        return [], []
    floors = _floor(rows, key)
    if floors and n < count and key != "kid_mean":
        same = [(int(r["step"]), float(r["at_floor"][key])) for r in rows]
        lines.append(Line(f"{n:,} samples, as many as held out", same))
    return lines, floors


def _floor(rows: list[Row], key: str, of: str = "") -> list[tuple[str, float]]:
    """A score of held-out images with its name, where it was measured."""
    value = (rows[0].get("floor") or {}).get(key)
    if value is None:
        return []
    return [(f"{rows[0]['floor_count']:,} held-out real images{of}", float(value))]


def _points(rows: list[Row], key: str) -> list[tuple[int, float]]:
    return [(int(r["step"]), float(r[key])) for r in rows if r.get(key) is not None]


def _grids(
    rows: list[Row], ranked: list[Row], best: Row | None, pictures: Pictures
) -> list[dict[str, Any]]:
    """Samples of at most 24 checkpoints evenly spread, the best and the last among them."""
    places = {round(i * (len(rows) - 1) / (GRIDS - 1)) for i in range(GRIDS)} if rows else set()
    chosen = [r for i, r in enumerate(rows) if len(rows) <= GRIDS or i in places or r is best]
    named = [(row, pictures.get(f"grid-{row['step']:08d}")) for row in chosen]
    return [
        {"row": row, "picture": p, "best": row is best, "ranked": row in ranked}
        for row, p in named
        if p
    ]


def _source(facts: dict[str, str]) -> dict[str, list[tuple[str, str]]]:
    """What a person asks of the source, and what only tells whether it is still the same."""
    told = [(words, facts.pop(name)) for name, words in WORDS.items() if name in facts]
    return {"source": told, "checks": [(CHECKS.get(name, name), facts[name]) for name in facts]}


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as lines: ("train.optimizer.lr", "0.001")."""
    lines: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines += _flat(value, f"{prefix}{key}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            lines.append((f"{prefix}{key}", text))
    return lines
