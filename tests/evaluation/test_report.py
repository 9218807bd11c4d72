"""report.html: its content, hostile names, and bounded size."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor
from support.results import (
    HOSTILE,
    RUN,
    memory,
    results,
    row,
    workspace_of,
)

from ddpm_core.errors import UserError
from ddpm_core.evaluation import plots
from ddpm_core.evaluation.grids import shrink
from ddpm_core.evaluation.report import render_report
from ddpm_core.evaluation.verdict import caveats
from ddpm_core.scores import (
    Results,
    Unscored,
)
from ddpm_core.storage.workspace import Workspace
from ddpm_core.text import shown as escaped


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page(root: Path, found: Results) -> Page:
    return Page(render_report(workspace_of(root, found)).read_text(encoding="utf-8"))


def test_the_verdict_comes_first_and_in_plain_words(tmp_path: Path) -> None:
    found = page(tmp_path, results(RUN))
    text = " ".join(found.text.split())
    headline = text.index("Step 800 is the best of 4 checkpoints.", text.index("Evaluation of"))
    assert headline < text.index("2 times as far from the data as real images.")
    assert headline < text.index("There is no sign of memorised images.")
    assert headline < text.index("It still improves") < text.index("Scores against training steps")


def test_unscored_checkpoints_are_in_caveats_and_page(tmp_path: Path) -> None:
    lacking = [
        Unscored.because(900, "Its samples are damaged."),
        Unscored.because(1000, "It has none."),
    ]
    note = caveats(results([*RUN, *lacking]))[0]
    assert note == "Steps 900, 1,000 could not be scored. Step 900: Its samples are damaged."
    one = caveats(results([*RUN, lacking[1]]))[0]
    assert one == "Step 1,000 could not be scored: It has none."
    many = [Unscored.because(1000 + i, "It has none.") for i in range(25)]
    assert "1,009 and 15 more could not" in caveats(results([*RUN, *many]))[0]
    assert not any("could not be scored" in text for text in caveats(results(RUN)))
    assert note in page(tmp_path, results([*RUN, *lacking])).text


def test_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    html = render_report(workspace_of(tmp_path, results(RUN))).read_text()
    found = Page(html)
    for tag, attributes in found.tags:
        assert tag not in {"script", "iframe", "object", "embed", "base"}
        for name in ("src", "href", "srcset", "poster", "action"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    assert "url(" not in html and "@import" not in html
    policy = next(m["content"] for m in found.all("meta") if "http-equiv" in m)
    assert policy is not None and policy.startswith("default-src 'none'")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_escaped(name: str, tmp_path: Path) -> None:
    rows = [*RUN, Unscored.because(900, name)]
    rows[0] = row(200, 30.0, sampler={"prompts": [name]})
    plain = page(tmp_path / "plain", results([*RUN, Unscored.because(900, "x")], ("a", "b")))
    found = page(tmp_path / "hostile", results(rows, (name, "b")))
    assert len(found.all("img")) == len(plain.all("img"))
    assert not [a for _, attributes in found.tags for a in attributes if a.startswith("on")]
    assert found.text.count(escaped(name)) >= 2  # as class and as problem, unchanged


def test_near_copies_are_shown_with_the_number_examined(tmp_path: Path) -> None:
    facts = {**memory("copies", 9), "count": 1500}
    found = page(tmp_path, results([row(200, 6.0, memorisation=facts)]))
    text = " ".join(found.text.split())
    assert text.count("9 of 1,500") == 2 and text.count("1 of 180") == 2  # captions and table


def test_equal_precision_and_recall_are_both_visible(tmp_path: Path) -> None:
    found = page(tmp_path, results([row(200, 30.0, recall=0.8), row(400, 12.0, recall=0.8)]))
    groups = [str(group["class"]) for group in found.all("g")]
    assert ["s0", "s1 dashed"] in [groups[i : i + 2] for i in range(len(groups))]
    levels = [str(line["class"]) for line in found.all("line")]
    assert "floor s0" in levels and "floor s1" in levels
    assert "180 held-out real images, precision: 0.8" in " ".join(found.text.split())

    rows = [row(step, 9.0, recall=0.8, floor=None) for step in (200, 400)]
    with Image.open(io.BytesIO(plots.draw(rows)["PrecisionRecall_vs_TrainingSteps.png"])) as drawn:
        line = np.asarray(drawn.convert("RGB"))[138:152].reshape(-1, 3)
    for color in (plots.BLUE, plots.ORANGE):
        assert (line == ImageColor.getrgb(color)).all(axis=1).sum() > 100


def test_source_is_labelled_and_its_checksums_are_folded(tmp_path: Path) -> None:
    found = results(RUN)
    state = {"files": 184, "sha256": "a" * 64}
    found.data["source"] = {"uri": "photos/", "listing_sha256": "b" * 64, "state": state}
    html = render_report(workspace_of(tmp_path, found)).read_text(encoding="utf-8")
    seen, folded = html.split("<summary>Checksums of the source</summary>")
    assert "files examined" in Page(seen).text and "184" in Page(seen).text
    assert not re.search("[ab]{64}", seen) and "a" * 64 in folded and "b" * 64 in folded
    assert not re.search("listing_sha256|state\\.", html)


def test_every_image_has_an_alternative_text(tmp_path: Path) -> None:
    found = page(tmp_path, results(RUN))
    alternatives = [image.get("alt") or "" for image in found.all("img")]
    assert len(alternatives) == len(set(alternatives)) == 7 and all(alternatives)
    drawings = found.all("svg")
    assert len(drawings) == 4
    for drawing in drawings:
        assert drawing["role"] == "img" and re.search(r"at step 800", drawing["aria-label"] or "")


def test_pairs_of_an_earlier_evaluation_are_not_shown(tmp_path: Path) -> None:
    """Image files of an evaluation with other samples or data may still exist."""
    found = results([row(200, 6.0, memorisation=None)], straddling=None)
    assert "Nearest training images" not in page(tmp_path / "none", found).text
    held_out = "The held-out real images nearest"
    for straddling, shown in ((None, False), (results([]).straddling, True)):
        found = results([row(200, 6.0)], straddling=straddling)
        drawn = page(tmp_path / str(shown), found)
        assert "Nearest training images" in drawn.text
        alternatives = [image["alt"] for image in drawn.all("img")]
        assert any(str(alt).startswith(held_out) for alt in alternatives) == shown


@pytest.mark.slow
def test_page_of_75_checkpoints_is_bounded(tmp_path: Path) -> None:
    rows = [row(1000 * (i + 1), 100 / (i + 1)) for i in range(75)]
    rows[40] = row(41_000, 0.5)  # the best is in the middle
    workspace = workspace_of(tmp_path, results(rows), side=600)
    page = render_report(workspace).read_text()
    found = Page(page)
    shown = [image["alt"] for image in found.all("img") if "first samples" in (image["alt"] or "")]
    assert len(shown) <= 25
    for step in (1000, 41_000, 75_000):
        assert f"The first samples of the checkpoint of step {step}" in shown
    assert len(re.findall("webp", page)) > 20
    assert found.text.count("75,000") >= 2


def test_rendering_again_gives_the_same_bytes(tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path, results(RUN))
    first = render_report(workspace).read_bytes()
    assert render_report(workspace).read_bytes() == first


def test_page_without_scores_or_images_is_rendered(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path))
    with pytest.raises(UserError, match="Run `ddpm evaluate`"):
        render_report(workspace)
    found = results([Unscored.because(200, "no samples")])
    workspace.write_json("evaluation/results.json", found.plain())
    text = Page(render_report(workspace).read_text()).text
    assert "No checkpoint could be scored." in text and "Step 200: no samples" in text


def test_page_with_one_checkpoint_and_one_metric_is_rendered(tmp_path: Path) -> None:
    absent = {"fd": None, "is_mean": None, "precision": None, "recall": None, "density": None}
    one = row(200, 0.3, floor=None, at_floor=None, floor_count=0, memorisation=None)
    absent |= {"score_name": "kid_in_domain_500", "coverage": None, "fd_pixel_pca": None}
    one = one.model_copy(update=absent)
    found = page(tmp_path, results([one], ()))
    assert len(found.all("svg")) == 1 and "Step 200 is the only checkpoint" in found.text


def test_large_images_are_shrunk() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 256, 128, 3)).astype(np.uint8)
    assert shrink(images).shape == (2, 96, 48, 3)
    assert shrink(images[:, :16, :16]).shape == (2, 16, 16, 3)
