"""POST /generate and the page: images, previews, edits, and files of strangers."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient
from support.models import write_checkpoint
from support.served_models import OWN, assert_same_images, drawn, pixels

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import Config
from ddpm_core.registry import package
from ddpm_core.registry.answering import Limits
from ddpm_core.registry.current import CurrentChampion, Loaded
from ddpm_core.registry.generate import MAX_BODY, document
from ddpm_core.registry.server import application
from ddpm_core.registry.serving import Served
from ddpm_core.registry.uploads import MAX_PIXELS

FACTS = {
    "name": "shapes", "alias": "champion", "version": "3", "step": 4, "score_name": "fid",
    "score": 12.5, "evidence": {"count": 20, "sampler": {"steps": 5}},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("generate")
    package.write_checkpoint(write_checkpoint(folder / "step", "class"), OWN, folder / "served")
    return Checkpoint.open(folder / "served")


def client_of(checkpoint: Checkpoint | None, seconds: float = 60.0) -> TestClient:
    champion = CurrentChampion(Config())
    if checkpoint is not None:
        champion.loaded = Loaded(("3", 0), Served(checkpoint.folder), FACTS)
    limits = Limits(work=64 * 256 * 50, waiting=9, timeout=9.0, seconds=seconds)
    return TestClient(application(champion, limits))


@pytest.fixture(scope="module")
def client(checkpoint: Checkpoint) -> TestClient:
    return client_of(checkpoint)


def generate(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["version"] == "3"
    images: list[dict[str, Any]] = answer["images"]
    return images


def refusal(client: TestClient, status: int, **body: Any) -> str:
    response = client.post("/generate", json=body)
    assert response.status_code == status, response.text
    message: str = response.json()["message"]
    assert len(message) <= 500
    return message


def encoded(array: np.ndarray, kind: str = "PNG") -> str:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, kind)
    return base64.b64encode(stream.getvalue()).decode()


GRAY = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
MASK = np.uint8(255) * (np.arange(8) < 4)[None].repeat(8, 0)  # the left half is white


def test_images_are_those_of_sampling(client: TestClient, checkpoint: Checkpoint) -> None:
    images = generate(client, n=3)
    assert_same_images(images, drawn(checkpoint, 3))
    assert [image["number"] for image in images] == [0, 1, 2]


def test_every_class_is_drawn_from_the_same_noise(
    client: TestClient, checkpoint: Checkpoint
) -> None:
    images = generate(client, seed=8, first=2, every_class=True)
    assert [image["class"] for image in images] == ["circle", "square", "7"]
    for image in images:
        expected = drawn(checkpoint, 3, seed=8, classes=(image["class"],))[2:]
        assert_same_images([image], expected)


def test_images_go_from_one_seed_to_another(client: TestClient, checkpoint: Checkpoint) -> None:
    images = generate(client, n=3, seed=8, toward=9, **{"class": "square"})
    assert [image["share"] for image in images] == [0.0, 0.5, 1.0]
    for image, seed in zip(images[::2], (8, 9), strict=True):
        assert_same_images([image], drawn(checkpoint, 1, seed=seed, classes=("square",)))


def test_an_image_without_noise_comes_back(client: TestClient) -> None:
    generate(client, image=encoded(GRAY, "JPEG"), strength=0)
    for given in (encoded(GRAY), f"data:image/png;base64,{encoded(GRAY)}"):
        [image] = generate(client, image=given, strength=0)
        assert np.array_equal(pixels(image), GRAY)
    [image] = generate(client, image=encoded(GRAY), strength=0.5)
    assert not np.array_equal(pixels(image), GRAY)


def test_pixels_outside_the_mask_are_kept(client: TestClient) -> None:
    images = generate(client, n=2, image=encoded(GRAY), mask=encoded(MASK), previews=False)
    for image in images:
        assert np.array_equal(pixels(image)[:, 4:], GRAY[:, 4:])
        assert not np.array_equal(pixels(image)[:, :4], GRAY[:, :4])


def test_previews_arrive_before_the_images(client: TestClient, checkpoint: Checkpoint) -> None:
    response = client.post("/generate", json={"n": 65, "steps": 10, "previews": True})
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert lines[0] == {"version": "3", "count": 65}
    previews = [line for line in lines if "previews" in line]
    assert {line["step"] for line in previews} == {2, 4, 6, 8}
    assert all(line["steps"] == 10 for line in previews)
    positions = [at for line in previews if line["step"] == 2 for at in line["at"]]
    assert sorted(positions) == list(range(65))
    finished = [image for line in lines if "images" in line for image in line["images"]]
    assert_same_images(finished, drawn(checkpoint, 65, steps=10))
    last: dict[int, str] = {}
    for line in previews:
        last |= zip(line["at"], line["previews"], strict=True)
    near = np.stack([pixels({"image": last[at]}) for at in range(65)]).astype(int)
    exact = np.stack([pixels(image) for image in finished]).astype(int)
    assert np.abs(near - exact).mean() < 20


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"n": 0}, "n: got 0; must be at least 1"),
        ({"n": 256, "every_class": True}, "asks for 768 images"),
        ({"n": 256, "steps": 50, "image": encoded(GRAY), "mask": encoded(MASK)}, "at most 819,200"),
        ({"every_class": True, "class": "square"}, "class: got 'square'; not possible with"),
        ({"strength": 0.5}, "strength: got 0.5; requires image"),
        ({"mask": encoded(MASK)}, "mask: got "),
        ({"image": encoded(GRAY), "strength": 1.5}, "strength: got 1.5; must be at most 1"),
        ({"toward": -1}, "toward: got -1; must be at least 0"),
        ({"imgae": ""}, "imgae: unknown key; did you mean image?"),
    ],
)
def test_an_invalid_field_is_named(client: TestClient, body: dict[str, Any], expected: str) -> None:
    assert expected in refusal(client, 400, **body)


def bomb() -> bytes:
    """Return a PNG of 20,000 x 20,000 pixels in 50 KB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    side = 20_000
    rows = zlib.compress(b"\0" * (side // 8 + 1) * side, 9)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def many_scans() -> bytes:
    """Return a progressive JPEG whose last scan comes a hundred times."""
    stream = io.BytesIO()
    Image.fromarray(GRAY).save(stream, "JPEG", progressive=True)
    data = stream.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 100 + data[-2:]


WRONG = f"must be a PNG, JPEG or WebP of at most {MAX_PIXELS:,} pixels in base64"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"image": "no base64!"}, WRONG),
        ({"image": ""}, WRONG),
        ({"image": base64.b64encode(b"GIF89a" + bytes(99)).decode()}, WRONG),
        ({"image": encoded(GRAY, "GIF")}, WRONG),
        ({"image": encoded(GRAY, "TIFF")}, WRONG),
        ({"image": base64.b64encode(bomb()).decode()}, WRONG),
        ({"image": base64.b64encode(many_scans()).decode()}, WRONG),
        ({"image": base64.b64encode(b"<svg onload='alert(1)'/>").decode()}, WRONG),
        ({"image": "data:text/html," + "x" * 1000}, WRONG),
        ({"image": encoded(GRAY)[:-40] + "AAAA"}, "image: "),
        ({"image": encoded(GRAY), "mask": "AAAA"}, f"mask: got 'AAAA'; {WRONG}"),
        ({"image": encoded(GRAY), "mask": encoded(0 * MASK)}, "mask: got no white pixel"),
        ({"image": encoded(GRAY), "mask": encoded(MASK[:3])}, "must have the proportions"),
    ],
)
def test_a_file_that_is_no_small_image_is_refused(
    client: TestClient, files: dict[str, str], expected: str
) -> None:
    assert expected in refusal(client, 400, **files)
    assert len(generate(client)) == 1


