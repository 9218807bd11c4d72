"""Packed data are read as they were written, and the order of training is a pure function."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.images import config, prepared, write_classes

from ddpm_core.data.dataset import PackedArray, open_dataset
from ddpm_core.data.order import BalancedOrder, batch_indices
from ddpm_core.data.prepare import prepare
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace

# Reading


@pytest.fixture
def array(tmp_path: Path) -> tuple[PackedArray, np.ndarray]:
    """Eleven rows in three files, and the same array in memory."""
    rows = np.arange(11 * 2 * 3, dtype=np.int64).reshape(11, 2, 3)
    for name, part in (("a", rows[:4]), ("b", rows[4:5]), ("c", rows[5:])):
        np.save(tmp_path / f"{name}.npy", part)
    return PackedArray([tmp_path / f"{name}.npy" for name in "abc"]), rows


def test_packed_array_is_indexed_like_numpy(array: tuple[PackedArray, np.ndarray]) -> None:
    packed, rows = array
    assert (packed.shape, packed.dtype, len(packed)) == (rows.shape, rows.dtype, 11)
    assert (packed[3] == rows[3]).all() and (packed[-1] == rows[-1]).all()
    for part in (slice(None), slice(3, 7), slice(9, 2, -2), slice(5, 5), slice(-3, None)):
        assert np.array_equal(packed[part], rows[part])
    for index in ([4], [10, 0, 4, 4, -1], []):
        wanted = np.array(index, dtype=np.int64)
        assert np.array_equal(packed[wanted], rows[wanted])
    assert np.array_equal(np.asarray(packed), rows)


@pytest.mark.parametrize("index", [11, -12])
def test_index_out_of_range_is_an_error(array: tuple[PackedArray, np.ndarray], index: int) -> None:
    with pytest.raises(IndexError, match="11 rows"):
        array[0].take(np.array([index]))


def test_take_returns_a_copy(tmp_path: Path) -> None:
    data = prepared(tmp_path, write_classes(tmp_path / "raw", ["a"]))
    taken = data.take(np.array([1, 1]))
    taken[0] = 0
    assert not (data.take(np.array([1])) == 0).all()
    assert (taken[1] == data.images[1]).all()


def test_files_are_closed_with_the_array(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        packed = PackedArray([tmp_path / "a.npy"])
        assert packed[0].sum() == 0
        del packed
        gc.collect()
    assert [str(one.message) for one in seen if one.category is ResourceWarning] == []


def test_empty_holdout_split_can_be_opened(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["a"])
    data = prepared(tmp_path, root, split="holdout", holdout=0.0)
    assert data.images[:].shape == (0, 8, 8, 3)
    assert (len(data), data.labels.shape, data.class_counts) == (0, (0,), [0])
    assert data.captions is not None and data.captions.shape == (0, 64)


def test_each_split_has_its_own_fingerprint(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["a"], each=30)
    train = prepared(tmp_path, root, holdout=0.3)
    held_out = open_dataset(Workspace.open(str(tmp_path / "workspace")), "holdout")
    assert len(train) + len(held_out) == 30 and len(held_out) > 2
    assert len({train.fingerprint, held_out.fingerprint}) == 2
    assert len(train.fingerprint) == 16


def test_workspace_without_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no prepared data in .* Run `ddpm prepare`"):
        open_dataset(Workspace.open(str(tmp_path)))


def test_missing_file_or_byte_is_an_error(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path / "workspace"))
    prepare(config(write_classes(tmp_path / "raw", ["a"])), workspace)
    labels, images = workspace.path("data/labels.npy"), workspace.path("data/images.npy")
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"data/images\.npy .*703.* 704 "):
        open_dataset(workspace)
    images.write_bytes(images.read_bytes() + b"x")
    labels.unlink()
    with pytest.raises(UserError, match=r"data/labels\.npy is missing"):
        open_dataset(workspace)


READ_ALL = """
import resource, sys
from pathlib import Path
import numpy as np
from ddpm_core.data.dataset import PackedArray

def peak():
    bytes_each = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_each

array = PackedArray([Path(sys.argv[1])])
array.take(np.arange(100))
before = peak()
for start in range(0, len(array), 100):
    array.take(np.arange(start, start + 100))
print(peak() - before)
"""


def test_reading_in_batches_needs_memory_for_one(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((10_000, 64, 64, 1), np.uint8))
    command = [sys.executable, "-c", READ_ALL, str(tmp_path / "x.npy")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 2e6  # bytes, of 41 million on disk


# Order


def stream(seed: int, n: int, batch_size: int, steps: int) -> np.ndarray:
    return np.concatenate([batch_indices(seed, n, step, batch_size) for step in range(steps)])


def test_every_epoch_contains_every_image_once() -> None:
    order = stream(seed=3, n=10, batch_size=4, steps=10)
    epochs = order.reshape(4, 10)
    assert (np.sort(epochs, axis=1) == np.arange(10)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_stream_does_not_depend_on_the_batch_size() -> None:
    assert (stream(3, 10, 4, 15) == stream(3, 10, 12, 5)).all()


def test_large_batch_contains_several_epochs() -> None:
    batch = batch_indices(0, 3, step=2, batch_size=7)
    assert batch.shape == (7,) and batch.dtype == np.int64
    assert (np.sort(stream(0, 3, 7, 3).reshape(7, 3), axis=1) == np.arange(3)).all()


def test_steps_are_independent_and_seeds_differ() -> None:
    assert (batch_indices(5, 100, 7, 16) == stream(5, 100, 16, 8)[-16:]).all()
    assert (batch_indices(5, 100, 7, 16) != batch_indices(6, 100, 7, 16)).any()


LABELS = np.repeat([3, 0, 1], [40, 1, 9])  # class 2 has no images


def balanced(seed: int, batch_size: int, steps: int) -> np.ndarray:
    order = BalancedOrder(LABELS)
    return np.concatenate([order.indices(seed, step, batch_size) for step in range(steps)])


def test_balanced_order_draws_every_class_equally_often() -> None:
    drawn = balanced(seed=3, batch_size=8, steps=90)
    assert np.bincount(LABELS[drawn]).tolist() == [240, 240, 0, 240]
    rounds = LABELS[drawn].reshape(-1, 3)
    assert (np.sort(rounds, axis=1) == [0, 1, 3]).all()
    assert len({tuple(row) for row in rounds}) == 6  # all orders of three classes
    # Within a class, every image is drawn once before any is drawn again.
    ones = drawn[LABELS[drawn] == 1][:234].reshape(26, 9)
    assert (np.sort(ones, axis=1) == np.flatnonzero(LABELS == 1)).all()
    assert len({tuple(epoch) for epoch in ones}) == 26
    assert (np.bincount(drawn)[:40] == 6).all()


def test_balanced_order_is_a_function_of_seed_and_step() -> None:
    drawn = balanced(3, 8, 30)
    assert (balanced(3, 24, 10) == drawn).all()
    order = BalancedOrder(LABELS)
    for step in (20, 4, 21):  # in any order of calls
        assert (order.indices(3, step, 8) == drawn[8 * step : 8 * step + 8]).all()
    assert (balanced(4, 8, 30) != drawn).any()
