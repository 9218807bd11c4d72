"""Write the results of a comparison: tables, plots, image grids and one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddpm_core.comparison.experiment import SHARES, Run
from ddpm_core.comparison.results import (
    Results,
    floor_row,
    headline,
    spread,
    table,
    to_csv,
    to_markdown,
    with_error,
)
from ddpm_core.comparison.scoring import HIGHER_IS_BETTER
from ddpm_core.comparison.verdict import ERRORS, SPACES, Difference
from ddpm_core.config.durations import in_words
from ddpm_core.data.dataset import open_dataset
from ddpm_core.errors import require
from ddpm_core.evaluation.chart import chart
from ddpm_core.evaluation.curves import Curve, Line
from ddpm_core.evaluation.features import shuffled
from ddpm_core.evaluation.grids import SIDE, shrink
from ddpm_core.evaluation.pages import environment, number
from ddpm_core.evaluation.plots import DPI, plot, saved
from ddpm_core.evaluation.report import embedded
from ddpm_core.sampling.gather import open_samples
from ddpm_core.sampling.images import grid, png
from ddpm_core.scores import count_label
from ddpm_core.storage.files import read_tensors
from ddpm_core.storage.workspace import Workspace, snapshot_key
from ddpm_core.training.snapshot import NOISE_LEVELS

PAGE, TABLE, SUMMARY = "report.html", "results.csv", "results.md"
NAMES = {
    "fid": "FID",
    "fd_inception": "Inception (other weights)",
    "fd_pixel_pca": "pixel PCA",
    "fd_in_domain_a": "classifier a",
    "fd_in_domain_b": "classifier b",
    "fd_in_domain_c": "classifier c",
    "kid_in_domain_a": "KID",
    "precision_in_domain_a": "precision",
    "recall_in_domain_a": "recall",
}
LEVELS = ("good", "caution", "unknown", "bad")
SAMPLERS = {"dpmpp": "DPM-Solver++", "ddpm": "full DDPM sampling"}
SECONDS, STEPS = "seconds of training", "training step"


def write(results: Results, workspace: Workspace) -> None:
    """Write all files of the results so far."""
    title = f"Comparison {results.folder.name}"
    images = {**curve_plots(results), **image_grids(results, workspace)}
    images |= table_plots(results)
    files = {
        TABLE: to_csv(results).encode(),
        SUMMARY: to_markdown(results, title).encode(),
        PAGE: _page(results, title, images).encode(),
        **{f"{name}.png": data for name, data in images.items()},
    }
    for name, data in files.items():
        workspace.storage.write(name, data)


def curves(results: Results, axis: str) -> Iterator[tuple[str, Curve]]:
    """Yield each score and its curve by DPM-Solver++, with the deviation over seeds."""
    count = results.experiment.samples
    for name in results.measures:
        lines = []
        for method in results.experiment.methods:
            cost = results.cost.seconds[method] if axis == SECONDS else 1.0
            points, deviations = [], []
            for share in SHARES:
                found = results.at(method, share, "dpmpp").values()
                if pair := spread(s.scores[name] for s in found if name in s.scores):
                    points.append((round(share * results.steps[method] * cost, 3), pair[0]))
                    deviations.append(pair[1])
            if points:
                dashed = method == results.experiment.baseline
                lines.append(Line(method, points, deviations, dashed))
        direction = "higher is better" if name in HIGHER_IS_BETTER else "lower is better"
        if lines:
            title = f"{NAMES[name]} ({name}_{count_label(count)})"
            yield name, Curve(title, direction, lines, axis=axis, close=True)


def curve_plots(results: Results) -> dict[str, bytes]:
    """Return a PNG for each score and axis."""
    axes = {"seconds": SECONDS, "steps": STEPS}
    return {
        f"curves/{name}-{short}": plot(curve)
        for short, axis in axes.items()
        for name, curve in curves(results, axis)
    }


def image_grids(results: Results, workspace: Workspace) -> dict[str, bytes]:
    """Return a grid of the first samples of each method, of the same noise, and of real images."""
    train = open_dataset(workspace)
    real = train.take(shuffled(len(train), SIDE * SIDE))
    found = {"grids/real": png(grid(shrink(real), SIDE))}
    for method in results.experiment.methods:
        if run := _first_run(results, method):
            samples = open_samples(Workspace.open(str(results.folder / run.key)), run.steps)
            first = np.asarray(samples.shards[0][: SIDE * SIDE])
            found[f"grids/{method}"] = png(grid(shrink(first), SIDE))
    return found


def _first_run(results: Results, method: str) -> Run | None:
    """Return the run of a method that counts, with the first seed that has scores."""
    counted = results.counted(method)
    runs = (r for r in results.outcomes if r.arm.name == method and r.seed in counted)
    mine = [run for run in runs if run.learning_rate == results.rates[method]]
    return min(mine, key=lambda run: results.experiment.seeds.index(run.seed), default=None)


def table_plots(results: Results) -> dict[str, bytes]:
    """Return a plot of the learned probabilities and weights of each adaptive method."""
    found = {}
    for method in results.experiment.methods:
        run = _first_run(results, method)
        file = results.folder / run.key / snapshot_key(run.steps) / NOISE_LEVELS if run else None
        tensors = read_tensors(file) if file and file.is_file() else {}
        if "trajectory" in tensors:
            found[f"tables/{method}"] = plot_tables(tensors["trajectory"], method)
    return found


def plot_tables(trajectory: torch.Tensor, method: str) -> bytes:
    """Return a plot of recorded tables, float (SLOTS, 2, K): how p and w differ from their base."""
    figure = require("matplotlib.figure", "eval").Figure(figsize=(8.0, 3.4), dpi=DPI)
    panels = figure.subplots(1, 2, sharey=True)
    logs = trajectory.float().clamp(min=1e-6).log2().numpy()
    for panel, values, title in zip(
        panels, (logs[:, 0], logs[:, 1]), ("probability", "weight"), strict=True
    ):
        most = max(0.1, float(np.abs(values).max()))
        drawn = panel.imshow(
            values.T,
            aspect="auto",
            origin="lower",
            cmap="RdBu_r",
            vmin=-most,
            vmax=most,
            extent=(0, 100, 0, values.shape[1]),
        )
        panel.set_title(f"{method}: {title}", fontsize=10)
        panel.set_xlabel("% of training")
        bar = figure.colorbar(drawn, ax=panel, ticks=[-most, 0, most])
        bar.ax.set_yticklabels([f"x {number(2.0**t)}" for t in (-most, 0.0, most)])
    panels[0].set_ylabel("noise: low to high")
    panels[0].set_yticks([])
    figure.tight_layout()
    return saved(figure)


def _page(results: Results, title: str, images: dict[str, bytes]) -> str:
    """Return report.html. It loads nothing from elsewhere."""
    experiment, findings = results.experiment, results.findings()
    values = {
        "title": title,
        "headline": headline(results, findings),
        "experiment": experiment,
        "budget": in_words(experiment.seconds),
        "results": results,
        "finished": len(results.outcomes),
        "findings": sorted(findings, key=lambda f: LEVELS.index(f.level)),
        "arms": experiment.arms,
        "names": NAMES,
        "decides": SAMPLERS[results.sampler],
        "tables": list(_tables(results)),
        "differences": [(f.name, _differences(results, f.contest.differences)) for f in findings],
        "charts": [chart(curve) for _, curve in curves(results, SECONDS)],
        "step_charts": [chart(curve) for _, curve in curves(results, STEPS)],
        "grids": _embedded(images, "grids/"),
        "plots": _embedded(images, "tables/"),
        "settings": list(_settings(results)),
        "errors": f"{ERRORS:g}",
        "spaces": SPACES,
        "chance": chance(len(experiment.seeds)),
    }
    page = environment(Path(__file__).parent).get_template("compare.html.j2")
    return str(page.render(values))


def chance(seeds: int) -> float | None:
    """Return the probability that an accidental difference exceeds ERRORS, by Student's t."""
    if seeds < 2:
        return None
    return float(2 * require("scipy.stats", "eval").t.sf(ERRORS, seeds - 1))


