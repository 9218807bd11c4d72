"""The page of `ddpm serve` in Chromium: what a person does on it, on a desktop and on a phone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.chromium import Browser, chromium, needs_chromium
from support.mlflow_server import put_store, wait_until
from support.models import write_checkpoint
from support.program import start
from support.served_models import address, get, publish

pytestmark = [pytest.mark.slow, needs_chromium]

TILES = "document.querySelectorAll('#tiles button:not(.unfinished)')"
MESSAGE = "document.querySelector('#message').textContent"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the address of `ddpm serve`, the registry, and two versions; the first is served."""
    folder = tmp_path_factory.mktemp("page")
    uri, versions = put_store(folder / "mlflow.db"), []
    cwd = Path.cwd()
    os.chdir(folder)  # MLflow puts the artifacts of such a store into the current folder
    try:
        for number in (1, 2):
            checkpoint = write_checkpoint(folder / f"step-{number}", "class", seed=number)
            registry, version = publish(uri, "shapes", checkpoint, folder / f"package-{number}")
            versions.append(version)
    finally:
        os.chdir(cwd)
    registry.promote(versions[0])
    process = start(
        folder, "serve", "--port", "0", "--every", "0.2", "-S", f"tracking.uri={uri}",
        "-S", "register.name=shapes",
    )  # fmt: skip
    try:
        url = address(process)
        wait_until(lambda: get(f"{url}/ready")[0] == 200, "it is ready", 120)
        yield url, registry, versions
    finally:
        process.send_signal(signal.SIGKILL)


@pytest.fixture(params=[(1280, 900), (390, 844)], ids=["desktop", "phone"])
def browser(
    serving: tuple[str, Any, list[Any]], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Browser]:
    with chromium(tmp_path / "profile") as browser:
        browser.resize(*request.param)
        browser.open(serving[0])
        browser.wait("document.querySelector('select[name=class]')")
        yield browser
        assert browser.js("document.documentElement.scrollWidth <= innerWidth"), "it is too wide"
    assert browser.errors == []


def draws(browser: Browser, count: int) -> None:
    browser.wait(f"{MESSAGE}.includes(' in ') && {TILES}.length == {count}")


def sources(browser: Browser) -> list[str]:
    found: list[str] = browser.js(f"[...{TILES}].map((tile) => tile.firstChild.src)")
    return found


def test_images_are_drawn_enlarged_and_varied(browser: Browser) -> None:
    browser.choose("select[name=class]", "square")
    browser.type("input[name=n]", "5")
    browser.type("input[name=seed]", "7")
    browser.click("#draw")
    draws(browser, 5)
    first = sources(browser)
    assert len(set(first)) == 5
    browser.click("#tiles button:nth-child(3)")
    assert browser.js("document.querySelector('#dialog').open")
    assert "Image 2, seed 7" in browser.js("document.querySelector('#dialog').innerText")
    assert browser.js("document.querySelector('#download').href") == first[2]
    assert browser.js("document.querySelector('#download').download") == "seed-7-image-2.png"
    browser.click("#classes")
    draws(browser, 3)
    assert sources(browser)[1] == first[2]  # the class square
    browser.click("#tiles button:nth-child(2)")
    browser.type("#toward", "8")
    browser.click("#between button")
    draws(browser, 12)
    assert sources(browser)[0] == first[2]
    browser.click("#tiles button:nth-child(1)")
    browser.click("#same")
    browser.click("#draw")
    draws(browser, 1)
    assert sources(browser) == [first[2]]


def test_a_part_of_an_uploaded_image_is_redrawn(browser: Browser, tmp_path: Path) -> None:
    photo = np.full((60, 80, 3), 200, np.uint8)
    photo[:, :40] = 30
    Image.fromarray(photo).save(tmp_path / "photo.jpg", quality=95)
    browser.type("input[name=n]", "2")
    browser.click("#start summary")
    browser.upload("#file", tmp_path / "photo.jpg")
    browser.wait("!document.querySelector('#original').hidden")
    browser.click("#draw")
    draws(browser, 2)
    varied = sources(browser)
    browser.drag("#mask", 50)
    browser.wait("document.querySelector('#hint').textContent.startsWith('The painted part')")
    browser.click("#draw")
    draws(browser, 2)
    drawn = browser.js(
        f"""(async () => {{
            const bitmap = await createImageBitmap({TILES}[0].firstChild);
            const canvas = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
            canvas.drawImage(bitmap, 0, 0);
            return [...canvas.getImageData(0, 0, bitmap.width, bitmap.height).data];
        }})()"""
    )
    rows = np.array(drawn).reshape(8, 8, 4)[..., 0]
    assert sources(browser) != varied
    assert (abs(rows[:2, :3] - 30) < 12).all() and (abs(rows[:2, 5:] - 200) < 12).all()  # kept
    assert abs(rows[3:5, 2:4] - 30).min() > 12 or abs(rows[3:5, 4:6] - 200).min() > 12  # redrawn


def test_a_mistake_is_explained_and_nothing_is_lost(browser: Browser, tmp_path: Path) -> None:
    browser.type("input[name=n]", "200")
    browser.js("document.querySelector('input[name=steps]').closest('details').open = true")
    browser.js("document.querySelector('input[name=steps]').max = 999")
    browser.type("input[name=steps]", "99")
    browser.click("#draw")
    browser.wait(f"{MESSAGE}.includes('must be at most')")
    browser.errors.clear()  # Chromium reports the status 400
    (tmp_path / "text.png").write_text("no image")
    browser.click("#start summary")
    browser.upload("#file", tmp_path / "text.png")
    browser.wait(f"{MESSAGE} == 'text.png is not an image that this browser can read.'")
    assert browser.js("document.querySelector('input[name=n]').value") == "200"


def test_a_request_can_be_stopped(browser: Browser) -> None:
    browser.type("input[name=n]", "256")
    browser.js("document.querySelector('input[name=steps]').value = 50")
    browser.click("#draw")
    browser.wait(f"{MESSAGE}.startsWith('Step ')")
    browser.click("#stop")
    browser.wait(f"{MESSAGE} == 'Stopped.'")
    assert browser.js("document.querySelector('#tiles .unfinished') === null")


def test_the_page_changes_to_the_next_champion(
    browser: Browser, serving: tuple[str, Any, list[Any]]
) -> None:
    _, registry, versions = serving
    registry.promote(versions[0])
    browser.wait("document.querySelector('#head').innerText.includes('version 1')")
    browser.type("input[name=n]", "3")
    registry.promote(versions[1])
    browser.wait("document.querySelector('#head').innerText.includes('version 2')")
    assert browser.js(MESSAGE) == "Version 2 answers now."
    assert browser.js("document.querySelector('input[name=n]').value") == "3"
    browser.click("#draw")
    draws(browser, 3)
    browser.click("#tiles button:nth-child(1)")
    assert "version 2" in browser.js("document.querySelector('#facts').textContent")
