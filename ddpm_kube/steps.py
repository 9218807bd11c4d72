"""What the components of the pipeline share: settings, what is to be drawn, the gate, the end.

It is installed with the program, so that a component finds it in a pod of the image. It knows
nothing of KFP: a component is the few lines between the two.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_core.masking import masked
from ddpm_core.registry.gate import FAULTS, failed, verdicts
from ddpm_core.storage.workspace import Workspace
from ddpm_kube import options
from ddpm_kube.options import Options

MOUNTED = Path("/etc/ddpm/params.yaml")  # of the ConfigMap ddpm-params
PASS = "pass"  # what `gate` returns of an evaluation that may be registered


def settings(
    text: str, overrides: Sequence[str], workspace: str, source: str = "", tracking: str = ""
) -> Config:
    """One Config of the pipeline's inputs; an empty one leaves what the params say.

    `text` is that of a params file; empty: that of the ConfigMap where there is one, else the
    built-in defaults. `overrides` are `section.key=value` and win over all. Raises UserError with
    every mistake.
    """
    named = {"prepare.source": source, "tracking.uri": tracking}
    given = [f"{key}={_quoted(value)}" for key, value in named.items() if value]
    # What is mounted is read as text too: a link to a path that changes means little in an error.
    name = "the pipeline's params" if text.strip() else "the ConfigMap's params"
    if not text.strip() and MOUNTED.is_file():
        text = MOUNTED.read_text(encoding="utf-8")
    config = params.load_text(text, name, [*given, *overrides], workspace or None)
    if config.sample.checkpoints == "best":
        raise UserError(
            "sample.checkpoints: best given, but in the pipeline evaluate depends on sample: give "
            "all, latest or a list of steps."
        )
    must_hold_no_secret(text_of(config))
    return config


def _quoted(text: str) -> str:
    """As YAML: to it the two halves with which JSON writes a rare character are two characters."""
    return yaml.safe_dump(text, default_style='"', width=math.inf).strip()


def must_hold_no_secret(text: str) -> None:
    """Raise UserError where a URI in what KFP is told holds a password or token."""
    if masked(text) != text:
        raise UserError(
            "A URI among the inputs holds a password or token, and KFP shows and logs them: "
            "leave it out. MLflow's go into the Secret ddpm-mlflow, as MLFLOW_TRACKING_USERNAME "
            "and MLFLOW_TRACKING_PASSWORD."
        )


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that are mistakes whatever the params are. Raises UserError with each.

    How they go together is left out: the ConfigMap may hold what makes them right.
    """
    params.load_text("", "the overrides", [item for item in overrides if _is_wrong(item)])


def _is_wrong(override: str) -> bool:
    """Whether it names no setting, or gives one what it can never be."""
    given: dict[str, Any] = {}
    if params.override(given, override):
        return True
    depth = override.partition("=")[0].count(".") + 1
    try:
        Config.model_validate(given)
    except ValidationError as error:
        # Of settings that don't go together a section complains that stands above them.
        found = error.errors(include_url=False)
        return any(e["type"] != "value_error" or len(e["loc"]) >= depth for e in found)
    return False


def text_of(config: Config) -> str:
    """A Config as the text that the steps hand on."""
    return json.dumps(config.dump())


def opened(settings: str) -> tuple[Config, Workspace]:
    """What `text_of` made, and the workspace that it names."""
    config = params.validate(json.loads(settings))
    return config, Workspace.open(config.workspace)


def train_here(config: Config) -> None:
    """`ddpm train` in this pod; with `train.processes` in as many workers."""
    from ddpm_core.training import launch as launcher

    with tempfile.TemporaryDirectory(prefix="ddpm-train-") as folder:
        file = Path(folder) / "params.yaml"
        file.write_text(yaml.safe_dump(config.dump(), sort_keys=False), encoding="utf-8")
        launcher.train(config, os.environ, ["train", "-p", str(file)])


def train(config: Config, backend: str, job: dict[str, Any], run_id: str) -> None:
    """Train by a PyTorchJob of KFP's run `run_id`, or here. Raises UserError."""
    check_backend(backend, job, config)
    if backend == "process":
        train_here(config)
        return
    from ddpm_kube import launch

    launch.train(config, job_options(job, config), run_id, os.environ)