def _tables(results: Results) -> Iterator[tuple[str, list[list[str]]]]:
    samplers = [(results.sampler, SHARES[-1])]
    samplers += [("dpmpp", share) for share in reversed(SHARES)]
    for sampler, share in dict.fromkeys(samplers):
        experiment = results.experiment
        count = experiment.by_ddpm if sampler == "ddpm" else experiment.samples
        name = f"{count:,} images by {SAMPLERS[sampler]}, after {share:.0%} of the budget"
        rows = [*table(results, share, sampler), *floor_row(results, sampler)]
        yield name, [[row[0], *row[3:]] for row in rows]


def _differences(results: Results, found: dict[str, Difference]) -> list[tuple[str, str]]:
    """Return text and level of the difference in each distance."""
    cells = []
    for name in results.distances:
        d = found.get(name)
        text = "" if d is None else with_error(d.mean, d.error)
        level = "" if d is None or not d.is_clear else "good" if d.mean < 0 else "bad"
        cells.append((text, level))
    return cells


def _embedded(images: dict[str, bytes], prefix: str) -> list[tuple[str, dict[str, Any] | None]]:
    found = {n.removeprefix(prefix): d for n, d in images.items() if n.startswith(prefix)}
    return [(name, embedded(data)) for name, data in found.items()]


def _settings(results: Results) -> Iterator[tuple[str, str]]:
    """Yield the settings of each method, and its cost."""
    for name, method in results.experiment.methods.items():
        settings = ", ".join(f"{k}: {v}" for k, v in method.settings.items()) or "as given for all"
        cost, rate = 1000 * results.cost.seconds[name], results.rates.get(name)
        tuned = "" if rate is None else f"; learning rate {rate:g}"
        yield name, f"{settings}{tuned}; {results.steps[name]:,} steps of {number(cost)} ms"
