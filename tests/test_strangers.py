"""Untrusted files run no code, exhaust no memory, and do not lead outside their folder."""

from __future__ import annotations

import ast
import json
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.mutations import reseal, swap_json
from support.strangers import CPU, STEP, Strangers, Target

from ddpm_core.checkpoint import SETTINGS, open_checkpoint
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.evaluation.inception import open_inception
from ddpm_core.interop.diffusers import import_folder
from ddpm_core.storage import LocalStorage, verify
from ddpm_core.storage.files import LARGEST_JSON, array_head, open_array, parse_object, read_tensors
from ddpm_core.storage.workspace import LOG, RUN, Workspace, snapshot_key
from ddpm_core.tracking.tracker import Tracker
from ddpm_core.training.log import RunLog

LIBRARY = Path(__file__).parent.parent / "ddpm_core"


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Strangers:
    return Strangers(tmp_path_factory.mktemp("strangers"))


# Pickle


def calls(tree: ast.AST) -> list[tuple[str, dict[str, Any]]]:
    """Return the dotted name and the constant keywords of every call."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = {
                k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)
            }
            found.append((ast.unparse(node.func), given))
    return found


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def offences(source: str) -> list[str]:
    """Return the calls and imports of a source that could run code from a file."""
    tree = ast.parse(source)
    loaders = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pandas"}
    bad = [name for name in imported(tree) if name.partition(".")[0] in loaders]
    for name, given in calls(tree):
        last = name.rpartition(".")[2]
        if name in ("eval", "exec", "compile", "__import__", "torch.jit.load", "torch.hub.load"):
            bad.append(name)
        if name == "torch.load" and given.get("weights_only") is not True:
            bad.append(name)
        if given.get("allow_pickle"):
            bad.append(f"{name} with allow_pickle")
        if (
            last in ("load", "load_all")
            and name.startswith("yaml")
            and "Loader=_Loader" not in source
        ):
            bad.append(name)
    return bad


def test_source_has_no_call_that_runs_code_of_a_file() -> None:
    for path in LIBRARY.rglob("*.py"):
        assert not offences(path.read_text(encoding="utf-8")), path
    for bad in (
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
    ):
        assert offences(bad), bad


def test_arrays_and_tensors_are_read_in_one_module() -> None:
    for path in LIBRARY.rglob("*.py"):
        names = {name for name, _ in calls(ast.parse(path.read_text(encoding="utf-8")))}
        readers = {"np.load", "np.memmap", "np.fromfile", "load_file", "safe_open"} & names
        assert not readers or path.name == "files.py", f"{path}: {readers}"


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (open, (str(self.mark), "w"))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Return the file that a bomb would create, after a check that a bomb works."""
    mark = tmp_path / "run"
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()
    mark.unlink()
    return mark


def bombs(mark: Path, folder: Path) -> list[bytes]:
    """Return a bomb as a plain pickle, as a npy file of objects, and as a file of torch.save."""
    np.save(folder / "bomb.npy", np.array([Bomb(mark)], dtype=object), allow_pickle=True)
    torch.save({"a": Bomb(mark)}, folder / "bomb.pth")
    written = [(folder / name).read_bytes() for name in ("bomb.npy", "bomb.pth")]
    return [pickle.dumps(Bomb(mark)), *written]


def test_pickle_bomb_in_any_file_does_not_run(
    strangers: Strangers, mark: Path, tmp_path: Path
) -> None:
    for target in strangers.targets.values():
        for path in target.files:
            for bomb in bombs(mark, tmp_path):
                path.write_bytes(bomb)
                if target.sealed and path.name != "manifest.json":
                    reseal(target.sealed)
                message = refusal(target)
                restore(target)
                # Damaged logs, leases and chunks may be ignored. Everything else must be refused.
                assert message or target.name in ("documents", "chunk", "samples"), path
                assert not mark.exists(), path


def test_pickle_bomb_in_external_weights_does_not_run(mark: Path, tmp_path: Path) -> None:
    bomb = bombs(mark, tmp_path)[2]
    (tmp_path / "inception.pth").write_bytes(bomb)
    with pytest.raises(UserError, match="cannot be read as weights"):
        open_inception(tmp_path / "inception.pth", CPU)
    shutil.copytree(
        tmp_path, tmp_path / "pipeline", dirs_exist_ok=True, ignore=lambda *_: ["pipeline"]
    )
    for name in ("unet/config.json", "scheduler/scheduler_config.json"):
        (tmp_path / "pipeline" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pipeline" / name).write_text(json.dumps(UNET if "unet" in name else {}))
    (tmp_path / "pipeline/unet/diffusion_pytorch_model.bin").write_bytes(bomb)
    with pytest.raises(UserError, match="a pickle, which can run code"):
        import_folder(tmp_path / "pipeline")
    assert not mark.exists()


UNET = {
    "sample_size": 4,
    "in_channels": 1,
    "out_channels": 1,
    "block_out_channels": [4],
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"],
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "norm_eps": 1e-6,
    "norm_num_groups": 1,
    "attention_head_dim": None,
}


def refusal(target: Target) -> str:
    try:
        target.read()
    except UserError as error:
        return str(error)
    return ""


def restore(target: Target) -> None:
    for path, data in target.content.items():
        path.unlink(missing_ok=True)
        path.write_bytes(data)


# Memory


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("(1000000000000, 8, 8, 3)", "requires"),
        ("(0, 999999999999999999)", "requires"),
        ("(99999999999999999999999,)", "not an array of plain numbers"),
        ("(-1, 8)", "not an array of plain numbers"),
        ("(2**40,)", "not an array of plain numbers"),
    ],
)
def test_shape_of_an_array_must_match_its_file_size(
    tmp_path: Path, shape: str, message: str
) -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(99))
    before = peak()
    with pytest.raises(Corrupt, match=message):
        open_array(path)
    assert peak() - before < 1000  # kB