def job_options(job: dict[str, Any], config: Config | None) -> Options:
    """The options of a PyTorchJob: what is given, else what the manifests have."""
    usual: dict[str, Any] = {"optional_secrets": ["ddpm-s3", "ddpm-mlflow"]}
    if config is None or "://" not in config.workspace:
        usual["volumes"] = [{"claim": "ddpm-workspace", "path": "/workspace"}]
    return options.read({**usual, **job})


def check_backend(backend: str, job: dict[str, Any], config: Config | None) -> None:
    """Refuse what could not be trained. Without a Config less can be told. Raises UserError."""
    if backend not in ("pytorchjob", "process"):
        raise UserError(f"backend: {backend!r} given; pytorchjob or process is needed.")
    if backend == "process":
        return
    read = job_options(job, config)
    if config is not None:
        from ddpm_kube.spec import JobSpec

        JobSpec(config, read, "a-run", "a-namespace", read.image or "an-image")


def clean_up(backend: str, run_id: str) -> str:
    """Remove the PyTorchJob of a run if it is still there; what was removed, as a sentence."""
    if backend != "pytorchjob":
        return ""
    from ddpm_kube.cluster import locate
    from ddpm_kube.gc import remove_run

    try:
        names = remove_run(locate(os.environ).cluster, run_id)
    except UserError as error:
        return f"Whether a PyTorchJob is left could not be found out. {error}"
    return f"Removed the PyTorchJob {', '.join(names)}." if names else ""


def parts(config: Config, workspace: Workspace) -> list[str]:
    """What sampling pods are to do, each `STEP:I/N`: every shard that lacks, or is damaged.

    A checkpoint whose samples are there has one part all the same, which checks them, so that each
    checkpoint is in the lineage and the loop is never empty.
    """
    from ddpm_core.runtime.device import choose_device
    from ddpm_core.sampling import gather, plan
    from ddpm_core.sampling.run import recipe_on
    from ddpm_core.sampling.shards import ShardStore

    device = choose_device(config.device)
    listed = []
    for checkpoint in plan.look_at_chosen(config, workspace):
        recipe = recipe_on(device, config, checkpoint)
        drawn = ShardStore(workspace, recipe)
        shards = plan.shards(config.sample)
        lacking = [shard for shard in shards if drawn.problem(shard)]
        if gather.complete(workspace, recipe) or not lacking:
            lacking = shards[:1]
        listed += [f"{checkpoint.step}:{shard.number}/{shard.of}" for shard in lacking]
    return listed


def draw(config: Config, workspace: Workspace, part: str) -> int:
    """Draw one of `parts`; the step of its checkpoint."""
    from ddpm_core.runtime.distributed import world
    from ddpm_core.sampling.plan import parse_shard
    from ddpm_core.sampling.run import sample

    step, _, shard = part.partition(":")
    chosen = config.sample.model_copy(update={"checkpoints": (int(step),)})
    one = config.model_copy(update={"sample": chosen})
    with world(config.device, os.environ) as here:
        sample(one, workspace, here, parse_shard(shard))
    return int(step)


def gate(results: dict[str, Any], worst: float) -> str:
    """PASS where the best checkpoint of results.json may be registered, or why not.

    `worst` is the score above which it may not; 0: there is no such limit. The champion is the
    matter of `register`, which alone knows it.
    """
    row: dict[str, Any] = next(
        (r for r in results["rows"] if r["step"] == results["best"]["step"]), {}
    )
    if check := failed(verdicts(row)):
        return f"The best checkpoint, step {row['step']}, {FAULTS[check][1]}."
    if 0 < worst < row["score"]:
        return (
            f"The best checkpoint, step {row['step']}, has {row['score_name']} "
            f"{row['score']:.4g}; at most {worst:g} is wanted."
        )
    return PASS


def ending(state: str, message: str, inputs: Sequence[Any], cleaned: str = "") -> str:
    """What became of a run, in Markdown, for its last artifact and log.

    `inputs` are those of `settings`; a mistake in them may be why the run failed.
    """
    lines = [f"# The run {state.lower()}", message, cleaned]
    try:
        config = settings(*inputs)
        from ddpm_core import chain

        status = chain.status(config, Workspace.open(config.workspace))
        lines.append(f"```\n{status}\n```")
    except (UserError, OSError) as error:
        lines.append(str(error))
    if state != "SUCCEEDED":
        lines.append("Run the pipeline again with the same inputs: what is up to date is skipped.")
    return "\n\n".join(line for line in lines if line) + "\n"
