"""One training as a PyTorchJob: the settings of the training, of its pods, and whether they fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

import yaml

from ddpm_core.config import Config
from ddpm_core.text import masked
from ddpm_core.tracking.run import flatten
from ddpm_kube.names import job_name
from ddpm_kube.options import Options, amount, refusal

# Of variables that are usually secret.
_SECRET = re.compile(
    r"SECRET|PASSWORD|TOKEN(?!IZ)|CREDENTIAL|API_?KEY|ACCESS_KEY_ID", re.IGNORECASE
)
_LARGEST = 200 * 1024  # bytes of params; annotations may have 256 KiB in all


@dataclass(frozen=True)
class JobSpec:
    """A job that can be built. Raises UserError with every combination that can't work."""

    config: Config
    options: Options
    run_id: str
    namespace: str
    image: str

    def __post_init__(self) -> None:
        parts = (_counts, _devices, _sizes, _times, _places, _secrets)
        mistakes = [mistake for part in parts for mistake in part(self)]
        if mistakes:
            raise refusal(mistakes)

    @property
    def name(self) -> str:
        return job_name(self.run_id, "train")

    @property
    def params(self) -> str:
        """The params file of the workers: the whole settings, defaults and overrides included."""
        settings = self.config.dump()
        if self.options.gpu and self.config.device == "auto":
            # A worker that doesn't see its GPU is to say so, and not to train on the CPU.
            settings["device"] = "cuda"
        return yaml.safe_dump(settings, sort_keys=False)

    @property
    def processes(self) -> int:
        """In each pod."""
        wanted = self.options.processes or self.options.gpu or self.config.train.processes
        return 1 if wanted == "auto" else int(wanted)

    @property
    def tracks_by_http(self) -> bool:
        return self.config.tracking.uri.startswith(("http://", "https://"))


def _counts(spec: JobSpec) -> Iterator[str]:
    options, batch = spec.options, spec.config.train.batch_size
    if not spec.run_id.strip():
        yield "run_id: empty; the name of the job follows from it"
    if not spec.image:
        yield "image: none given, and the launcher is no pod whose own could be used"
    if options.min_replicas > options.max_replicas:
        yield (
            f"min_replicas: {options.min_replicas} is more than max_replicas, "
            f"{options.max_replicas}"
        )
    most = options.max_replicas * spec.processes
    if most > batch:
        yield (
            f"max_replicas: {options.max_replicas} workers of {spec.processes} processes are "
            f"{most}, more than the {batch} images of a batch (train.batch_size)"
        )


def _devices(spec: JobSpec) -> Iterator[str]:
    options, device = spec.options, spec.config.device
    if device == "mps":
        yield "device: mps given; a pod has none"
    if device.startswith("cuda") and not options.gpu:
        yield f"gpu: 0 given with device {device}; give gpu, or device cpu"
    if options.gpu and device == "cpu":
        yield f"gpu: {options.gpu} given with device cpu, which leaves them idle"
    if options.gpu and ":" in device:
        yield f"device: {device} given; each process has a GPU of its own, so cuda is needed"
    if options.gpu and spec.processes != options.gpu:
        yield (
            f"processes: {spec.processes} given with gpu {options.gpu}; NCCL needs one GPU for "
            "each process"
        )


def _sizes(spec: JobSpec) -> Iterator[str]:
    options = spec.options
    cpu, memory, shm = options.request_of_cpu, options.limit_of_memory, options.limit_of_shm
    if amount(cpu) > amount(options.limit_of_cpu):
        yield f"cpu: {cpu} is more than cpu_limit, {options.limit_of_cpu}"
    if not amount(cpu):
        yield f"cpu: {cpu} given; more than 0 is needed"
    if amount(memory) < 2**26:
        yield f"memory: {memory} given; Python alone needs 64Mi (is a unit missing?)"
    if amount(shm) >= amount(memory):
        yield f"shm: {shm} is a part of memory, and that is {memory}"
    if len(spec.params.encode()) > _LARGEST:
        yield f"params: more than the {_LARGEST // 1024} KiB that travel in an annotation"


def _times(spec: JobSpec) -> Iterator[str]:
    options = spec.options
    if options.grace_seconds <= options.shutdown_seconds:
        yield (
            f"grace_seconds: {options.grace_seconds} given; the pod must have longer than its "
            f"processes have to save, {options.shutdown_seconds} (shutdown_seconds)"
        )
    if options.deadline_seconds <= options.grace_seconds:
        yield (
            f"deadline_seconds: {options.deadline_seconds} is no longer than grace_seconds, "
            f"{options.grace_seconds}"
        )


def _places(spec: JobSpec) -> Iterator[str]:
    """What training writes must lie where all workers and those that follow find it."""
    options, config = spec.options, spec.config
    paths = [claim.path for claim in options.volumes]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        yield f"volumes: {path} is mounted twice"
    taken = ("/tmp", "/dev/shm", "/etc/ddpm")
    for path in paths:
        if any(_below(path, at) or _below(at, path) for at in taken):
            yield f"volumes: {path} given; {', '.join(taken)} are in use"
    writable = [claim.path for claim in options.volumes if not claim.read_only]
    if "://" not in config.workspace and not _below(config.workspace, *writable):
        yield (
            f"workspace: {config.workspace} lies on no volume that the workers can write "
            f"(volumes: {', '.join(writable) or 'none'}); they need one, or s3://bucket/prefix"
        )
    store = config.tracking.uri.removeprefix("sqlite:///")
    if store != config.tracking.uri and not _below(store, *writable):
        yield (
            f"tracking.uri: {config.tracking.uri} would be lost with the pod; give the MLflow "
            'server\'s http:// address, or "" for none'
        )


def _secrets(spec: JobSpec) -> Iterator[str]:
    """The job can be read by anyone who may list it."""
    options = spec.options
    given = {"env": options.env, "annotations": options.annotations}
    for key, text in flatten({**spec.config.dump(), **given}).items():
        if (safe := masked(text)) != text:
            yield f"{key}: {safe} holds a password or token; give it as a Secret"
    for name in sorted(options.env):
        if _SECRET.search(name):
            yield f"env: {name} looks like a secret; put it into a Secret, and name that in secrets"
    for name in sorted(set(options.secrets) & set(options.optional_secrets)):
        yield f"secrets: {name} is named in optional_secrets too"


def _below(path: str, *folders: str) -> bool:
    given = PurePosixPath(path)
    return any(given == PurePosixPath(f) or PurePosixPath(f) in given.parents for f in folders)
