"""The chain as DVC stages, and raw data tracked by DVC, with real git and dvc in clones.

Commands that get killed are started normally; the others are forked, see support/prefork.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from support.mlflow_server import QUIET, wait_until
from support.prefork import Prefork

from ddpm_core.config import Config
from ddpm_core.config import load as params

ROOT = Path(__file__).parents[2]
OURS = ("dvc.yaml", ".gitignore", ".dvcignore", ".dvc/config", ".dvc/.gitignore")
# All sections, but few settings: the others keep their defaults.
TINY = {
    "seed": 0,
    "prepare": {"image_size": 8, "workers": 1},
    "model": {"channels": 8, "multipliers": [1], "blocks": 1, "attention": []},
    "diffusion": {"timesteps": 50},
    "train": {
        "steps": 40,
        "batch_size": 8,
        "log_every": 2,
        "snapshot_every": 4,
        "milestone_every": 20,
        "grid": 4,
        "ema": [0.9],
        "loss": {"weighting": "min_snr"},
    },
    "sample": {"count": 20, "batch_size": 10, "steps": 3},
    "evaluate": {"metrics": ["fid"]},
    "register": {},
    "tracking": {"uri": ""},
}


class Repository:
    """A git repository with DVC."""

    def __init__(self, folder: Path, forked: Path) -> None:
        """`forked` is a folder with programs for PATH."""
        self.folder, self.forked = folder, forked
        self.environment = {
            **os.environ,
            **QUIET,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "DVC_NO_ANALYTICS": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            **{f"GIT_{who}_NAME": "tester" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "tester@localhost" for who in ("AUTHOR", "COMMITTER")},
        }

    @classmethod
    def of_this_project(cls, folder: Path, forked: Path) -> Repository:
        """Create a repository with our pipeline files."""
        for name in OURS:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        repository = cls(folder, forked)
        repository.git("init", "--quiet", "--initial-branch=main")
        return repository

    def clone(self, folder: Path) -> Repository:
        self.git("clone", "--quiet", ".", str(folder))
        return Repository(folder, self.forked)

    def git(self, *arguments: str) -> str:
        return self.run("git", *arguments)

    def dvc(self, *arguments: str) -> str:
        return self.run("dvc", *arguments)

    def run(self, *command: str) -> str:
        path = f"{self.forked}{os.pathsep}{self.environment['PATH']}"
        done = subprocess.run(
            [shutil.which(command[0], path=path) or command[0], *command[1:]],
            cwd=self.folder,
            env={**self.environment, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
        return done.stdout

    def kill_once(self, command: list[str], there: str) -> None:
        """Start a command and kill its process group as soon as a path exists."""
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(lambda: (self.folder / there).exists(), f"{there} is there", 120)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def change_params(self, **sections: dict[str, object]) -> None:
        path = self.folder / "params.yaml"
        given = yaml.safe_load(path.read_text())
        for name, values in sections.items():
            given[name].update(values)
        path.write_text(yaml.safe_dump(given, sort_keys=False))


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("forked")
    server = Prefork(folder, Repository(folder, folder).environment)
    yield server.folder
    server.close()


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, forked: Path) -> Repository:
    folder = tmp_path_factory.mktemp("origin")
    repository = Repository.of_this_project(folder, forked)
    (folder / "params.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    repository.git("add", ".")
    repository.git("commit", "--quiet", "-m", "tiny")
    return repository


@pytest.fixture(scope="module")
def clone(origin: Repository, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return origin.clone(tmp_path_factory.mktemp("clone") / "project")


# The files


def test_params_yaml_has_every_setting_with_its_default(tmp_path: Path) -> None:
    path = ROOT / "params.yaml"
    assert params.load(path) == params.load()
    defaults = Config().dump()
    defaults["model"]["attention"] = "auto"  # which is [8] for the digits
    assert yaml.safe_load(path.read_text()) == defaults


def test_each_stage_is_its_verb_and_depends_on_its_section() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert list(stages) == ["prepare", "train", "sample", "evaluate", "register"]
    for verb, stage in stages.items():
        assert stage["cmd"] == f"ddpm {verb} -w workspace"
        assert verb in stage["params"]
        # DVC has no defaults: it would refuse a setting that params.yaml leaves out.
        assert not [name for name in stage["params"] if "." in name]


# The chain: each test continues from the one before


@pytest.mark.slow
def test_a_killed_repro_resumes(clone: Repository) -> None:
    clone.kill_once(["dvc", "repro"], "workspace/snapshots/step-00000008")
    output = clone.dvc("repro", "evaluate")
    assert "Stage 'prepare' didn't change, skipping" in output
    assert "train: resuming from step" in output
    lines = (clone.folder / "workspace/log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(2, 41, 2))


@pytest.mark.slow
def test_an_experiment_trains_from_scratch_and_is_compared(clone: Repository) -> None:
    clone.git("add", "dvc.lock", "workspace/metrics.json")
    clone.git("commit", "--quiet", "-m", "scores")
    output = clone.dvc("exp", "run", "evaluate", "-S", "train.loss.weighting=uniform")
    assert "train.loss.weighting: min_snr -> uniform" in output
    assert "in-domain classifier" not in output  # the extractor is kept, so the scores compare
    difference = json.loads(clone.dvc("metrics", "diff", "--json"))["workspace/metrics.json"]
    assert difference["fd_in_domain_20"]["diff"] != 0
    assert "weighting: uniform" in clone.git("diff", "params.yaml")


@pytest.mark.slow
def test_plots_show_tables_and_images(clone: Repository) -> None:
    assert "index.html" in clone.dvc("plots", "diff")
    page = (clone.folder / "dvc_plots/index.html").read_text()
    assert "FID_vs_TrainingSteps.png" in page
    shown = json.loads(clone.dvc("plots", "show", "--json"))["data"]
    assert "Score against training steps" in shown


@pytest.mark.slow
def test_a_fresh_clone_compares_what_was_committed(clone: Repository, tmp_path: Path) -> None:
    clone.git("commit", "--quiet", "--all", "-m", "the experiment")
    fresh = clone.clone(tmp_path / "fresh")
    compared = json.loads(fresh.dvc("metrics", "diff", "--json", "HEAD~1", "HEAD"))
    assert compared["workspace/metrics.json"]["fd_in_domain_20"]["diff"] != 0


@pytest.mark.slow
def test_a_changed_setting_runs_only_its_own_stage(clone: Repository) -> None:
    clone.change_params(tracking={"uri": "sqlite:///mlflow.db"})
    output = clone.dvc("repro")
    assert output.count("didn't change, skipping") == 4
    assert "Promoted: there was no champion." in output
    assert clone.dvc("repro").count("didn't change, skipping") == 5


@pytest.mark.slow
def test_another_clone_restores_all_results_from_the_cache(
    clone: Repository, tmp_path: Path
) -> None:
    kept = ("params.yaml", "dvc.lock", "workspace/metrics.json", "workspace/registered.json")
    clone.git("add", *kept)
    clone.git("commit", "--quiet", "-m", "the result")
    other = clone.clone(tmp_path / "other")
    store = other.folder / ".dvc/config.local"
    store.write_text(f"[cache]\n    dir = {clone.folder}/.dvc/cache\n")
    other.dvc("checkout")
    assert other.dvc("status") == "Data and pipelines are up to date.\n"


# Relative paths


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ("repository", ["--temp"]),
        ("subfolder", ["--temp"]),
        ("monorepo", ["workspace", "--temp", "--queue"]),
    ],
)
def test_relative_paths_are_the_same_in_all_experiments(
    layout: str, kinds: list[str], tmp_path: Path, forked: Path
) -> None:
    """A stage prints what its paths resolve to; git tracks `photos` only."""
    repository, project = begin_project(layout, tmp_path, forked)
    for seed, kind in enumerate(kinds, start=1):
        options = [] if kind == "workspace" else [kind]
        repository.dvc("exp", "run", *options, "-S", f"seed={seed}")
        if kind == "--queue":
            repository.dvc("queue", "start")
        resolved = tmp_path / "resolved.json"
        wait_until(lambda file=resolved: file.exists() and file.read_text(), "the stage has run")
        store, folder, *found = json.loads(resolved.read_text())
        assert (folder == str(project)) == (kind == "workspace")
        assert store == f"sqlite:///{project}/mlflow.db"
        assert found == [f"{folder}/photos", str(project / "weights"), str(tmp_path / "network")]
        resolved.unlink()
        if kind == "--queue":
            repository.dvc("queue", "stop", "--kill")


def begin_project(layout: str, root: Path, forked: Path) -> tuple[Repository, Path]:
    """Commit a project with one stage; return its repository and folder."""
    repository = Repository(root / "git", forked)
    repository.folder.mkdir()
    repository.git("init", "--quiet")
    project = root / "git" if layout == "repository" else root / "git/team/project"
    project.mkdir(parents=True, exist_ok=True)
    repository.folder = project if layout == "monorepo" else root / "git"
    repository.dvc("init", "--quiet", *(["--subdir"] if layout == "monorepo" else []))
    repository.folder = project
    (root / "network").mkdir()
    (project / "weights").mkdir()
    (project / "photos").mkdir()
    (project / "photos/one.png").write_bytes(b"")
    (project / ".gitignore").write_text("weights\nwhere.json\n")
    (project / "params.yaml").write_text("seed: 0\n")
    network = Path(os.path.relpath(root / "network", project))
    (project / "where.py").write_text(
        "import json, os, sys\n"
        "from ddpm_core.config import load as params\n"
        "from ddpm_core.config.paths import input_path\n"
        f"names = ['photos', 'weights', {str(network)!r}]\n"
        "found = [os.path.realpath(input_path(name)) for name in names]\n"
        "resolved = [params.load().tracking.uri, os.getcwd(), *found]\n"
        f"open({str(root / 'resolved.json')!r}, 'w').write(json.dumps(resolved))\n"
    )
    stage = {"cmd": f"{sys.executable} where.py", "params": ["seed"]}
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"where": stage}}))
    repository.git("add", ".")
    repository.git("commit", "--quiet", "-m", "all")
    return repository, project


# Raw data


@pytest.mark.slow
def test_raw_data_tracked_by_dvc_is_shared_by_a_remote(origin: Repository, tmp_path: Path) -> None:
    owner = origin.clone(tmp_path / "owner")
    draw_photos(owner.folder / "photos")
    settings = owner.folder / ".dvc/config"
    remote = f"['remote \"store\"']\nurl = {tmp_path}/store\n"
    settings.write_text(settings.read_text().replace("[core]", "[core]\nremote = store") + remote)
    owner.dvc("add", "photos")
    owner.change_params(prepare={"source": "photos"})
    add_dependency(owner.folder / "dvc.yaml", "prepare", "photos")
    owner.git("add", ".")
    owner.git("commit", "--quiet", "-m", "photos")
    owner.dvc("push")

    other = owner.clone(tmp_path / "other")
    assert not (other.folder / "photos").exists()
    other.dvc("pull", "photos")
    other.dvc("repro", "prepare")
    manifest = json.loads((other.folder / "workspace/data/manifest.json").read_text())
    tracked = yaml.safe_load((other.folder / "photos.dvc").read_text())["outs"][0]["md5"]
    assert manifest["source"]["dvc_md5"] == tracked
    assert manifest["count"] + manifest["holdout_count"] == 24

    (other.folder / "photos/disc/0.png").unlink()
    other.dvc("add", "photos")
    assert "Running stage 'prepare'" in other.dvc("repro", "prepare")


def draw_photos(folder: Path) -> None:
    """Draw two classes of 12 small images."""
    for label, name in enumerate(("disc", "square")):
        (folder / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.full((10, 10), 20 * number + label, np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def add_dependency(path: Path, stage: str, dependency: str) -> None:
    pipeline = yaml.safe_load(path.read_text())
    pipeline["stages"][stage].setdefault("deps", []).append(dependency)
    path.write_text(yaml.safe_dump(pipeline, sort_keys=False))
