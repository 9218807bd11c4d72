"""One training as a job: its params, the options of its pods, its name, and their checks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

import yaml

from ddpm_core.config import Config
from ddpm_core.errors import Problem, got, invalid
from ddpm_core.text import masked
from ddpm_core.tracking.run import flatten
from ddpm_kube.backends import Backend, of_name
from ddpm_kube.options import PLACE, Options, amount

# Names of environment variables that usually hold secrets.
_SECRET = re.compile(
    r"SECRET|PASSWORD|TOKEN(?!IZ)|CREDENTIAL|API_?KEY|ACCESS_KEY_ID", re.IGNORECASE
)
_MAX_PARAMS = 200 * 1024  # bytes; all annotations of an object together may have 256 KiB
_RESERVED = ("/tmp", "/dev/shm", "/etc/ddpm")  # mounted by the job itself
# Controllers name pods NAME-worker-12 or NAME-node-0-123-x7k2p; Kubernetes allows 63 characters.
_MAX_NAME = 46


@dataclass(frozen=True)
class JobSpec:
    """All that a job is built from. Raises UserError with every combination that cannot work."""

    config: Config
    options: Options
    run_id: str
    namespace: str
    image: str

    def __post_init__(self) -> None:
        checks = (
            _check_counts,
            _check_devices,
            _check_sizes,
            _check_times,
            _check_paths,
            _check_secrets,
        )
        problems = [problem for check in checks for problem in check(self)]
        if problems := [*problems, *self.backend.problems(self.options)]:
            raise invalid(problems, PLACE)

    @property
    def backend(self) -> Backend:
        return of_name(self.options.backend)

    @property
    def name(self) -> str:
        return job_name(self.run_id, "train")

    @property
    def params(self) -> str:
        """Return the params file of the workers, with every default and override."""
        settings = self.config.dump()
        if self.options.gpu and self.config.device == "auto":
            # A worker that cannot see its GPU must fail instead of training on the CPU.
            settings["device"] = "cuda"
        return yaml.safe_dump(settings, sort_keys=False)

    @property
    def processes(self) -> int:
        """Return the number of training processes in each pod."""
        wanted = self.options.processes or self.options.gpu or self.config.train.processes
        return 1 if wanted == "auto" else int(wanted)

    @property
    def tracks_by_http(self) -> bool:
        return self.config.tracking.uri.startswith(("http://", "https://"))


# Names


def job_name(run_id: str, stage: str) -> str:
    """Return a DNS label of at most 46 characters that starts with a letter.

    The same run and stage give the same name, so a restarted launcher finds its job. Where
    characters had to be replaced or cut, a hash of the input keeps the names of two runs apart.
    """
    text = f"{stage}-{run_id}"
    label = _to_dns_label(text)
    if label[:1].isdigit():
        label = f"job-{label}"
    if label == text and len(label) <= _MAX_NAME:
        return label
    return _with_hash(label, text, _MAX_NAME) if label else f"job-{_short_hash(text)}"


def label_value(text: str) -> str:
    """Return `text` as the value of a label: unchanged if allowed, else shortened with a hash."""
    if re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", text):
        return text
    return _with_hash(_to_dns_label(text), text, 63).lstrip("-")


def _to_dns_label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _with_hash(label: str, text: str, longest: int) -> str:
    digest = _short_hash(text)
    return f"{label[: longest - len(digest) - 1].rstrip('-')}-{digest}"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# Checks: each yields a Problem per impossible combination


def _check_counts(spec: JobSpec) -> Iterator[Problem]:
    options, batch = spec.options, spec.config.train.batch_size
    if not spec.run_id.strip():
        yield Problem("run_id", "empty", "required, because it names the job")
    if not spec.image:
        expected = "required, because the launcher does not run in a pod with an image"
        yield Problem("image", "missing", expected)
    if options.min_replicas > options.max_replicas:
        expected = f"must be at most max_replicas, {options.max_replicas}"
        yield Problem("min_replicas", got(options.min_replicas), expected)
    total = options.max_replicas * spec.processes
    if total > batch:
        count = f"got {options.max_replicas} with {spec.processes} processes each: {total}"
        yield Problem("max_replicas", count, f"must be at most train.batch_size, {batch}")


def _check_devices(spec: JobSpec) -> Iterator[Problem]:
    options, device = spec.options, spec.config.device
    if device == "mps":
        yield Problem("device", "got mps, which pods do not have", "must be cpu, cuda or auto")
    if device.startswith("cuda") and not options.gpu:
        yield Problem("gpu", f"got 0 with device {device}", hint="set gpu, or device cpu")
    if options.gpu and device == "cpu":
        count = f"got {options.gpu} with device cpu, which does not use them"
        yield Problem("gpu", count, hint="set device auto")
    if options.gpu and ":" in device:
        expected = "must be cuda, because each process has its own GPU"
        yield Problem("device", f"got {device}", expected)
    if options.gpu and spec.processes != options.gpu:
        expected = "must be equal, because NCCL requires one GPU per process"
        yield Problem("processes", f"got {spec.processes} with gpu {options.gpu}", expected)


def _check_sizes(spec: JobSpec) -> Iterator[Problem]:
    options = spec.options
    cpu, memory, shm = options.cpu_request, options.max_memory, options.max_shm
    if amount(cpu) > amount(options.max_cpu):
        yield Problem("cpu", f"got {cpu}", f"must be at most cpu_limit, {options.max_cpu}")
    if not amount(cpu):
        yield Problem("cpu", f"got {cpu}", "must be more than 0")
    if amount(memory) < 2**26:
        yield Problem("memory", f"got {memory}", "must be at least 64Mi", "is the unit missing?")
    if amount(shm) >= amount(memory):
        expected = f"must be less than memory, {memory}, which includes it"
        yield Problem("shm", f"got {shm}", expected)
    if (size := len(spec.params.encode())) > _MAX_PARAMS:
        expected = f"must be at most {_MAX_PARAMS // 1024} KiB, to fit in an annotation"
        yield Problem("params", f"got {size / 1024:.0f} KiB", expected)


def _check_times(spec: JobSpec) -> Iterator[Problem]:
    options = spec.options
    if options.grace_seconds <= options.shutdown_seconds:
        expected = f"must be more than shutdown_seconds, {options.shutdown_seconds}"
        hint = "otherwise pods are killed while they save"
        yield Problem("grace_seconds", got(options.grace_seconds), expected, hint)
    if options.deadline_seconds <= options.grace_seconds:
        expected = f"must be more than grace_seconds, {options.grace_seconds}"
        yield Problem("deadline_seconds", got(options.deadline_seconds), expected)


def _check_paths(spec: JobSpec) -> Iterator[Problem]:
    """Training must write to storage that all workers, and their replacements, can reach."""
    options, config = spec.options, spec.config
    paths = [claim.path for claim in options.volumes]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        yield Problem("volumes", f"{path} is mounted twice")
    for path in paths:
        if any(_is_below(path, at) or _is_below(at, path) for at in _RESERVED):
            yield Problem("volumes", f"got {path}", f"the job itself mounts {', '.join(_RESERVED)}")
    writable = [claim.path for claim in options.volumes if not claim.read_only]
    if "://" not in config.workspace and not _is_below(config.workspace, *writable):
        mounted = ", ".join(writable) or "none"
        lost = f"{config.workspace} is not on a writable volume of the workers (volumes: {mounted})"
        yield Problem("workspace", lost, hint="add one, or use s3://bucket/prefix")
    store = config.tracking.uri.removeprefix("sqlite:///")
    if store != config.tracking.uri and not _is_below(store, *writable):
        lost = f"{config.tracking.uri} would be lost with the pod"
        hint = 'set the http:// address of an MLflow server, or "" for none'
        yield Problem("tracking.uri", lost, hint=hint)
    events = config.tracking.tensorboard
    if events and not _is_below(events, *writable):
        hint = "use a folder on a writable volume, or null for none"
        yield Problem("tracking.tensorboard", f"{events} would be lost with the pod", hint=hint)


def _check_secrets(spec: JobSpec) -> Iterator[Problem]:
    """Everyone who may list jobs can read everything in them."""
    options = spec.options
    visible = {"env": options.env, "annotations": options.annotations}
    for key, text in flatten({**spec.config.dump(), **visible}).items():
        if (safe := masked(text)) != text:
            yield Problem(key, f"{safe} contains a password or token", hint="put it into a Secret")
    for name in sorted(options.env):
        if _SECRET.search(name):
            hint = "put it into a Secret and list that in secrets"
            yield Problem("env", f"{name} looks like a secret", hint=hint)
    for name in sorted(set(options.secrets) & set(options.optional_secrets)):
        hint = "remove it from one of them"
        yield Problem("secrets", f"{name} is also in optional_secrets", hint=hint)


def _is_below(path: str, *folders: str) -> bool:
    """Return whether `path` is one of `folders`, or inside one."""
    given = PurePosixPath(path)
    return any(given == PurePosixPath(f) or PurePosixPath(f) in given.parents for f in folders)