def test_bodies_are_limited(client: TestClient) -> None:
    assert "larger than 1,048,576 bytes" in refusal(client, 413, image="A" * MAX_BODY)
    wrong = client.post("/generate", content=b"{}", headers={"Content-Type": "text/plain"})
    assert wrong.status_code == 415
    for body, expected in ((b"[]", "must be an object"), (b"{", "not valid JSON")):
        headers = {"Content-Type": "application/json"}
        response = client.post("/generate", content=body, headers=headers)
        assert (response.status_code, expected in response.text) == (400, True), response.text


def test_a_request_ends_at_its_time_limit(checkpoint: Checkpoint) -> None:
    client = client_of(checkpoint, seconds=0.05)
    body = {"n": 200, "steps": 50}
    assert "not finished within 0.05 seconds" in refusal(client, 504, **body)
    lines = client.post("/generate", json={**body, "previews": True}).text.splitlines()
    assert "not finished within 0.05 seconds" in json.loads(lines[-1])["error"]


def test_the_page_says_which_version_answers(client: TestClient) -> None:
    view = client.get("/live").json()
    assert "shapes, version 3" in view["head"]
    assert "Step 4 · fid 12.5, lower is better" in view["head"]
    assert "<dt>sampler.steps</dt>" in view["head"] and "<option>square</option>" in view["fields"]
    assert view["model"] == {"version": "3", "size": 8, "gray": True, "conditioning": "class"}


def test_the_page_waits_for_a_champion() -> None:
    client = client_of(None)
    view = client.get("/live").json()
    assert view["model"] is None and "No model yet" in view["head"]
    assert "was not asked yet" in view["head"]
    assert client.get("/").status_code == 200
    assert refusal(client, 503) == client.get("/ready").json()["message"]


def test_the_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    for text in (page.text, client.get("/page.js").text):
        assert "://" not in text


def test_names_of_a_model_are_escaped_in_the_page(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    strange = write_checkpoint(tmp_path / "step", "class", classes=[name, '"', "b"])
    view = client_of(strange).get("/live").json()
    assert "<option>&lt;script&gt;alert(1)" in view["fields"]
    assert "<script" not in view["fields"]


def test_a_text_model_takes_texts(tmp_path: Path) -> None:
    client = client_of(write_checkpoint(tmp_path / "texts", "text"))
    fields = client.get("/live").json()["fields"]
    assert 'name="prompt"' in fields and '<option value="a circle">' in fields
    assert generate(client, prompt="a circle", steps=1)[0]["class"] is None
    message = refusal(client, 400, every_class=True)
    assert "every_class: got true; requires a model with classes" in message


def test_the_api_is_documented(client: TestClient) -> None:
    documented = client.get("/openapi.json").json()
    assert documented == json.loads(json.dumps(document()))
    schemas = documented["components"]["schemas"]
    assert set(schemas["Generate"]["properties"]) >= {"n", "class", "image", "mask", "previews"}
    references = [text.split('"')[0] for text in json.dumps(documented).split("schemas/")[1:]]
    assert set(references) <= set(schemas)
    assert set(schemas["Image"]["properties"]) >= set(generate(client)[0])
