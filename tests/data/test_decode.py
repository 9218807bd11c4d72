"""prepare decodes every common kind of image file, and lists the reason for every other."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.images import encoded, flat, noise, prepared, rejected, write

from ddpm_core.data.decode import (
    PIXELS,
    SquareRule,
    Undecodable,
    decode,
    make_square,
    to_8_bits,
)
from ddpm_core.data.workers import make_squares

WHITE, BLUE = (255, 255, 255), (0, 0, 255)


def decoded(content: bytes, background: tuple[int, int, int] = WHITE) -> np.ndarray[Any, Any]:
    image = decode(content, background)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def near(pixels: np.ndarray[Any, Any], color: tuple[int, int, int], tolerance: int = 3) -> bool:
    return bool((abs(pixels - np.array(color)) <= tolerance).all())


# Formats and modes


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF"])
def test_common_format_is_decoded(kind: str) -> None:
    assert near(decoded(encoded(flat((200, 60, 20)), kind)), (200, 60, 20), tolerance=8)


def test_gray_image_becomes_three_equal_channels() -> None:
    assert near(decoded(encoded(flat(90, mode="L"))), (90, 90, 90), 0)


def test_one_bit_image_is_decoded() -> None:
    assert near(decoded(encoded(flat(1, mode="1"))), WHITE)


def test_transparent_palette_shows_the_background() -> None:
    image = flat(1, mode="P")
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((0, 0), 0)
    pixels = decoded(encoded(image, transparency=1), BLUE)
    assert near(pixels[0, 0], (255, 0, 0))
    assert near(pixels[1:], BLUE)


@pytest.mark.parametrize("mode, color", [("RGBA", (255, 0, 0, 0)), ("LA", (255, 0))])
def test_transparent_image_shows_the_background(mode: str, color: tuple[int, ...]) -> None:
    assert near(decoded(encoded(flat(color, mode=mode)), BLUE), BLUE)


def test_half_transparent_pixels_mix_with_the_background() -> None:
    pixels = decoded(encoded(flat((255, 0, 0, 128), mode="RGBA")), BLUE)
    assert near(pixels, (128, 0, 127))


def test_transparent_rgb_color_shows_the_background() -> None:
    assert near(decoded(encoded(flat((9, 9, 9)), transparency=(9, 9, 9)), BLUE), BLUE)


def test_cmyk_image_becomes_rgb() -> None:
    cyan = flat((255, 0, 0, 0), mode="CMYK")
    assert near(decoded(encoded(cyan, "JPEG", quality=95)), (0, 255, 255), 12)
    assert near(decoded(encoded(cyan, "TIFF")), (0, 255, 255), 12)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_image_is_scaled_not_clipped(kind: str) -> None:
    ramp = np.linspace(0, 65_535, 256).astype(np.uint16).reshape(16, 16)
    gray = decoded(encoded(Image.fromarray(ramp), kind))[:, :, 0].ravel()
    assert gray[0] == 0 and gray[-1] == 255
    assert (np.diff(gray) == 1).all()


def tiff_of(values: Any, order: str = "<", photometric: int = 1) -> bytes:
    """Encode 16-bit gray values (H, W) as a little- or big-endian TIFF."""
    content = values.astype(f"{order}u2").tobytes()
    height, width = values.shape
    shorts = {256: width, 257: height, 258: 16, 259: 1, 262: photometric, 277: 1, 278: height}
    longs = {273: 8 + 2 + 9 * 12 + 4, 279: len(content)}
    tags = {tag: struct.pack(f"{order}HHIHxx", tag, 3, 1, value) for tag, value in shorts.items()}
    tags |= {tag: struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in longs.items()}
    start = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HIH", 42, 8, len(tags))
    return start + b"".join(tags[tag] for tag in sorted(tags)) + bytes(4) + content


@pytest.mark.parametrize("order", ["<", ">"])
def test_dark_16_bit_image_stays_dark_in_any_byte_order(order: str) -> None:
    values = np.linspace(0, 250, 16).reshape(4, 4)
    assert decoded(tiff_of(values, order)).max() == 1


def test_16_bit_image_with_white_zero_is_inverted() -> None:
    values = np.array([[0, 0], [65_535, 257 * 55]])
    assert decoded(tiff_of(values, photometric=0))[:, :, 0].tolist() == [[255, 255], [0, 200]]


def test_transparent_16_bit_value_shows_the_background() -> None:
    rows = b"".join(b"\0" + struct.pack(">2H", 300, 301) for _ in range(2))
    pixels = decoded(png_of(2, 2, rows, depth=16, color=0, key=struct.pack(">H", 300)))
    assert (pixels[:, 0] == WHITE).all() and (pixels[:, 1] == 1).all()
    color, other = (0x1234, 0x5678, 0x9ABC), (0x34FF, 0x78FF, 0xBCFF)
    rows = b"".join(b"\0" + struct.pack(">6H", *color, *other) for _ in range(2))
    pixels = decoded(png_of(2, 2, rows, depth=16, color=2, key=struct.pack(">3H", *color)))
    assert (pixels[:, 0] == WHITE).all() and (pixels[:, 1] == (0x34, 0x78, 0xBC)).all()


def test_16_bit_color_is_scaled() -> None:
    rows = b"".join(b"\0" + struct.pack(">3H", 65_535, 32_768, 0) * 4 for _ in range(4))
    pixels = decoded(png_of(4, 4, rows, depth=16, color=2))
    assert near(pixels, (255, 128, 0))


def png_of(
    width: int, height: int, rows: bytes, depth: int = 8, color: int = 0, key: bytes = b""
) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + checksum

    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    body = chunk(b"IHDR", head) + (chunk(b"tRNS", key) if key else b"")
    body += chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    "values, white",
    [
        (np.array([[0.0, 0.5, 1.0]], np.float32), 1.0),
        (np.array([[0.0, 100.0, 255.0]], np.float32), 255.0),
        (np.array([[0, 1000, 65_535]], np.int32), 65_535.0),
    ],
)
def test_wide_gray_values_are_scaled_to_the_likely_white(values: Any, white: float) -> None:
    assert (to_8_bits(values) == np.rint(values / white * 255)).all()


@pytest.mark.parametrize(
    "values", [[[-1.0, 0.5]], [[0.0, 1e9]], [[float("nan"), 1.0]], [[0.0, 0.5, 1.02]]]
)
def test_ambiguous_gray_values_are_refused(values: list[list[float]]) -> None:
    with pytest.raises(Undecodable, match="gray values"):
        to_8_bits(np.array(values, np.float32))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    """The image is stored rotated, with the tag that rotates it back: red is on top."""
    upright = flat((0, 0, 0), size=(16, 24))
    upright.paste((255, 0, 0), (0, 0, 16, 8))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decoded(encoded(stored, "JPEG", exif=exif, quality=95))
    assert pixels.shape == (24, 16, 3)
    assert pixels[:6, :, 0].min() > 200 and pixels[12:, :, 0].max() < 60


def test_damaged_exif_data_are_ignored() -> None:
    content = encoded(flat((200, 60, 20)), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert near(decoded(content), (200, 60, 20), 8)


def test_first_frame_of_a_gif_is_used() -> None:
    stream = io.BytesIO()
    flat((255, 0, 0)).save(stream, "GIF", save_all=True, append_images=[flat((0, 255, 0))])
    assert near(decoded(stream.getvalue()), (255, 0, 0))


def test_reduced_jpeg_looks_like_the_full_one() -> None:
    ramp = np.linspace(0, 255, 640).astype(np.uint8)
    content = encoded(Image.fromarray(np.tile(ramp, (480, 1))), "JPEG", quality=95)
    rule = SquareRule(16, "squash", WHITE, 3)
    quick, whole = decode(content, WHITE, smallest=16), decode(content, WHITE)
    assert min(quick.size) >= 32 and quick.size < whole.size
    difference = np.asarray(make_square(quick, rule)).astype(int) - make_square(whole, rule)
    assert abs(difference).max() <= 3


# File names


@pytest.mark.parametrize("name", ["a.JPG", "a.Jpeg", "a.png", "a.txt", "a.xyz", "a", "a.jpg.part"])
def test_image_is_recognised_whatever_its_extension(tmp_path: Path, name: str) -> None:
    write(tmp_path / "raw" / name, noise(1), kind="JPEG")
    assert len(prepared(tmp_path, tmp_path / "raw")) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("notes.txt", "labels.csv", "README.md", "meta.json", "Makefile", "a.npy", "BMX.txt"),
        *("Thumbs.db", ".DS_Store", "desktop.ini", ".hidden.png", "._0.png"),
        *("__MACOSX/x/0.png", "x/.ipynb_checkpoints/0-checkpoint.png", "@eaDir/0.png"),
        "lost+found/0.png",
    ],
)
def test_other_files_and_clutter_are_ignored(tmp_path: Path, name: str) -> None:
    write(tmp_path / "raw/x/0.png", noise(1))
    write(tmp_path / "raw/y/0.png", noise(2))
    write(tmp_path / "raw" / name, b"BMX is not a bitmap, but begins like one")
    data = prepared(tmp_path, tmp_path / "raw", max_rejected=0.0)
    assert len(data) == 2
    assert data.classes == ["x", "y"]
    assert rejected(tmp_path / "workspace") == {}


def test_long_names_are_read(tmp_path: Path) -> None:
    write(tmp_path / "raw" / ("ü" * 120) / ("n" * 250 + ".png"), noise(1))
    write(tmp_path / "raw" / "b" / "0.png", noise(2))
    assert len(prepared(tmp_path, tmp_path / "raw")) == 2


# Unusable files


def bomb() -> bytes:
    side = int(PIXELS**0.5) + 1000
    rows = (b"\0" + bytes(side // 8 + 1)) * side
    return png_of(side, side, rows, depth=1)


def unusable() -> dict[str, tuple[bytes, str]]:
    whole = encoded(noise(3, size=(64, 64)), "JPEG")
    png = encoded(noise(4, size=(64, 64)))
    return {
        "empty.jpg": (b"", "empty"),
        "cut.jpg": (whole[: len(whole) // 2], "truncated"),
        "cut.png": (png[: len(png) // 2], "truncated|damaged"),
        "cut.gif": (encoded(noise(4, size=(64, 64)), "GIF")[:200], "truncated|damaged|not an"),
        "text.jpg": (b"this is not an image at all", "not an image"),
        "noise.png": (np.random.default_rng(0).bytes(4000), "not an image"),
        "head.png": (png[:20], "not an image|truncated|damaged"),
        "garbled.png": (png[:60] + bytes(300) + png[360:], "damaged|truncated"),
        "bomb.png": (bomb(), "at most"),
    }


def test_unusable_files_are_listed_with_their_reasons(tmp_path: Path) -> None:
    files = unusable()
    for name, (content, _) in files.items():
        write(tmp_path / "raw" / name, content)
    write(tmp_path / "raw/good.png", noise(1))
    data = prepared(tmp_path, tmp_path / "raw", max_rejected=1.0)
    reasons = rejected(tmp_path / "workspace")
    assert len(data) == 1
    assert list(reasons) == sorted(files)
    for name, (_, expected) in files.items():
        assert any(part in reasons[name] for part in expected.split("|")), (name, reasons[name])
    assert data.manifest.rejected == len(files)


FOREIGN = {
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0",
    "JPEG XL": b"\xff\x0a\xfa\x7f",
    "SVG": b"<?xml version='1.0'?>\n<!-- drawn -->\n<svg xmlns='http://www.w3.org/2000/svg'/>",
    "TGA": encoded(noise(1), "TGA"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_error_names_an_unsupported_format(tmp_path: Path, kind: str) -> None:
    for content in (FOREIGN[kind], write(tmp_path / "0.jpg", FOREIGN[kind])):
        with pytest.raises(
            Undecodable, match=rf"{kind} is not a supported format: convert it to JPEG"
        ):
            decode(content, WHITE)


def test_decompression_bomb_is_refused_without_memory() -> None:
    tracemalloc = pytest.importorskip("tracemalloc")
    content = bomb()
    tracemalloc.start()
    with pytest.raises(Undecodable, match="pixels"):
        decode(content, WHITE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(content) < 1e6 and peak < 5e6


# Squares


@pytest.mark.parametrize("size", [(300, 100), (100, 300)])
def test_crop_keeps_the_middle(size: tuple[int, int]) -> None:
    image = flat((255, 0, 0), size=size)
    left, top = (size[0] - 100) // 2, (size[1] - 100) // 2
    image.paste((0, 255, 0), (left, top, left + 100, top + 100))
    square = np.asarray(make_square(image, SquareRule(10, "crop", WHITE, 3)))
    # Antialiasing mixes the outermost pixels with those beyond the edge.
    assert near(square[1:-1, 1:-1], (0, 255, 0)) and near(square, (0, 255, 0), 20)


@pytest.mark.parametrize("resize", ["crop", "pad"])
@pytest.mark.parametrize("size", [(33, 32), (32, 35), (34, 32), (32, 31), (29, 32)])
def test_pixels_do_not_change_without_scaling(resize: str, size: tuple[int, int]) -> None:
    image, wanted = noise(1, size), min(size) if resize == "crop" else max(size)
    square = make_square(image, SquareRule(wanted, resize, BLUE, 3))
    left, top = (abs(wanted - side) // 2 for side in size)
    if resize == "crop":
        assert square == image.crop((left, top, left + wanted, top + wanted))
    else:
        assert square.crop((left, top, left + size[0], top + size[1])) == image


@pytest.mark.parametrize("size", [(300, 100), (100, 300), (3000, 1)])
def test_pad_keeps_the_whole_image(size: tuple[int, int]) -> None:
    square = np.asarray(make_square(flat((0, 255, 0), size=size), SquareRule(30, "pad", BLUE, 3)))
    filled = (square == (0, 255, 0)).all(axis=2)
    assert (square[~filled] == BLUE).all()
    assert filled.sum() == max(30, 300) if min(size) == 100 else filled.sum() == 30
    assert abs(filled[:15].sum() - filled[15:].sum()) <= 30


def test_squash_fills_the_square() -> None:
    image = flat((255, 0, 0), size=(300, 100))
    image.paste((0, 255, 0), (150, 0, 300, 100))
    square = np.asarray(make_square(image, SquareRule(10, "squash", WHITE, 3)))
    assert near(square[:, :4], (255, 0, 0)) and near(square[:, 6:], (0, 255, 0))


@pytest.mark.parametrize("resize", ["crop", "pad", "squash"])
@pytest.mark.parametrize("period", [2, 3, 5])
def test_fine_patterns_become_gray_without_moire(resize: str, period: int) -> None:
    stripes = np.where(np.arange(510) % period < period / 2, 255, 0).astype(np.uint8)
    image = Image.fromarray(np.tile(stripes, (510, 1))).convert("RGB")
    square = np.asarray(make_square(image, SquareRule(16, resize, WHITE, 3))).astype(float)
    mean = stripes.mean()
    assert abs(square[:, 1:-1] - mean).max() < 12


def test_small_image_is_enlarged_smoothly() -> None:
    image = flat((0, 0, 0), size=(2, 2))
    image.paste((255, 255, 255), (1, 0, 2, 2))
    row = np.asarray(make_square(image, SquareRule(16, "crop", WHITE, 3)))[8, :, 0].astype(int)
    assert (np.diff(row) >= 0).all() and len(set(row)) > 6


# Digests


def digests(*payloads: Any, **rule: Any) -> list[bytes]:
    wanted = SquareRule(**{"size": 8, "resize": "crop", "background": WHITE, "channels": 3, **rule})
    return make_squares(wanted, list(enumerate(payloads))).digests


@pytest.mark.parametrize("size", [8, 20, 64])
def test_digest_does_not_depend_on_settings(tmp_path: Path, size: int) -> None:
    upright = Image.Exif()
    upright[0x112] = 6
    large = encoded(noise(1, (300, 170)), "JPEG", exif=upright)
    kinds = [large, write(tmp_path / "x.jpg", large), encoded(noise(2, (90, 70), "RGBA"))]
    kinds += [encoded(noise(3, (40, 64), "L")), np.asarray(noise(4, (8, 8)))]
    known = digests(*kinds, size=16)
    assert known[0] == known[1] and len({*known, b""}) == 5
    for resize, background, channels in (("crop", BLUE, 1), ("pad", WHITE, 3), ("squash", BLUE, 3)):
        rule = {"resize": resize, "background": background, "channels": channels}
        assert digests(*kinds, size=size, **rule) == known


def test_copies_in_other_files_have_the_same_digest() -> None:
    image = noise(1, (90, 70))
    jpegs = [encoded(image, "JPEG", exif=exif) for exif in (b"", b"Exif\0\0II*\0")]
    assert len(set(jpegs)) == 2 and len(set(digests(*jpegs))) == 1
    lossless = [encoded(image, kind) for kind in ("PNG", "BMP", "TIFF")]
    assert len(set(digests(*lossless, encoded(image.convert("RGBA"))))) == 1
    assert len(set(digests(encoded(flat(0, (10, 20))), encoded(flat(0, (20, 10)))))) == 2


# Channels


def test_channels_auto_is_1_if_all_images_are_gray(tmp_path: Path) -> None:
    write(tmp_path / "raw/0.png", noise(1, mode="L"))
    write(tmp_path / "raw/1.png", noise(2, mode="L").convert("RGB"))
    data = prepared(tmp_path, tmp_path / "raw")
    assert (data.channels, data.images.shape) == (1, (2, 8, 8, 1))


def test_channels_auto_is_3_if_one_image_has_color(tmp_path: Path) -> None:
    write(tmp_path / "raw/0.png", noise(1, mode="L"))
    write(tmp_path / "raw/1.png", noise(2))
    data = prepared(tmp_path, tmp_path / "raw")
    assert data.images.shape == (2, 8, 8, 3)
    assert (data.take(np.array([0]))[0].std(axis=2) == 0).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_setting_is_used(tmp_path: Path, channels: int) -> None:
    write(tmp_path / "raw/0.png", flat((255, 0, 0)))
    data = prepared(tmp_path, tmp_path / "raw", channels=channels)
    assert data.images[0].shape == (8, 8, channels)
    assert data.images[0][0, 0].tolist() == ([76] if channels == 1 else [255, 0, 0])
