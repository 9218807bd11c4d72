"""The curves of an evaluation as PNG plots and SVG charts, and their axes."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib.font_manager import findfont
from PIL import Image, ImageFont
from support.results import (
    RUN,
    results,
    row,
)

from ddpm_core.evaluation import plots
from ddpm_core.evaluation.chart import chart
from ddpm_core.evaluation.curves import Curve, Line, Reference, log_ticks, tick_labels, ticks
from ddpm_core.evaluation.tables import results_csv
from ddpm_core.evaluation.verdict import caveats
from ddpm_core.scores import (
    named_metrics,
)


@pytest.mark.slow
def test_every_plot_is_written_whatever_was_measured() -> None:
    absent = [row(200, 6.0, fd=None, is_mean=None, precision=None, recall=None, kid_mean=None)]
    drawings = [plots.draw(rows) for rows in (RUN, RUN[:1], absent, [])]
    for drawn in drawings:
        assert len(drawn) == 6
        for name, data in drawn.items():
            with Image.open(io.BytesIO(data)) as image:
                assert image.format == "PNG" and image.size == (960, 576), name
    assert plots.draw(list(RUN)) == drawings[0]


def test_kid_without_deviation_has_no_band_but_a_note(tmp_path: Path) -> None:
    rows = [row(200, 30.0, kid_std=None), row(400, 12.0, kid_std=None)]
    name, drawn = "KID_vs_TrainingSteps.png", []
    for some in (rows, [r.model_copy(update={"kid_std": 0.0}) for r in rows]):
        with Image.open(io.BytesIO(plots.draw(some)[name])) as image:
            drawn.append(np.asarray(image.convert("L")))
    differing = np.flatnonzero((drawn[0] != drawn[1]).any(0))
    assert len(differing) > 0 and differing.max() < 60  # the axis label, but not the curve
    assert "KID with 500 images has no deviation" in " ".join(caveats(results(rows)))
    assert "KID with" not in " ".join(caveats(results(RUN)))
    lines = list(csv.DictReader(io.StringIO(results_csv(rows))))
    assert [line["kid_std"] for line in lines] == ["", ""]
    assert "kid_std_in_domain_500" not in named_metrics(rows[0])


def test_the_first_25_are_the_first_25() -> None:
    rows = [row(100 * (i + 1), 50.0 - i) for i in range(30)]
    name = "FID_vs_TrainingSteps_First25.png"
    drawn = plots.draw(rows)
    assert drawn[name] == plots.draw(rows[:27])[name]
    assert drawn[name] != drawn["FID_vs_TrainingSteps.png"]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 175.2), (-0.003, 0.6), (0, 1e-4), (3, 3), (200, 800), (0, 7e5)]
)
def test_ticks_are_round_few_and_enclose(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 7
    np.testing.assert_allclose(np.diff(found), found[1] - found[0], rtol=1e-6)


@pytest.mark.parametrize(("low", "high"), [(0.01, 6), (2.7, 134), (1, 20), (1e-5, 1e3)])
def test_logarithmic_ticks_enclose(low: float, high: float) -> None:
    found = log_ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 12


def test_chart_keeps_its_lines_inside() -> None:
    lines = [Line("a", [(200, 134.0), (400, 3.0)]), Line("b", [(200, 140.0), (400, 5.0)])]
    references = [Reference("real", 2.0)]
    drawn = chart(Curve("fd", "lower is better", lines, references, mark=(400, 3.0)))
    assert drawn.remark.endswith("logarithmic") and drawn.mark is not None
    for dot in [dot for line in drawn.lines for dot in line.dots]:
        assert drawn.edges["left"] <= dot.x <= drawn.edges["right"]
        assert drawn.edges["top"] <= dot.y <= drawn.edges["bottom"]
    assert drawn.description == "fd: 134 at step 200, 3 at step 400."


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ((175e3, 81e3), (100_000, 600_000)),
        ((-0.00025, 0.0004), (300, 1800)),
        ((3e-5, 2e6), (1_000, 12_345_000)),
        ((9_990.0, 1.0), (9_500, 9_500)),
    ],
)
def test_axis_labels_fit_into_the_chart(
    values: tuple[float, float], steps: tuple[int, int]
) -> None:
    """Measured in the widest common font, at the size of a narrow page."""
    font = ImageFont.truetype(findfont("DejaVu Sans"), 14.5)
    drawn = chart(Curve("fd", "", [Line("a", list(zip(steps, values, strict=True)))]))
    for _, text in drawn.y_ticks:
        assert font.getlength(text) <= drawn.edges["left"] - 6, text
    for x, text in drawn.x_ticks:
        assert font.getlength(text) / 2 <= min(x, drawn.width - x), text


def test_large_tick_labels_are_in_thousands() -> None:
    assert tick_labels([0, 2500, 5000]) == ["0", "2,500", "5,000"]
    assert tick_labels([0, 5000, 10_000]) == ["0", "5k", "10k"]
    assert tick_labels([0.1, 100, 2.5e6]) == ["0.1", "100", "2.5M"]
    assert tick_labels([12_345]) == ["12.345k"]
