"""The Dockerfile: two images, and no command that fails unnoticed."""

from __future__ import annotations

import re
import shlex

import yaml
from support.documents import PLATFORM, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def stages() -> dict[str, str]:
    """Return the text of each stage, in order."""
    found = re.split(r"^(FROM .+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
    pairs = zip(found[::2], found[1::2], strict=True)
    return {first.split()[-1]: first + rest for first, rest in pairs}


def test_the_full_image_adds_to_the_layers_of_the_light_one() -> None:
    """A node that has one stores only what the other adds. .ci/run builds up to `full`."""
    assert list(stages()) == ["requirements", "code", "libraries", "light", "full"]
    for name in ("light", "full"):
        assert stages()[name].startswith(f"FROM libraries AS {name}\n")
        assert re.findall(r"^USER (.+)$", stages()[name], re.MULTILINE) == ["1000:1000"]
    images = yaml.safe_load((PLATFORM / "image/Kustomization").read_text())["images"]
    assert [image["name"] for image in images] == ["ddpm", "ddpm-light"]


def test_the_image_finds_the_gpu_driver_where_clouds_mount_it() -> None:
    lines = [line[4:] for line in stages()["full"].splitlines() if line[:4] == "ENV "]
    given = dict(word.split("=", 1) for line in lines for word in shlex.split(line))
    folders = given["LD_LIBRARY_PATH"].split(":")
    assert folders == ["/usr/local/nvidia/lib", "/usr/local/nvidia/lib64"]
    assert given["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert "NVIDIA_VISIBLE_DEVICES" not in given  # the device plugin sets it


def test_no_command_of_the_image_build_can_fail_unnoticed() -> None:
    """In the shell of a RUN, commands after `;` or `||` run even if those before have failed."""
    commands = [line for line in DOCKERFILE.splitlines() if line.startswith("RUN ")]
    assert len(commands) >= 5
    for command in commands:
        words = list(shlex.shlex(command, posix=True, punctuation_chars=True))
        assert not {";", "||", "|", "&"} & set(words), command
    script = (ROOT / "scripts/install-locked").read_text(encoding="utf-8")
    assert "\nset -eu\n" in script and " | " not in script
