"""The functions behind the components of the pipeline: settings, sampling parts, gate, summary.

This module is installed with the program, so components can import it in any pod of the image. It
does not import KFP: a component is the few lines that connect the two.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.errors import UserError, invalid
from ddpm_core.registry.gate import FAULTS, failed, verdicts
from ddpm_core.storage.workspace import Workspace
from ddpm_core.text import masked
from ddpm_kube.backends import BACKENDS
from ddpm_kube.options import AUTO, Options, read

CONFIG_MAP = Path("/etc/ddpm/params.yaml")  # where pods mount the ConfigMap ddpm-params
PROCESS = "process"  # the backend that trains in the pod of the component
PASS = "pass"  # the result of `gate` for a checkpoint that may be registered
MAX_PARTS = 8  # sampling pods; each costs about 59 kB of the 1 MB that Argo stores uncompressed


def make_config(
    text: str, overrides: Sequence[str], workspace: str, source: str = "", tracking: str = ""
) -> Config:
    """Return the Config of the pipeline's inputs; an empty input keeps the value of the params.

    `text` is the content of a params file; if empty, the ConfigMap is used if it exists, else the
    defaults. `overrides` are `section.key=value` and have priority.

    Raises:
        UserError: a setting is invalid, cannot work in the pipeline, or contains a password.
    """
    named = {"prepare.source": source, "tracking.uri": tracking}
    given = [f"{key}={_quoted(value)}" for key, value in named.items() if value]
    # Read as text, so that errors do not name the path of the mount, which is a changing link.
    name = "the pipeline's params" if text.strip() else "the ConfigMap's params"
    if not text.strip() and CONFIG_MAP.is_file():
        text = CONFIG_MAP.read_text(encoding="utf-8")
    config = params.load_text(text, name, [*given, *overrides], workspace or None)
    if config.sample.checkpoints == "best":
        raise UserError(
            "sample.checkpoints: got best, which needs scores, but the pipeline samples before it "
            "evaluates; must be all, latest or a list of steps."
        )
    refuse_secrets(json.dumps(config.dump()))
    return config


def _quoted(text: str) -> str:
    """Return `text` as YAML. Not as JSON, whose surrogate pairs YAML reads as two characters."""
    return yaml.safe_dump(text, default_style='"', width=math.inf).strip()


def refuse_secrets(text: str) -> None:
    """Raise UserError if a URI in an input of the pipeline contains a password or token."""
    if masked(text) != text:
        raise UserError(
            "A URI in the inputs contains a password or token, which KFP shows and logs. Remove "
            "it; put MLflow's into the Secret ddpm-mlflow, as MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD."
        )


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise UserError with every override that is invalid for any params.

    Combinations are not checked: the ConfigMap, unknown here, may contain what makes them valid.
    """
    try:
        params.load_text("", "the overrides", overrides)
    except UserError as error:
        # The problem of a combination names the settings that it involves.
        if alone := [problem for problem in error.problems if not problem.involves]:
            raise invalid(alone, "the overrides") from error


def train_here(config: Config) -> None:
    """Run `ddpm train` in this pod, with `train.processes` workers."""
    from ddpm_core.training import launch as launcher

    with tempfile.TemporaryDirectory(prefix="ddpm-train-") as folder:
        file = Path(folder) / "params.yaml"
        file.write_text(yaml.safe_dump(config.dump(), sort_keys=False), encoding="utf-8")
        launcher.train(config, os.environ, ["train", "-p", str(file)])


def train(config: Config, backend: str, job: dict[str, Any], run_id: str) -> None:
    """Train in a job named after KFP's run `run_id`, or in this pod. Raises UserError."""
    check_backend(backend, job, config)
    if backend == PROCESS:
        train_here(config)
        return
    from ddpm_kube import launch

    launch.train(config, job_options(job, config, backend), run_id, os.environ)


