"""What a user may choose about the pods of a PyTorchJob: a frozen, validated section."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from ddpm_core.config import yaml_text
from ddpm_core.config.section import Processes, Section, as_tuple
from ddpm_core.errors import UserError
from ddpm_core.text import counted

_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


def _as_text(value: object) -> object:
    """YAML reads `cpu: 2` as a number."""
    return str(value) if type(value) in (int, float) else value


Quantity = Annotated[str, BeforeValidator(_as_text), Field(pattern=f"^{_QUANTITY.pattern}$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Names = Annotated[tuple[Name, ...], BeforeValidator(as_tuple)]
Texts = dict[str, str]
Seconds = Annotated[int, Field(ge=1, le=10**9)]
Restarts = Annotated[int, Field(ge=0, le=10**6)]


def amount(quantity: str) -> float:
    """A quantity of Kubernetes, such as 500m or 2Gi, as a number (of cores, of bytes)."""
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
    """The pods of a job. Unknown keys and wrong types are mistakes; `read` tells all at once."""

    image: str = Field("", description="empty: that of the launcher's own pod")
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    image_pull_secrets: Names = ()
    min_replicas: Processes = Field(1, description="training goes on while this many workers run")
    max_replicas: Processes = Field(1, description="how many are asked for, and may ever be")
    processes: Processes | None = Field(
        None, description="in each worker's pod; empty: one a GPU, else train.processes"
    )
    cpu: Quantity | None = Field(None, description="empty: 500m, with GPUs 4")
    cpu_limit: Quantity | None = Field(None, description="empty: as much as cpu")
    memory: Quantity | None = Field(
        None, description="request and limit; empty: 2Gi, with GPUs 16Gi"
    )
    gpu: Annotated[int, Field(ge=0, le=1000)] = 0
    gpu_resource: str = "nvidia.com/gpu"
    shm: Quantity | None = Field(
        None, description="of /dev/shm; counts as memory; empty: 128Mi, with several GPUs 1Gi"
    )
    tmp: Quantity = Field("4Gi", description="of /tmp, where the data of an s3:// workspace go")
    runtime_class: Name | None = Field(None, description="empty: the node's default runtime")
    node_selector: Texts = Field({})
    tolerations: Annotated[tuple[Toleration, ...], BeforeValidator(as_tuple)] = ()
    volumes: Annotated[tuple[Claim, ...], BeforeValidator(as_tuple)] = ()
    secrets: Names = Field((), description="Secrets whose keys become environment variables")
    optional_secrets: Names = Field((), description="the same, where they exist")
    env: Texts = Field({}, description="nothing secret")
    labels: Texts = Field({})
    annotations: Texts = Field({})
    service_account: Name = "ddpm"
    max_restarts: Restarts = Field(
        10, description="of all processes by torchrun, after one of them died"
    )
    backoff_limit: Restarts = Field(
        10, description="restarts of containers, after torchrun itself ended"
    )
    join_seconds: Seconds = Field(
        15, description="that workers wait for more of them, once min_replicas are there"
    )
    shutdown_seconds: Seconds = Field(60, description="that processes have to save after SIGTERM")
    grace_seconds: Seconds = Field(90, description="that the pod has, torchrun included")
    deadline_seconds: Seconds = Field(7 * 86400, description="after which the job is ended")
    queue: Name | None = Field(None, description="of Kueue, which admits the job")

    @property
    def request_of_cpu(self) -> str:
        if self.cpu:
            return self.cpu
        # A process on a GPU compiles its network, and feeds it.
        usual = "4" if self.gpu else "500m"
        return min(usual, self.cpu_limit or usual, key=amount)

    @property
    def limit_of_cpu(self) -> str:
        return self.cpu_limit or self.request_of_cpu

    @property
    def limit_of_memory(self) -> str:
        return self.memory or ("16Gi" if self.gpu else "2Gi")

    @property
    def limit_of_shm(self) -> str:
        """NCCL's processes in a pod meet there."""
        return self.shm or ("1Gi" if self.gpu > 1 else "128Mi")


def of_file(path: Path | None) -> dict[str, Any]:
    """The options in a YAML file, as plain data; none without one. Raises UserError."""
    if path is None:
        return {}
    return yaml_text.read(path, "file of options", "lines such as `memory: 4Gi`")


def read(given: Mapping[str, Any]) -> Options:
    """The options of plain data, or a UserError that lists all mistakes, each with its path."""
    try:
        return Options.model_validate(_whole(dict(given)))
    except ValidationError as error:
        lines = [_sentence(item) for item in error.errors(include_url=False)]
    raise refusal(lines)


def _whole(value: Any) -> Any:
    """KFP hands on the 2 in a dict as 2.0."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def refusal(mistakes: list[str]) -> UserError:
    lines = "\n".join(f"  {line}" for line in mistakes)
    return UserError(f"{counted(len(mistakes), 'mistake')} in the settings of the job:\n{lines}")


def _sentence(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = ", ".join(Options.model_fields)
        return f"{path}: unknown; known are {known}"
    wanted = str(item["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    if item["type"] == "string_pattern_mismatch":
        wanted = f"a text that matches {item['ctx']['pattern']}"
    return f"{path}: {item['input']!r} given; {wanted[0].lower() + wanted[1:]} is needed"
