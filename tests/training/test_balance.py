"""`train.balance: classes` draws classes equally, in training and in sampling, or is refused."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.images import noise, prepared, write_classes

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.errors import UserError
from ddpm_core.runtime.distributed import World
from ddpm_core.training.init import check_data_fits
from ddpm_core.training.resume import caption_counts, checkpoint_settings
from ddpm_core.training.step import next_batch


def balanced(batch_size: int = 6) -> Config:
    given = {"balance": "classes", "batch_size": batch_size}
    model = {"conditioning": "class"}
    return params.validate({"prepare": {"image_size": 8}, "train": given, "model": model})


@pytest.fixture
def uneven(tmp_path: Path) -> PackedDataset:
    """Ten cats and two dogs, with captions of which one is shared."""
    for number in range(12):
        folder = tmp_path / "raw" / ("cat" if number < 10 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        noise(number).save(folder / f"{number}.png")
    with (tmp_path / "raw/metadata.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file_name", "text"])
        for number in range(12):
            kind = "cat" if number < 10 else "dog"
            text = "an animal" if number in (0, 10) else f"a {kind}"
            rows.writerow([f"{kind}/{number}.png", text])
    return prepared(tmp_path, tmp_path / "raw")


@pytest.mark.parametrize("workers", [1, 4])
def test_batches_contain_every_class_equally_often(uneven: PackedDataset, workers: int) -> None:
    labels = []
    for at in range(10):
        for rank in range(workers):
            world = World(rank, workers, torch.device("cpu"))
            batch = next_batch(balanced(), uneven, world, at)
            assert batch.condition is not None
            labels += batch.condition.tolist()
    assert np.bincount(labels).tolist() == [30, 30]
    pairs = np.array(labels).reshape(-1, 2)
    assert (pairs[:, 0] != pairs[:, 1]).all()


def test_samples_have_the_frequencies_of_balanced_training(uneven: PackedDataset) -> None:
    data = checkpoint_settings(balanced(), uneven).data
    assert (data.class_counts, data.balance) == ([10, 2], "classes")
    assert checkpoint_settings(Config(), uneven).data.balance == "none"
    assert dict(caption_counts(uneven)) == {"a cat": 9, "an animal": 2, "a dog": 1}
    total = {text: count / 2e6 for text, count in caption_counts(uneven, "classes")}
    assert total == pytest.approx({"a cat": 0.45, "an animal": 0.3, "a dog": 0.25})


@pytest.mark.parametrize(
    ("folders", "chosen", "found"),
    [(["."], None, "no classes"), (["cat", "dog"], ("dog",), "one class")],
)
def test_balance_without_two_classes_is_refused(
    tmp_path: Path, folders: list[str], chosen: tuple[str, ...] | None, found: str
) -> None:
    write_classes(tmp_path / "raw", folders)
    data = prepared(tmp_path, tmp_path / "raw", classes=chosen)
    config = balanced().model_copy(update={"model": Config().model})
    text = f"train.balance: got classes, but the training images have {found}. "
    with pytest.raises(UserError, match=re.escape(text)):
        check_data_fits(config, data)
