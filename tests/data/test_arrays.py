"""Arrays of images in .npy and .npz files are read in place; nothing is unpickled."""

from __future__ import annotations

import io
import os
import random
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support import mutations
from support.images import config, prepared, write

from ddpm_core.config import Prepare
from ddpm_core.data import workers
from ddpm_core.data.check import check_data
from ddpm_core.data.prepare import stale
from ddpm_core.data.sources import arrays, limits
from ddpm_core.data.sources.arrays import Arrays
from ddpm_core.data.sources.file import open_file
from ddpm_core.data.sources.open import recognise
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace

SEED = int(os.environ.get("FUZZ_SEED", "1"))
EACH = 150 * int(os.environ.get("FUZZ_ROUNDS", "1"))
SAMPLES = np.random.default_rng(0).integers(0, 256, (6, 8, 10, 3), np.uint8)
LABELS = np.array([1, 0, 1, 0, 1, 12])


def npy(path: Path, array: NDArray[Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array, **options)
    return path


def pixels(path: Path) -> list[Any]:
    source = open_file(path, "x")
    return [payload for _, payload in source.read(source.listing().images)]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_samples_of_adm_are_images_with_labels(
    tmp_path: Path, save: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of the same pixels as PNG has the same images in the same order."""
    save(tmp_path / "samples_6x8x10x3.npz", SAMPLES, LABELS)
    data = prepared(tmp_path, tmp_path / "samples_6x8x10x3.npz", max_rejected=0.0)
    assert data.classes == ["0", "1", "12"] and data.labels.tolist() == [1, 0, 1, 0, 1, 2]
    assert (
        "The images come from the array arr_0, the classes from arr_1." in capsys.readouterr().err
    )
    for number, array in enumerate(SAMPLES):
        write(tmp_path / "raw" / f"{number}.png", Image.fromarray(array))
    expected = prepared(tmp_path / "b", tmp_path / "raw")
    assert np.array_equal(data.images[np.arange(6)], expected.images[np.arange(6)])
    report = check_data(tmp_path / "samples_6x8x10x3.npz")
    assert (report.count, report.largest, report.stored) == (6, (10, 8), {"array": 6})


def test_all_layouts_give_the_same_pixels(tmp_path: Path) -> None:
    first = SAMPLES.transpose(0, 3, 1, 2).copy()
    for array in (SAMPLES, first):
        found = pixels(npy(tmp_path / "x.npy", array))
        assert [item.shape for item in found] == [(8, 10, 3)] * 6
        assert np.array_equal(np.stack(found), SAMPLES)
    gray = SAMPLES[..., 0].copy()
    for array in (gray, gray[..., None], gray[:, None]):
        assert np.array_equal(np.stack(pixels(npy(tmp_path / "x.npy", array))), gray)


def test_only_chosen_rows_are_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", SAMPLES, LABELS)
    source = Arrays(tmp_path / "x.npz", "x")
    chosen = [entry for entry in source.listing().images if entry.class_name == "0"]
    found = dict(source.read(chosen[::-1]))
    assert np.array_equal(found[0], SAMPLES[3]) and np.array_equal(found[1], SAMPLES[1])


def test_folder_of_arrays_has_splits(tmp_path: Path) -> None:
    for split, rows in (("train", slice(0, 4)), ("test", slice(4, 6))):
        (tmp_path / "raw").mkdir(exist_ok=True)
        np.savez(tmp_path / f"raw/{split}.npz", images=SAMPLES[rows], labels=LABELS[rows, None] % 2)
    data = prepared(tmp_path, tmp_path / "raw", max_rejected=0.0)
    assert (len(data), data.manifest.holdout_count, data.classes) == (4, 2, ["0", "1"])
    workspace = Workspace.open(str(tmp_path / "workspace"))
    assert stale(config(tmp_path / "raw"), workspace) is None
    npy(tmp_path / "raw/more.npy", SAMPLES)
    assert (
        stale(config(tmp_path / "raw"), workspace) == "the source has changed since it was prepared"
    )


def test_arrays_beside_images_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "raw/1.png", Image.fromarray(SAMPLES[0]))
    npy(tmp_path / "raw/latents.npy", np.zeros((2, 4, 4)))
    data = prepared(tmp_path, tmp_path / "raw")
    assert len(data) == 1 and data.manifest.ignored == {"npy": 1}


UNUSABLE = {
    "float32 (6, 8, 10, 3)": SAMPLES.astype(np.float32) / 127.5 - 1,
    "int64 (6, 8, 10, 3)": SAMPLES.astype(np.int64),
    "uint8 (6, 3, 10, 3)": SAMPLES[:, :3].copy(),
    "uint8 (6, 8, 10, 4)": SAMPLES[..., [0, 1, 2, 0]].copy(),
    "uint8 (8, 10, 3)": SAMPLES[0],
    "uint8 (6, 0, 10, 3)": SAMPLES[:, :0],
    "uint8 (10,)": SAMPLES[0, 0, :, 0].copy(),
    "uint8 (6, 8, 10, 3) in Fortran order": np.asfortranarray(SAMPLES),
}


@pytest.mark.parametrize("found", UNUSABLE)
def test_other_arrays_are_refused_with_a_way_out(tmp_path: Path, found: str) -> None:
    path = npy(tmp_path / "x.npy", UNUSABLE[found])
    with pytest.raises(UserError) as error:
        check_data(path)
    assert f"x.npy has no array of images; it contains {found}. Images must be" in str(error.value)
    assert "To convert values from -1 to 1: numpy.save(" in str(error.value)


class Mine:
    """Fails the test if it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os._exit, (3,))


def test_pickled_arrays_are_never_read(tmp_path: Path) -> None:
    path = npy(tmp_path / "x.npy", np.array([Mine()], object), allow_pickle=True)
    with pytest.raises(UserError, match="it contains Python objects, which are pickled and never"):
        check_data(path)
    objects = np.array([Mine()] * 6, object)
    np.savez(tmp_path / "x.npz", SAMPLES, objects)
    listing = Arrays(tmp_path / "x.npz", "x").listing()
    assert len(listing.images) == 6 and listing.images[0].class_name is None
    assert listing.notes[1].startswith("Ignored arrays: arr_1 (Python objects, which are pickled")


def test_npz_with_too_many_arrays_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", *(SAMPLES[:1] for _ in range(101)))
    with pytest.raises(UserError, match=r"x.npz has 101 arrays; at most 100 are read, too many"):
        check_data(tmp_path / "x.npz")


def test_ambiguous_archives_of_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x_train=SAMPLES, x_test=SAMPLES)
    with pytest.raises(UserError, match=r"several arrays of images; it contains x_train: uint8"):
        check_data(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", SAMPLES, LABELS, LABELS)
    with pytest.raises(UserError, match=r"several arrays of labels: arr_1, arr_2"):
        check_data(tmp_path / "x.npz")


@pytest.mark.parametrize("shape", ["(7, 8, 10, 3)", "(5, 8, 10, 3)", "(-6, 8, 10, 3)"])
@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_header_with_a_false_shape_is_refused(tmp_path: Path, shape: str, kind: str) -> None:
    stream = io.BytesIO()
    np.save(stream, SAMPLES)
    content = stream.getvalue().replace(b"(6, 8, 10, 3)", shape.encode())
    content = content.replace(b", }" + b" " * (len(shape) - 13), b", }")  # the same length
    path = write(tmp_path / "x.npy", content)
    if kind == "npz":
        path = tmp_path / "x.npz"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("arr_0.npy", content)
    with pytest.raises(UserError, match=r"x.np. is damaged .* has [\d,]+ bytes; its shape \("):
        check_data(path)


def test_truncated_arrays_are_named(tmp_path: Path) -> None:
    path = npy(tmp_path / "raw/a.npy", SAMPLES)
    write(path, path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"The array file .*raw: a.npy is damaged"):
        check_data(tmp_path / "raw")


def test_wrong_checksum_in_an_npz_is_an_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", SAMPLES)
    content = bytearray((tmp_path / "x.npz").read_bytes())
    content[content.index(SAMPLES[5].tobytes())] ^= 1
    write(tmp_path / "x.npz", bytes(content))
    with pytest.raises(UserError, match=r"x.npz is damaged .* Bad CRC-32"):
        check_data(tmp_path / "x.npz")


def test_npz_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BOMB_FLOOR", 2**20)
    np.savez_compressed(tmp_path / "x.npz", np.zeros((500, 64, 64, 3), np.uint8))
    with pytest.raises(UserError, match=r"unpacks to more than [\d,]+ bytes, too many"):
        check_data(tmp_path / "x.npz")


def test_large_or_too_many_images_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = npy(tmp_path / "x.npy", np.zeros((300, 2, 2), np.uint8))
    monkeypatch.setattr(limits, "ENTRIES_FLOOR", 100)
    with pytest.raises(UserError, match=r"x.npy has 300 images, too many"):
        check_data(path)
    monkeypatch.setattr(arrays, "PIXELS", 3)
    with pytest.raises(UserError, match=r"x.npy has images of 4 pixels; at most 3 are read"):
        check_data(path)


def test_large_arrays_are_decoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHUNK_BYTES", 500)
    payloads = [(position, SAMPLES[position]) for position in range(6)]
    assert [len(chunk) for chunk in workers.chunked(payloads, 0)] == [3, 3]


def test_zip_with_other_files_is_an_archive(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.save(stream, SAMPLES)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("train.npy", stream.getvalue())
        archive.writestr("README.md", "text")
    data = prepared(tmp_path, tmp_path / "x.zip")
    assert len(data) == 6 and data.manifest.ignored == {"md": 1}


def test_damaged_array_is_read_or_a_user_error(tmp_path: Path) -> None:
    files = []
    for save in (np.savez, np.savez_compressed):
        stream = io.BytesIO()
        save(stream, SAMPLES, LABELS)
        files.append(stream.getvalue())
    stream = io.BytesIO()
    np.save(stream, SAMPLES)
    files.append(stream.getvalue())
    found: Counter[str] = Counter()
    for number in range(EACH):
        random_ = random.Random(f"{SEED} arrays {number}")
        data = random_.choice(files)
        for _ in range(random_.choice([1, 1, 2])):
            data = random_.choice(mutations.fitting("x.npy"))(random_, data)
        path = write(tmp_path / "x", data)
        try:
            source, listing = recognise(open_file(path, "x"), Prepare())
            found["rows"] += len(list(source.read(listing.images)))
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
            found["refused"] += 1
    assert found["rows"] > EACH // 5 and found["refused"] > EACH // 3