def test_arrays_are_read_as_numpy_wrote_them(tmp_path: Path) -> None:
    for array in (
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4, 1),
        np.arange(5),
        np.empty((0, 4, 4, 3), np.uint8),
        np.array(1.5, np.float32),
    ):
        np.save(tmp_path / "x.npy", array)
        found = open_array(tmp_path / "x.npy")
        assert np.array_equal(found, array) and found.dtype == array.dtype
        assert array_head(tmp_path / "x.npy").shape == array.shape


def test_tensor_header_must_fit_its_file(tmp_path: Path) -> None:
    claim = {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    header = json.dumps(claim).encode()
    for length in (len(header), 2**40, 2**63):
        (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + header + bytes(64))
        with pytest.raises(Corrupt, match="damaged"):
            read_tensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "claim",
    [
        {"channels": 2**20},
        {"blocks": 2**20},
        {"multipliers": [1] * 16, "image_size": 2**20},
        {"multipliers": [2**20]},
        {"classes": 2**20},
    ],
)
def test_network_settings_must_match_the_weights(
    strangers: Strangers, claim: dict[str, Any]
) -> None:
    target = strangers.targets["snapshot"]
    folder = strangers.workspace.path(snapshot_key(STEP))
    settings = json.loads((folder / SETTINGS).read_text())
    settings["network"].update(claim)
    settings["data"]["image_size"] = settings["network"]["image_size"]
    if "classes" in claim:
        settings["data"]["classes"] = ["x"] * claim["classes"]
        settings["data"]["class_counts"] = [1] * claim["classes"]
    (folder / SETTINGS).write_text(json.dumps(settings))
    reseal(folder)
    before = peak()
    try:
        with pytest.raises(Corrupt):
            open_checkpoint(strangers.workspace, STEP).load("auto", CPU)
    finally:
        restore(target)
    assert peak() - before < 300_000  # kB; the settings of a million classes have 20 MB


def test_json_is_bounded_in_size_and_depth() -> None:
    with pytest.raises(Corrupt, match="may have"):
        parse_object(b" " * (LARGEST_JSON + 1), "x.json")
    for deep in (b"[" * 10**6, b'{"a":' * 10**6):
        with pytest.raises(Corrupt, match="not valid JSON"):
            parse_object(deep, "x.json")


# Links and other paths


def test_no_write_follows_a_link_out_of_the_workspace(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    storage = LocalStorage(tmp_path / "run")
    storage.root.mkdir()
    for name in ("samples", "snapshots"):
        (tmp_path / "run" / name).symlink_to(outside)
    attempts: list[Callable[[], object]] = [
        lambda: storage.write("samples/x.json", b"{}"),
        lambda: storage.write("samples/deep/x.json", b"{}"),
        lambda: storage.remove("samples/kept"),
        lambda: storage.move("samples/kept", "here"),
        lambda: storage.move("nothing", "samples/there"),
        lambda: storage.new_folder("snapshots/step-00000001").__enter__(),
    ]
    for attempt in attempts:
        with pytest.raises(UserError, match="a link out of the workspace"):
            attempt()
    storage.remove("samples")
    assert [path.name for path in outside.iterdir()] == ["kept"]


def test_log_and_lock_do_not_follow_links(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    storage = LocalStorage(run)
    run.mkdir()
    for name in (LOG, f".{LOG}", ".lock"):
        (run / name).symlink_to(outside)
    log = RunLog(run / LOG)
    log.recover(9)
    log.append({"step": 1})
    with pytest.raises(OSError, match="symbolic link"):
        log.flush()
    with pytest.raises(OSError, match="symbolic link"), storage.lock():
        pass
    assert not outside.exists()


def test_run_json_cannot_call_functions_or_send_other_files(
    strangers: Strangers, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    run = tmp_path / "run"
    unsent = [
        ["__init__", "x"],
        ["client", 1],
        ["artifact", str(tmp_path / "secret"), None],
        ["artifact", str(run / "../secret"), None],
        ["artifact", 3, None],
        ["report", str(tmp_path / "secret"), None, {}],
        "artifact",
        [],
        ["tags", {"a": "b"}],
        ["artifact", str(run / "report.html"), None],
    ]
    workspace = Workspace.open(str(run))
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    workspace.write_json(RUN, {"mlflow": {"uri": uri, "unsent": unsent}})
    tracking = strangers.config.tracking.model_copy(update={"uri": uri})
    tracker = Tracker(strangers.config.model_copy(update={"tracking": tracking}), workspace, None)
    assert list(tracker._queue) == unsent[-2:]


def test_files_outside_the_manifest_are_not_read(strangers: Strangers) -> None:
    folder, target = strangers.workspace.path(snapshot_key(STEP)), strangers.targets["snapshot"]
    stray = folder / "stray.safetensors"
    stray.write_bytes(b"not listed")
    target.read()
    stray.unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"][SETTINGS]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "its manifest does not list config.json" in refusal(target)
    restore(target)
    assert verify(folder)


def test_mutations_change_their_input() -> None:
    import random

    document = json.dumps({"a": [1, {"b": "c"}], "d": None}).encode()
    changed = {swap_json(random.Random(seed), document) for seed in range(200)}
    assert len(changed) > 40 and sum(text == document for text in changed) <= 1
