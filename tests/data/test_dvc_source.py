"""prepare reads paths that DVC tracks, with the real dvc and git and a remote in a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.dvc_registry import Registry
from support.images import config, prepared, write, write_classes

from ddpm_core.data.prepare import prepare, stale
from ddpm_core.data.sources import dvc
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace


def run(*command: str, cwd: Path) -> str:
    quiet = {
        "DVC_NO_ANALYTICS": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        **{f"GIT_{who}_NAME": "x" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_EMAIL": "x@example.org" for who in ("AUTHOR", "COMMITTER")},
    }
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **quiet}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a repository whose `photos` has versions v1 and v2, and their commits."""
    root = tmp_path_factory.mktemp("registry")
    program = str(Path(sys.executable).with_name("dvc"))
    repo, commits = root / "repo", {}
    repo.mkdir()
    run("git", "init", "--quiet", cwd=repo)
    write(repo / ".dvc/.gitignore", "/cache\n/tmp\n")
    write(
        repo / ".dvc/config", f"[core]\nremote = store\n['remote \"store\"']\nurl = {root}/store\n"
    )
    for tag, each in (("v1", 3), ("v2", 4)):
        write_classes(repo / "photos", ["cat", "dog"], each=each)
        run(program, "add", "--quiet", "photos", cwd=repo)
        run("git", "add", ".", cwd=repo)
        run("git", "commit", "--quiet", "--message", tag, cwd=repo)
        run("git", "tag", "--annotate", tag, "--message", tag, cwd=repo)
        commits[tag] = run("git", "rev-parse", "HEAD", cwd=repo)
    run(program, "push", "--quiet", "--all-tags", cwd=repo)
    shutil.rmtree(repo / ".dvc/cache")  # so that downloads come from the remote
    return repo, commits


def test_tracked_path_is_fetched_at_its_revision(
    tmp_path: Path, registry: tuple[Path, dict[str, str]]
) -> None:
    repo, commits = registry
    data = prepared(tmp_path, f"dvc:{repo}#photos@v1")
    assert (
        data.fingerprint
        == prepared(tmp_path / "e", write_classes(tmp_path / "raw", ["cat", "dog"])).fingerprint
    )
    assert data.manifest.source["revision"] == commits["v1"]
    assert data.manifest.source["uri"] == f"dvc:{repo}#photos@v1"


def test_moved_tag_makes_the_data_stale(
    tmp_path: Path, registry: tuple[Path, dict[str, str]]
) -> None:
    repo, commits = registry
    run("git", "tag", "--force", "moving", "v1^{}", cwd=repo)
    settings = config(f"dvc:{repo}#photos@moving")
    workspace = Workspace.open(str(tmp_path / "workspace"))
    assert prepare(settings, workspace)["count"] == 6
    assert stale(settings, workspace) is None
    run("git", "tag", "--force", "moving", "v2^{}", cwd=repo)
    assert stale(settings, workspace) == "the source has changed since it was prepared"
    assert prepare(settings, workspace)["count"] == 8
    assert workspace.read_json("data/manifest.json")["source"]["revision"] == commits["v2"]


def test_error_contains_the_message_of_dvc(
    tmp_path: Path, registry: tuple[Path, dict[str, str]]
) -> None:
    with pytest.raises(UserError, match=r"dvc get failed for photos in .* at v9: .*v9"):
        prepared(tmp_path, f"dvc:{registry[0]}#photos@v9")


@pytest.mark.parametrize(
    "uri", ["dvc:", "dvc:repo", "dvc:#photos", "dvc:repo#photos@", "dvc:a\0b#photos"]
)
def test_incomplete_dvc_source_is_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(UserError, match="must be dvc:REPO#PATH@REV"):
        prepared(tmp_path, uri)


@pytest.mark.parametrize(
    "uri",
    [
        "dvc:--upload-pack=touch {};#photos",
        "dvc:-c#photos",
        "dvc:{repo}#--help",
        "dvc:{repo}#/--help",
        "dvc:{repo}#photos@--output={}",
        "dvc:ext::touch {}#photos",
    ],
)
def test_dvc_source_cannot_pass_options_or_commands(
    tmp_path: Path, registry: tuple[Path, dict[str, str]], uri: str
) -> None:
    made = tmp_path / "made"
    with pytest.raises(UserError, match="may begin with '-'"):
        prepared(tmp_path, uri.format(made, repo=registry[0]))
    assert not made.exists()


def test_git_and_dvc_options_end_before_the_source(
    tmp_path: Path, registry: tuple[Path, dict[str, str]]
) -> None:
    made = tmp_path / "made"
    assert dvc.commit(dvc.Tracked(f"--upload-pack=touch {made};", "photos", "")) is None
    with pytest.raises(UserError, match="dvc get failed for --help in"):
        dvc.fetch(dvc.Tracked(str(registry[0]), "--help", ""), tmp_path / "target")
    assert not made.exists()


def test_revision_resolves_as_in_git(
    tmp_path: Path,
) -> None:
    made = Registry(tmp_path / "made", str(tmp_path / "remote"))
    commits = {}
    for name in ("v2", "zz/v2"):
        made.git("checkout", "--quiet", "-b", name)
        made.git("commit", "--quiet", "--allow-empty", "--message", name)
        commits[name] = made.git("rev-parse", "HEAD")
    made.git("tag", "--annotate", "--message", "a tag", "v3", "v2")
    made.git("update-ref", "refs/remotes/origin/HEAD", commits["v2"])
    wanted = {"v2": "v2", "zz/v2": "zz/v2", "v3": "v2", "": "zz/v2"}
    for rev, name in wanted.items():
        assert dvc.commit(dvc.Tracked(f"file://{made.folder}", "photos", rev)) == commits[name]
    assert dvc.commit(dvc.Tracked(f"file://{made.folder}", "photos", "v4")) is None


def test_manifest_has_the_dvc_checksum_of_a_tracked_directory(
    tmp_path: Path, registry: tuple[Path, dict[str, str]]
) -> None:
    found = prepared(tmp_path, registry[0] / "photos").manifest.source
    assert found["dvc_md5"].endswith(".dir")


def test_links_into_the_dvc_cache_are_followed(tmp_path: Path) -> None:
    root, program = tmp_path / "repo", str(Path(sys.executable).with_name("dvc"))
    photos = write_classes(root / "photos", ["cat", "dog"])
    expected = prepared(tmp_path / "files", photos, max_rejected=0.0)
    run(program, "init", "--quiet", "--no-scm", cwd=root)
    run(program, "config", "cache.type", "symlink", cwd=root)
    run(program, "add", "--quiet", "photos", cwd=root)
    assert all(path.is_symlink() for path in photos.glob("*/*.png"))
    linked = prepared(tmp_path / "links", photos, max_rejected=0.0)
    assert linked.fingerprint == expected.fingerprint
