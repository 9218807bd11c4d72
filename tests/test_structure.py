"""The rules that keep the layout teachable: one direction of imports, no slow start, no pickle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "ddpm_core"

# What each folder may import of the others. All but the pure ones know the settings and where
# things are kept.
BASE = {"config", "storage", "runtime"}
ALLOWED = {
    "runtime": set(),
    "storage": {"runtime"},
    "config": {"storage"},
    "diffusion": set(),
    "models": set(),
    "tracking": BASE,
    "interop": BASE | {"models", "diffusion"},
    "data": BASE | {"tracking"},
    "sampling": BASE | {"models", "diffusion", "data"},
    "training": BASE
    | {"models", "diffusion", "data", "sampling", "registry", "interop", "tracking"},
    "evaluation": BASE | {"models", "data", "sampling", "tracking"},
    "registry": BASE | {"models", "diffusion", "data", "sampling", "evaluation", "tracking"},
}
# The modules beside the folders know the settings and the storage, and these alone more.
TOP = {
    "checkpoint": {"models"},
    "chain": set(ALLOWED),
    "cli": set(ALLOWED),
}
# Only these may know the network and the process without importing anything of ours at all.
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
    """The parts of our library that a file imports."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("ddpm_core.")}


def test_every_folder_has_its_rule() -> None:
    assert {path.parent.name for path in LIBRARY.glob("*/__init__.py")} == set(ALLOWED)


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_imports_point_one_way(folder: str) -> None:
    for path in (LIBRARY / folder).rglob("*.py"):
        wrong = (ours(path) & set(ALLOWED)) - ALLOWED[folder] - {folder}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"
        if folder in PURE:
            assert ours(path) <= {folder}, f"{path.relative_to(ROOT)} imports {sorted(ours(path))}"


def test_modules_beside_the_folders_know_no_more_than_they_must() -> None:
    for path in LIBRARY.glob("*.py"):
        wrong = (ours(path) & set(ALLOWED)) - BASE - TOP.get(path.stem, set())
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_library_knows_no_cluster_and_no_dvc() -> None:
    for path in LIBRARY.rglob("*.py"):
        tops = {name.partition(".")[0] for name in imports(path)}
        assert not tops & {"kfp", "kubernetes", "kubeflow", "dvc", "ddpm_kube"}, path


def test_no_pickle_is_ever_read() -> None:
    for path in LIBRARY.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not {"pickle", "dill", "cloudpickle", "joblib"} & imports(path), path
        assert "allow_pickle=True" not in text, path
        for line in text.splitlines():
            assert "torch.load(" not in line or "weights_only=True" in line, f"{path}: {line}"


@pytest.mark.parametrize("module", ["ddpm_core", "ddpm_core.config", "ddpm_core.cli"])
def test_importing_costs_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_function_is_longer_than_a_page() -> None:
    script = [sys.executable, str(ROOT / "scripts/shape.py"), str(LIBRARY), str(ROOT / "ddpm_kube")]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:]


def test_no_file_names_a_package_index_or_a_path_of_one_machine() -> None:
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
