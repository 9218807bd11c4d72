"""The model card: data, scores, evidence, settings and caveats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.models import write_checkpoint
from support.scored import row

from ddpm_core.config import Prepare
from ddpm_core.registry.card import as_description, write_card


def test_the_card_names_data_scores_evidence_and_caveats(tmp_path: Path) -> None:
    odd = ["a|b", "c\nd", "<b>\x1b\u202e"]
    checkpoint = write_checkpoint(tmp_path / "step", "class", classes=odd)
    facts = {
        "extractor": "in_domain",
        "space": "in_domain",
        "extractor_accuracy": 0.975,
        "reference_count": 1628,
        "seed": 1,
        "weights": "abc",
    }
    changes = {"score_name": "fd_in_domain_500", "recall": 0.5}
    scored = row(12.345, "near", **facts).model_copy(update=changes)
    card = write_card("shapes", checkpoint, scored)
    for text in (
        "# shapes: gray images by class of 8 x 8 pixels",
        "**fd_in_domain_500: 12.35**",
        "recall_in_domain_500: 0.5",
        "accuracy 97.5% on held-out images",
        "against 1,628 training images",
        "somewhat nearer to the training images",
        "source revision: v1",
        r"classes: a\|b (3), c d (2), \<b\>\\x1b\\u202e (1)",
        "are from 500 images",
        "is not an FID",
        "does not know the licence of the images",
        "timesteps: 50",
    ):
        assert text in card, card


def test_the_card_has_training_settings_and_the_scores_evidence(
    tmp_path: Path,
) -> None:
    trained = write_checkpoint(tmp_path / "step")
    source = Prepare(source="https://me:hunter2@host/shapes.zip")
    checkpoint = replace(trained, params=trained.params.model_copy(update={"prepare": source}))
    facts = {"extractor": "in_domain", "space": "in_domain", "seed": 1, "weights": "abc"}
    card = write_card(
        "shapes", checkpoint, row(1.0, sampler={"sampler": "ddim", "steps": 9}, **facts)
    )
    assert checkpoint.params.sample.steps != 9 and "sampler ddim, steps 9" in card
    settings = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert list(settings) == ["seed", "prepare", "model", "diffusion", "train"]
    assert "https://***@host/shapes.zip" in card and "hunter2" not in card


@pytest.mark.parametrize("classes", [1, 600], ids=["in the settings", "before them"])
def test_a_long_card_is_cut_to_the_limit_of_every_database(classes: int) -> None:
    settings = "".join(f"prompt{n}: a photo\n" for n in range(400))
    listed = "- a class\n" * classes
    card = f"# shapes\n{listed}## Settings\n```yaml\n{settings}```\n"
    described = as_description(card)
    assert 4900 < len(described) <= 5000
    kept, _, note = described.rpartition("\n… ")
    assert note == "The rest is in this version's files: `artifacts/README.md`.\n"
    assert card.startswith(kept.removesuffix("```\n")) and kept.count("```") % 2 == 0
    assert as_description(card[:5000]) == card[:5000]
