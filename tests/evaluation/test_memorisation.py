"""Copies of training images are found, mirrored ones too; held-out images are no copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.digits_workspace import HELD_OUT, Pixels, digits, make_config, put_data

from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.evaluation import memorisation
from ddpm_core.evaluation.grids import write_neighbours
from ddpm_core.evaluation.memorisation import compare, nearest, straddling
from ddpm_core.evaluation.pages import percent
from ddpm_core.evaluation.reference import open_neighbours
from ddpm_core.evaluation.scorer import Scorer
from ddpm_core.evaluation.verdict import _memorisation as verdict_of
from ddpm_core.scores import Memorisation
from ddpm_core.storage.workspace import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace.open(str(tmp_path_factory.mktemp("memory")))
    put_data(workspace, *digits())
    return workspace


@pytest.fixture(scope="module")
def train(workspace: Workspace) -> PackedDataset:
    return open_dataset(workspace)


TWIN = 59  # a held-out 1 that is nearly the same as a training one


def held_out() -> Pixels:
    return digits()[0][:HELD_OUT]


def noisy(images: Pixels, deviation: float) -> Pixels:
    noise = np.random.default_rng(0).normal(0, deviation, images.shape)
    return (images + noise).round().clip(0, 255).astype(np.uint8)


def test_the_nearest_image_is_that_of_a_full_search(train: PackedDataset) -> None:
    found = nearest(held_out(), train)
    real = train.images[:].reshape(len(train), -1) / 255
    for row, image in enumerate(held_out()):
        distances = [
            np.sqrt(np.square(real - query.reshape(1, -1) / 255).mean(1))
            for query in (image / 1.0, image[:, ::-1] / 1.0)
        ]
        distances = [d / (image / 255).std() for d in distances]  # one channel
        assert found.distance[row] == pytest.approx(min(map(np.min, distances)), abs=1e-6)
        assert found.mirrored[row] == (distances[1].min() < distances[0].min())
        at = distances[int(found.mirrored[row])]
        assert at[found.index[row]] == pytest.approx(at.min(), abs=1e-6)


def test_the_search_does_not_depend_on_its_chunks(
    train: PackedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = nearest(held_out(), train)
    monkeypatch.setattr(memorisation, "CHUNK", 77)
    cut = nearest(held_out(), train)
    np.testing.assert_array_equal(cut.index, whole.index)
    np.testing.assert_array_equal(cut.distance, whole.distance)


def test_uniform_image_is_not_near_every_uniform_image(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path))
    sky = np.full((30, 16, 16, 3), (90, 150, 220), np.uint8)
    birds = sky.copy()
    for number, bird in enumerate(birds):
        bird[number % 12 : number % 12 + 4, number // 3 : number // 3 + 4] = 60
    put_data(workspace, np.concatenate([birds, sky]), np.zeros(60, np.int64), 30, ())
    data = open_dataset(workspace)
    # The pixels of a bird in the sky are nearly those of the sky, but not relative to its contrast.
    assert nearest(birds, data).distance.min() == pytest.approx(1.0, abs=0.05)
    assert np.abs(birds[0] / 255 - sky[0] / 255).mean() < 0.03


def test_copies_and_mirrored_copies_have_distance_zero(train: PackedDataset) -> None:
    copies = train.take(np.array([3, 1500]))
    plain, turned = nearest(copies, train), nearest(copies[:, :, ::-1], train)
    assert list(plain.distance) == list(turned.distance) == [0, 0]
    assert list(plain.index) == list(turned.index) == [3, 1500]
    assert list(plain.mirrored) == [False, False] and list(turned.mirrored) == [True, True]


def test_large_colour_images_are_searched_in_bounded_memory(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path))
    images = np.random.default_rng(0).integers(0, 256, (40, 100, 100, 3)).astype(np.uint8)
    put_data(workspace, images, np.zeros(40, np.int64), 8, ())
    data = open_dataset(workspace)
    found = nearest(data.take(np.array([5])), data)
    assert (found.index[0], found.distance[0]) == (5, 0)
    assert memorisation._flat(images).shape == (40, 32 * 32 * 3)


def verdict(samples: Pixels, train: PackedDataset) -> dict[str, object]:
    return compare(nearest(samples, train).distance, nearest(held_out(), train).distance)


def test_held_out_images_are_no_copies(train: PackedDataset) -> None:
    distances = nearest(held_out(), train).distance
    facts = compare(distances[::2], distances[1::2])
    assert facts["verdict"] == "none" and facts["p_value"] > 0.05


def test_generator_that_copies_everything_is_found(train: PackedDataset) -> None:
    facts = verdict(noisy(train.images[:HELD_OUT], 2), train)
    assert facts["verdict"] == "copies"
    assert facts["copies"] == HELD_OUT and facts["share_below"] == 1.0
    assert facts["p_value"] < 1e-30


@pytest.mark.parametrize("mirrored", [False, True])
def test_few_planted_copies_are_found(train: PackedDataset, mirrored: bool) -> None:
    planted = held_out().copy()
    copies = noisy(train.images[100:109], 2)
    planted[:9] = copies[:, :, ::-1] if mirrored else copies
    facts = verdict(planted, train)
    assert facts["copies"] == 9 + facts["holdout_copies"] == 10 and facts["verdict"] == "copies"
    assert facts["share_below"] > 0.05 > facts["share_p_value"]


def test_samples_that_are_only_nearer_are_suspicious(train: PackedDataset) -> None:
    blends = 0.75 * held_out() + 0.25 * train.take(nearest(held_out(), train).index)
    facts = verdict(blends.astype(np.uint8), train)
    assert facts["verdict"] == "near" and facts["copies"] < 0.05 * HELD_OUT


def test_noise_is_not_memorisation(train: PackedDataset) -> None:
    facts = verdict(noisy(held_out(), 60), train)
    assert facts["verdict"] == "none" and facts["p_value"] > 0.99


VERBATIM, ALL_BUT_VERBATIM, TWIN_LIKE = 0.0, 0.05, 0.25  # times the median distance


def share_of_copies_verdicts(
    samples: int, held_out: int, rates: tuple[float, float], kind: float
) -> float:
    """Return the share of `copies` verdicts for 300 random models with these rates of copies."""
    generator = np.random.default_rng(samples + held_out)

    def distances(count: int, rate: float) -> np.ndarray:
        usual = generator.gamma(20, 0.05, count)
        return np.where(generator.random(count) < rate, kind, usual)

    pairs = [(distances(samples, rates[0]), distances(held_out, rates[1])) for _ in range(300)]
    return float(np.mean([compare(*pair)["verdict"] == "copies" for pair in pairs]))


@pytest.mark.parametrize(
    ("samples", "held_out"), [(20, 20), (180, 180), (500, 500), (500, 50), (500, 10)]
)
@pytest.mark.parametrize("rate", [0.005, 0.02, 0.2])
def test_as_many_twins_as_held_out_images_are_no_copies(
    samples: int, held_out: int, rate: float
) -> None:
    assert share_of_copies_verdicts(samples, held_out, (rate, rate), TWIN_LIKE) <= 0.02


@pytest.mark.parametrize(
    ("samples", "held_out", "rate", "kind", "least"),
    [
        (180, 180, 0.05, TWIN_LIKE, 0.75),
        (500, 50, 0.1, TWIN_LIKE, 0.6),
        (500, 10, 0.4, TWIN_LIKE, 0.6),
        (180, 180, 0.02, VERBATIM, 0.6),
        (500, 10, 0.02, VERBATIM, 0.85),
        (2000, 2000, 0.005, VERBATIM, 0.85),
    ],
)
def test_copies_are_found_as_often_as_documented(
    samples: int, held_out: int, rate: float, kind: float, least: float
) -> None:
    assert share_of_copies_verdicts(samples, held_out, (rate, 0.0), kind) >= least


def test_verbatim_twins_of_held_out_images_are_no_copies() -> None:
    assert share_of_copies_verdicts(500, 500, (0.01, 0.01), ALL_BUT_VERBATIM) <= 0.03
    assert share_of_copies_verdicts(180, 180, (0.01, 0.01), ALL_BUT_VERBATIM) <= 0.07


def test_three_verbatim_copies_are_a_verdict_but_two_are_not() -> None:
    usual = np.random.default_rng(0).gamma(20, 0.05, 180)
    found = [compare(np.concatenate([np.zeros(count), usual[count:]]), usual) for count in (2, 3)]
    assert [facts["verdict"] for facts in found] == ["none", "copies"]
    assert [facts["verbatim"] for facts in found] == [2, 3]


def test_more_samples_than_held_out_images_are_examined(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path))
    images, labels = digits(8)
    put_data(workspace, images, labels, held_out=10)
    data = open_dataset(workspace)
    scorer = Scorer(make_config(tmp_path, workspace=str(tmp_path)), workspace)
    facts, found = scorer.memorisation(noisy(data.take(np.arange(300)), 60))
    assert (facts["count"], facts["holdout_count"], len(found.distance)) == (300, 10, 300)
    planted = noisy(data.take(np.arange(300)), 60)
    planted[290:] = data.take(np.arange(10))
    assert scorer.memorisation(planted)[0]["verdict"] == "copies"


def test_without_held_out_images_the_verdict_is_unknown(train: PackedDataset) -> None:
    distances = nearest(held_out(), train).distance
    facts = compare(distances, distances[:0])
    assert facts.plain() == {
        "count": HELD_OUT,
        "exact": 0,
        "holdout_exact": 0,
        "verdict": "unknown",
    }


def test_training_images_as_samples_are_always_copies() -> None:
    usual = np.random.default_rng(0).gamma(20, 0.05, 40)
    for leaked in (0, 30, 60):
        facts = compare(np.zeros(500), np.concatenate([np.zeros(leaked), usual]))
        assert facts["verdict"] == "copies" and facts["verbatim"] == facts["exact"] == 500
        assert (facts["holdout_count"], facts["holdout_exact"]) == (40, leaked)


def test_held_out_training_images_make_the_verdict_unknown(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path))
    images, labels = digits(8)
    put_data(workspace, np.concatenate([images[:20], images[:60]]), np.tile(labels[:20], 4), 20)
    scorer = Scorer(make_config(tmp_path, workspace=str(tmp_path)), workspace)
    facts, _ = scorer.memorisation(images[:50])
    assert facts.plain() == {"count": 50, "exact": 50, "holdout_exact": 20, "verdict": "unknown"}
    answer = verdict_of(Memorisation.model_validate(facts))
    assert answer.level == "caution" and "50 of 50 samples are identical to a" in answer.detail
    assert len(straddling(scorer.held_out[1])) == 20


@pytest.mark.parametrize("held_out", [10, 50, 500])
def test_expected_share_is_right_for_few_held_out_images(held_out: int) -> None:
    draw = np.random.default_rng(held_out)
    found = [compare(1 + draw.random(300), 1 + draw.random(held_out)) for _ in range(200)]
    shares = [facts["share_below"] for facts in found]
    error = np.std(shares) / np.sqrt(len(shares))
    assert abs(np.mean(shares) - found[0]["expected_below"]) < 4 * error
    answer = verdict_of(Memorisation.model_validate(found[0]))
    assert f"by chance it would be {percent(found[0]['expected_below'])}" in answer.detail


def test_near_duplicates_across_the_split_are_reported(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path))
    images, labels = digits()
    images = images.copy()
    images[7], images[11] = images[1000], noisy(images[1200:1201], 3)[0, :, ::-1]
    put_data(workspace, images, labels)
    data = open_dataset(workspace)
    found = nearest(images[:HELD_OUT], data)
    assert list(straddling(found)) == [7, 11, TWIN]
    assert list(found.index[[7, 11]]) == [1000 - HELD_OUT, 1200 - HELD_OUT]


def test_clean_split_has_no_straddling_images(train: PackedDataset) -> None:
    others = np.delete(held_out(), TWIN, axis=0)
    assert len(straddling(nearest(others, train))) == 0


def test_neighbours_of_held_out_images_are_searched_once(workspace: Workspace) -> None:
    import torch

    splits = open_dataset(workspace), open_dataset(workspace, "holdout")
    images, found = open_neighbours(workspace, *splits, torch.device("cpu"))
    files = list(workspace.path("evaluation/reference").glob("neighbours-*/*.safetensors"))
    before = [file.stat().st_mtime_ns for file in files]
    again_images, again = open_neighbours(workspace, *splits, torch.device("cpu"))
    assert [file.stat().st_mtime_ns for file in files] == before and len(files) == 1
    np.testing.assert_array_equal(images, again_images)
    for name in ("distance", "index", "mirrored"):
        np.testing.assert_array_equal(vars(found)[name], vars(again)[name])


def test_corrupt_neighbours_are_searched_again(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    splits = open_dataset(workspace), open_dataset(workspace, "holdout")
    _, found = open_neighbours(workspace, *splits, torch.device("cpu"))
    (file,) = workspace.path("evaluation/reference").glob("neighbours-*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-8] + b"00000000")
    _, again = open_neighbours(workspace, *splits, torch.device("cpu"))
    assert "checksum differs" in capsys.readouterr().err
    np.testing.assert_array_equal(found.distance, again.distance)


def test_sixteen_closest_pairs_are_written_as_a_grid(
    workspace: Workspace, train: PackedDataset
) -> None:
    from PIL import Image

    copies = train.take(np.arange(20))[:, :, ::-1]
    write_neighbours(workspace, "test", copies, nearest(copies, train), train)
    with Image.open(workspace.path("evaluation/pictures/neighbours-test.png")) as image:
        pixels = np.asarray(image)
    assert pixels.shape == (4 * (16 + 2) + 2, 4 * (32 + 2) + 2)
    np.testing.assert_array_equal(
        pixels[2:18, 2:18], pixels[2:18, 18:34]
    )  # mirrored, as it was compared