def job_options(job: dict[str, Any], config: Config | None, backend: str = AUTO) -> Options:
    """Return the options of a job; defaults are the claim and Secrets of the manifests."""
    secrets = ["ddpm-s3", "ddpm-mlflow"]
    defaults: dict[str, Any] = {"backend": backend, "optional_secrets": secrets}
    if config is None or "://" not in config.workspace:
        defaults["volumes"] = [{"claim": "ddpm-workspace", "path": "/workspace"}]
    return read({**defaults, **job})


def check_backend(backend: str, job: dict[str, Any], config: Config | None) -> None:
    """Raise UserError if training could not start. Without a Config fewer checks are possible."""
    if backend not in (known := (AUTO, *BACKENDS, PROCESS)):
        raise UserError(f"backend: got {backend!r}; must be one of {', '.join(known)}.")
    if backend == PROCESS:
        return
    options = job_options(job, config, backend)
    if config is not None:
        from ddpm_kube.spec import JobSpec

        JobSpec(config, options, "a-run", "a-namespace", options.image or "an-image")


def clean_up(backend: str, run_id: str) -> str:
    """Delete the job of a run if it exists, and return a sentence about it."""
    if backend == PROCESS:
        return ""
    from ddpm_kube.gc import remove_run
    from ddpm_kube.location import locate

    try:
        names = remove_run(locate(os.environ).cluster, run_id)
    except UserError as error:
        return f"Cannot check for a leftover job. {error}"
    return f"Deleted the job {', '.join(names)}." if names else ""


def list_parts(config: Config, workspace: Workspace) -> list[str]:
    """Return the work of at most MAX_PARTS pods: every missing or damaged shard.

    Each part names its shards as `STEP:I/N STEP:I/N ...`. A checkpoint with complete samples still
    has one shard listed, which verifies them. So every checkpoint appears in KFP's lineage, and the
    loop is never empty.
    """
    from ddpm_core.sampling import gather, plan
    from ddpm_core.sampling.freshness import expected_recipe
    from ddpm_core.sampling.shards import ShardStore

    listed = []
    for checkpoint in plan.look_at_chosen(config, workspace):
        recipe = expected_recipe(config, workspace, checkpoint)
        store = ShardStore(workspace, recipe)
        shards = plan.shards(config.sample)
        missing = [shard for shard in shards if store.problem(shard)]
        if gather.complete(workspace, recipe) or not missing:
            missing = shards[:1]
        listed += [f"{checkpoint.step}:{shard.number}/{shard.of}" for shard in missing]
    return divide(listed)


def divide(shards: list[str]) -> list[str]:
    """Return the shards in at most MAX_PARTS texts, in order and as even as possible."""
    count, total = min(MAX_PARTS, len(shards)), len(shards)
    bounds = [total * i // count for i in range(count + 1)]
    return [" ".join(shards[start:stop]) for start, stop in pairwise(bounds)]


def sample_part(config: Config, workspace: Workspace, part: str) -> list[int]:
    """Sample one of `list_parts`, and return the steps of its checkpoints, ascending."""
    from ddpm_core.runtime.distributed import world
    from ddpm_core.sampling.plan import parse_shard
    from ddpm_core.sampling.run import sample

    steps = set()
    with world(config.device, os.environ) as this_world:
        for item in part.split():
            step, _, shard = item.partition(":")
            chosen = config.sample.model_copy(update={"checkpoints": (int(step),)})
            one = config.model_copy(update={"sample": chosen})
            sample(one, workspace, this_world, parse_shard(shard))
            steps.add(int(step))
    return sorted(steps)


def gate(results: dict[str, Any], worst: float) -> str:
    """Return PASS if the best checkpoint of results.json may be registered, else the reason.

    `worst` is the highest score that may be registered; 0: no limit. `register` compares the
    checkpoint with the champion.
    """
    row: dict[str, Any] = next(
        (r for r in results["rows"] if r["step"] == results["best"]["step"]), {}
    )
    if check := failed(verdicts(row)):
        return f"The best checkpoint, step {row['step']}, {FAULTS[check][1]}."
    if 0 < worst < row["score"]:
        return (
            f"The best checkpoint, step {row['step']}, has {row['score_name']} "
            f"{row['score']:.4g}; must be at most {worst:g}."
        )
    return PASS
