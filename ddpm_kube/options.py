"""The options of a job and its pods (docs/launcher.md): a frozen, validated section."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from ddpm_core.config import yaml_text
from ddpm_core.config.durations import duration
from ddpm_core.config.section import Processes, Section, as_tuple
from ddpm_core.errors import Invalid, Problem, UserError, got, invalid
from ddpm_core.problems import problems_of

PLACE = "the options of the job"  # in errors
AUTO = "auto"  # the backend that the cluster has

_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


def _as_text(value: object) -> object:
    """Return a number as text: YAML reads `cpu: 2` as a number."""
    return str(value) if type(value) in (int, float) else value


def _as_duration(value: object) -> str:
    """Return a duration as text. Raises Invalid for anything else."""
    text = str(value)
    try:
        seconds = duration(text)
    except UserError:
        seconds = 0.0
    if not seconds:
        raise Invalid([Problem("", got(value), "must be a time such as 90s, 15m or 2h")])
    return text


Quantity = Annotated[str, BeforeValidator(_as_text), Field(pattern=f"^{_QUANTITY.pattern}$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Names = Annotated[tuple[Name, ...], BeforeValidator(as_tuple)]
Texts = dict[str, str]
Seconds = Annotated[int, Field(ge=1, le=10**9)]
Duration = Annotated[str, BeforeValidator(_as_duration)]
Restarts = Annotated[int, Field(ge=0, le=10**6)]


def amount(quantity: str) -> float:
    """Return a Kubernetes quantity, such as 500m or 2Gi, as a number of cores or bytes."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise ValueError(quantity)
    return float(match[1]) * _UNITS[match[2] or ""]


class Claim(Section):
    """A PersistentVolumeClaim that every worker mounts."""

    claim: Name
    path: Annotated[str, Field(pattern=r"^/[^:]*[^:/]$")]
    sub_path: str = ""
    read_only: bool = False


class Toleration(Section):
    key: str = ""
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


class Options(Section):
    """The pods of a job, and how long the launcher waits for them.

    Defaults are those of train.yaml where both mean the same.
    """

    backend: Literal["auto", "pytorchjob", "trainjob"] = Field(
        "auto", description="a PyTorchJob or a TrainJob; auto: what the cluster has"
    )
    image: str = Field("", description="empty: the image of the launcher's own pod")
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    image_pull_secrets: Names = ()
    min_replicas: Processes = Field(1, description="training continues while this many workers run")
    max_replicas: Processes = Field(1, description="workers requested, and the most there can be")
    processes: Processes | None = Field(
        None, description="per worker pod; empty: one per GPU, else train.processes"
    )
    cpu: Quantity | None = Field(None, description="empty: 500m; with GPUs 4")
    cpu_limit: Quantity | None = Field(None, description="empty: the same as cpu")
    memory: Quantity | None = Field(
        None, description="request and limit; empty: 2Gi; with GPUs 16Gi"
    )
    gpu: Annotated[int, Field(ge=0, le=1000)] = 0
    gpu_resource: str = "nvidia.com/gpu"
    shm: Quantity | None = Field(
        None, description="/dev/shm, counts as memory; empty: 128Mi; with several GPUs 1Gi"
    )
    tmp: Quantity = Field("4Gi", description="/tmp, which caches the data of an s3:// workspace")
    runtime_class: Name | None = Field(None, description="empty: the node's default runtime")
    node_selector: Texts = Field({})
    tolerations: Annotated[tuple[Toleration, ...], BeforeValidator(as_tuple)] = ()
    volumes: Annotated[tuple[Claim, ...], BeforeValidator(as_tuple)] = ()
    secrets: Names = Field((), description="Secrets whose keys become environment variables")
    optional_secrets: Names = Field((), description="the same, for Secrets that may not exist")
    env: Texts = Field({}, description="no secrets: everyone who lists jobs can read them")
    labels: Texts = Field({})
    annotations: Texts = Field({})
    service_account: Name = "ddpm"
    max_restarts: Restarts = Field(
        10, description="restarts of all processes by torchrun, after one of them failed"
    )
    backoff_limit: Restarts = Field(
        10, description="restarts of containers, after torchrun itself failed"
    )
    join_seconds: Seconds = Field(
        15, description="to wait for more workers, once min_replicas are running"
    )
    shutdown_seconds: Seconds = Field(60, description="for processes to save after SIGTERM")
    grace_seconds: Seconds = Field(90, description="for the pod to end, torchrun included")
    deadline_seconds: Seconds = Field(7 * 86400, description="limit of the whole job")
    queue: Name | None = Field(None, description="the Kueue queue that admits the job")
    patience: Duration = Field(
        "15m", description="to wait for a controller, nodes, quota, images and the API server"
    )

    @property
    def patience_seconds(self) -> float:
        return duration(self.patience)

    @property
    def cpu_request(self) -> str:
        if self.cpu:
            return self.cpu
        # A process with a GPU compiles its network on the CPU, and loads its data.
        usual = "4" if self.gpu else "500m"
        return min(usual, self.cpu_limit or usual, key=amount)

    @property
    def max_cpu(self) -> str:
        """Return the limit of the container."""
        return self.cpu_limit or self.cpu_request

    @property
    def max_memory(self) -> str:
        return self.memory or ("16Gi" if self.gpu else "2Gi")

    @property
    def max_shm(self) -> str:
        """Return the size of /dev/shm, through which the NCCL processes of a pod communicate."""
        return self.shm or ("1Gi" if self.gpu > 1 else "128Mi")


def read_file(path: Path | None) -> dict[str, Any]:
    """Return the options in a YAML file, not validated; empty without a file.

    Raises:
        UserError: the file cannot be read, or is not a YAML mapping.
    """
    if path is None:
        return {}
    return yaml_text.read(path, "file of options", "lines such as `memory: 4Gi`")


def read(given: Mapping[str, Any]) -> Options:
    """Validate options. Raises UserError that lists all problems, each with its path."""
    try:
        return Options.model_validate(_with_integers(dict(given)))
    except ValidationError as error:
        raise invalid(problems_of(error, Options), PLACE) from error


def _with_integers(value: Any) -> Any:
    """Return `value` with whole floats as integers: KFP passes the 2 in a dict as 2.0."""
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
