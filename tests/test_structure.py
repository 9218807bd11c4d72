"""The rules of the layout: one direction of imports, a fast start, no pickle, short functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "ddpm_core"

# The other folders that each folder may import. All but the pure ones may import the settings, the
# storage and the runtime.
BASE = {"config", "storage", "runtime"}
ALLOWED = {
    "runtime": set(),
    "storage": {"runtime"},
    "config": {"storage", "models"},
    "diffusion": set(),
    "models": set(),
    "tracking": BASE,
    "interop": BASE | {"models", "diffusion"},
    "data": BASE | {"tracking"},
    "sampling": BASE | {"models", "diffusion", "data"},
    "training": BASE
    | {"models", "diffusion", "data", "sampling", "registry", "interop", "tracking"},
    "evaluation": BASE | {"models", "data", "sampling", "tracking"},
    "comparison": BASE
    | {"models", "diffusion", "data", "sampling", "training", "evaluation", "tracking"},
    "registry": BASE
    | {"models", "diffusion", "data", "sampling", "evaluation", "interop", "tracking"},
    "setup": BASE | {"data", "evaluation", "training"},
    "watch": BASE | {"evaluation", "tracking"},
}
ALLOWED["cli"] = set(ALLOWED)  # it runs everything, and nothing imports it
# Top-level modules may import BASE; these may import more.
TOP = {
    "checkpoint": {"models"},
    "chain": set(ALLOWED) - {"cli"},
    "__main__": {"cli"},
}
# These must not import anything else from the library but errors.
PURE = ("diffusion", "models")


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(path: Path) -> set[str]:
    """Return the folders and top-level modules of the library that a file imports."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("ddpm_core.")}


def test_every_folder_has_an_import_rule() -> None:
    assert {path.parent.name for path in LIBRARY.glob("*/__init__.py")} == set(ALLOWED)


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_imports_point_one_way(folder: str) -> None:
    for path in (LIBRARY / folder).rglob("*.py"):
        wrong = (ours(path) & set(ALLOWED)) - ALLOWED[folder] - {folder}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"
        if folder in PURE:
            assert ours(path) <= {folder, "errors"}, (
                f"{path.relative_to(ROOT)} imports {sorted(ours(path))}"
            )


def test_top_level_modules_import_only_what_they_may() -> None:
    for path in LIBRARY.glob("*.py"):
        wrong = (ours(path) & set(ALLOWED)) - BASE - TOP.get(path.stem, set())
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_library_imports_neither_kubernetes_nor_dvc() -> None:
    for path in LIBRARY.rglob("*.py"):
        tops = {name.partition(".")[0] for name in imports(path)}
        assert not tops & {"kfp", "kubernetes", "kubeflow", "dvc", "ddpm_kube"}, path


def test_library_reads_no_pickle() -> None:
    for path in LIBRARY.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not {"pickle", "dill", "cloudpickle", "joblib"} & imports(path), path
        assert "allow_pickle=True" not in text, path
        for line in text.splitlines():
            assert "torch.load(" not in line or "weights_only=True" in line, f"{path}: {line}"


@pytest.mark.parametrize("module", ["ddpm_core", "ddpm_core.config", "ddpm_core.cli"])
def test_import_does_not_load_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_function_is_longer_than_60_lines() -> None:
    script = [sys.executable, str(ROOT / "scripts/shape.py"), str(LIBRARY), str(ROOT / "ddpm_kube")]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:]


def test_no_file_contains_a_package_index_or_local_path() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    assert listed
    for name in listed:
        path = ROOT / name
        if path.suffix in {".py", ".toml", ".lock", ".yaml", ".md", ""} and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            assert "index" + "-url" not in text.replace("--no-emit-index" + "-url", ""), name
            assert "https://" + "files." not in text, name
            assert not re.search(r"(?<![\w.])/(home|work|Users)/", text), name


def test_documents_name_existing_files() -> None:
    folders = "ddpm_core|ddpm_kube|components|manifests|overlays|tests"
    named = re.compile(rf"(?<![\w/])(?:{folders})/[\w/.-]+\w")
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        paths = set(named.findall(document.read_text(encoding="utf-8")))
        missing = sorted(path for path in paths if not (ROOT / path).exists())
        assert not missing, f"{document.name} names {missing}"


def test_extending_names_existing_files() -> None:
    """Its paths are in ddpm_core/, or begin with another folder."""
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`([\w./]+(?:\.py|/))`", text))
    assert {"cli/__init__.py", "presets/", "tests/test_structure.py"} <= paths
    missing = sorted(p for p in paths if not any((base / p).exists() for base in (LIBRARY, ROOT)))
    assert not missing
