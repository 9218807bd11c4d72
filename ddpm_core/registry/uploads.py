"""Images and masks in requests: they are strangers' files, limited before they are decoded."""

from __future__ import annotations

import base64
import binascii
import warnings

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.data.decode import stored_kind
from ddpm_core.diffusion.editing import Original
from ddpm_core.errors import Problem, got, invalid
from ddpm_core.sampling.from_image import read_original, square_rule, start_from

MAX_PIXELS = 2**22  # of an image before it is scaled
MAX_SCANS = 50  # of a progressive JPEG; each takes the time of a whole image, and few bytes
FORMATS = ("PNG", "JPEG", "MPO", "WEBP")  # MPO: the JPEG files of some phones


def read_upload(
    checkpoint: Checkpoint, image: str, mask: str | None, strength: float | None
) -> Original:
    """Return what to start from, of one image: base64 files become squares of the model.

    `strength` is as in `start_from`.

    Raises:
        UserError: a file has an unsupported type or is too large, damaged or unusable as a mask.
    """
    found, problems = {}, []
    for name, text in (("image", image), ("mask", mask)):
        if text is not None:
            content = _content(text)
            if problem := _problem(content):
                problems.append(Problem(name, got(text[:20]), problem))
            found[name] = content
    if problems:
        raise invalid(problems, "the request")
    rule = square_rule(checkpoint)
    pixels, redrawn = read_original(found["image"], found.get("mask"), rule)
    return start_from(pixels, redrawn, strength)


def _content(text: str) -> bytes:
    """Return the bytes of base64 or a data: URI; nothing if it is neither."""
    encoded = text.partition(",")[2] if text.startswith("data:") else text
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _problem(content: bytes) -> str:
    """Return what a file must be that is not decoded, or an empty string."""
    expected = f"must be a PNG, JPEG or WebP of at most {MAX_PIXELS:,} pixels in base64"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind, (width, height) = stored_kind(content)
    except Exception:  # decoders raise exceptions of many kinds for damaged files
        return expected
    # Within the pixels of a JPEG, a byte FF is never followed by DA.
    scans = content.count(b"\xff\xda") if kind.startswith(("JPEG", "MPO")) else 0
    fits = kind.split()[0] in FORMATS and width * height <= MAX_PIXELS and scans <= MAX_SCANS
    return "" if fits else expected
