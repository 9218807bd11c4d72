"""Choose where a run begins: at its newest complete snapshot, or with a new network."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from ddpm_core import __version__
from ddpm_core.checkpoint import MOMENTS, SETTINGS, Checkpoint, Settings, TrainingData
from ddpm_core.config import Config
from ddpm_core.console import say, warn
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.diffusion.moments import Moments
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.problems import problems_of
from ddpm_core.runtime.device import compiler_hint
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling.loading import read_moments
from ddpm_core.storage import Unreachable
from ddpm_core.storage.workspace import RUN, SNAPSHOTS, Workspace, snapshot_key
from ddpm_core.text import masked, throughout
from ddpm_core.training import snapshot
from ddpm_core.training.identity import identity, train_fingerprint
from ddpm_core.training.init import fresh_network, network_config
from ddpm_core.training.moments import run_moments
from ddpm_core.training.optim import Execution
from ddpm_core.training.snapshot import SnapshotContents
from ddpm_core.training.state import TrainState, from_contents
from ddpm_core.training.superseded import (
    OtherRun,
    discard,
    find_other_run,
    find_superseded,
    supersede,
    take_back,
)

MAX_CAPTIONS = 1000  # saved with a checkpoint, for sampling without the data
BALANCED = 10**6  # stands for 1 in counts of captions, which are integers


@dataclass(frozen=True)
class Policy:
    """`strict` refuses to move another run away; `from_step` is the snapshot to resume from."""

    strict: bool = False
    from_step: int | None = None


@dataclass(frozen=True)
class Start:
    """Where a run begins; the same on every worker except `other_run`."""

    settings: Settings  # written to every snapshot as config.json
    state: TrainState | None  # None: training is done
    step: int  # of the snapshot to resume from; 0: none
    source: str  # of the weights, for messages; "": drawn from the seed
    replaces: bool  # the workspace still contains a run with different settings
    other_run: OtherRun | None  # that run, on rank 0


def start(
    config: Config, workspace: Workspace, world: World, data: PackedDataset, policy: Policy
) -> Start:
    """Choose where to begin, and load or draw the weights.

    A run with different settings stays in the workspace for now, unless superseded/ contains one
    with these settings to replace it.
    """
    settings = checkpoint_settings(config, data)
    at, other_run, contents = 0, None, None
    if world.rank == 0:
        other_run = settle(workspace, settings.identity, policy)
        if other_run is None:
            at, contents = choose_snapshot(config, workspace, policy)
    at, replaces = world.broadcast(at), bool(world.broadcast(int(other_run is not None)))
    if at >= config.train.steps:
        say(f"train: up to date, at step {at} of {config.train.steps}.")
        return Start(settings, None, at, "", False, None)
    if at and contents is None:  # rank 0 has read them already
        contents = snapshot.read(workspace.path(snapshot_key(at)))
    earlier = contents.state.execution if contents else None
    execution = Execution.choose(config.train, world.device, earlier)
    if world.rank == 0 and (hint := compiler_hint(world.device, config.train.compile)):
        warn(hint)
    source = f"train.init {config.train.init}" if config.train.init else ""
    if contents is None:
        model, note = fresh_network(config, data)
        if note and world.rank == 0:
            say(note)
    else:
        model = resumed_network(config, data, contents)
    moments = resumed_moments(config, model.config, contents, world)
    if moments is None:
        moments = run_moments(config, data, world)
    # With the details of the snapshot or of train.init, which no setting names.
    settings = settings.model_copy(update={"network": asdict(model.config)})
    state = TrainState.create(config, world, execution, model, moments)
    if contents is not None:
        source = f"the snapshot of step {at}"
        restore(state, contents, f"The snapshot of step {at}")
        say(f"train: resuming from step {at} of {config.train.steps}.")
    return Start(settings, state, at, source, replaces, other_run)


def settle(workspace: Workspace, wanted: dict[str, Any], policy: Policy) -> OtherRun | None:
    """Bring the run with the wanted settings into the workspace, if it exists.

    Returns the run with different settings that the workspace still contains; None if there is
    none. Raises UserError if `policy` forbids moving that run away.
    """
    other_run = find_other_run(workspace, wanted)
    if other_run and (policy.strict or policy.from_step is not None):
        given = "--resume=strict" if policy.strict else f"--from-step {policy.from_step}"
        raise UserError(
            f"{workspace.uri} contains a run with different settings, which {given} does not "
            f"move away:\n{other_run.listed()}\nUse its settings, leave out {given}, or use "
            "another workspace (-w)."
        )
    if other_run and not _has_snapshots(workspace, wanted, other_run):
        return other_run
    replace(workspace, other_run, wanted)
    return None


def _has_snapshots(workspace: Workspace, wanted: dict[str, Any], other_run: OtherRun) -> bool:
    """Return whether a run with the wanted settings has snapshots, which proves that it can run."""
    if set(workspace.steps(SNAPSHOTS)) - set(other_run.steps):
        return True
    place = find_superseded(workspace, wanted)
    return place is not None and bool(workspace.storage.names(f"{place}/{SNAPSHOTS}"))


def replace(workspace: Workspace, other_run: OtherRun | None, wanted: dict[str, Any]) -> None:
    """Move a run with different settings away, and give the workspace to the wanted run."""
    if other_run:
        supersede(workspace, other_run)
    if place := find_superseded(workspace, wanted):
        take_back(workspace, place, wanted)
    if (run := workspace.read_json(RUN)).get("identity") != wanted:
        workspace.write_json(RUN, {**run, "identity": wanted})


def resumed_network(config: Config, data: PackedDataset, contents: SnapshotContents) -> UNet:
    """Return the network of a snapshot, without its weights. Raises Corrupt.

    Details that no setting names stay as they were when the run began, maybe with an earlier
    version of ddpm.
    """
    try:
        saved = UNetConfig.from_dict(contents.settings.network)
        return UNet(network_config(config, data).with_details(saved))
    except ValidationError as error:
        found = problems_of(error, UNetConfig)
        raise Corrupt(f"The network in {SETTINGS} of a snapshot is invalid:", found) from error


def resumed_moments(
    config: Config, network: UNetConfig, contents: SnapshotContents | None, world: World
) -> Moments | None:
    """Return the moments in a snapshot; None if there is no snapshot, or none are used.

    Raises Corrupt.
    """
    if contents is None or not config.measures_moments:
        return None
    return read_moments(contents.tensors.get(MOMENTS, {}), network, MOMENTS).to(world.device)


def restore(state: TrainState, contents: SnapshotContents, name: str) -> None:
    """Restore the state from a snapshot. Raises Corrupt if they do not match."""
    try:
        from_contents(state, contents)
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise Corrupt(f"{name} does not match its settings: {error!r:.300}.") from error


def checkpoint_settings(config: Config, data: PackedDataset) -> Settings:
    """Return the settings that the checkpoints of a run have in common; their step is 0."""
    captions: list[tuple[str, int]] = []
    if config.model.conditioning == "text":
        captions = caption_counts(data, config.train.balance)[:MAX_CAPTIONS]
    training_data = TrainingData(
        fingerprint=data.fingerprint,
        classes=data.classes,
        class_counts=data.class_counts,
        captions=captions,
        image_size=data.image_size,
        channels=data.manifest.channels,
        count=len(data),
        source=throughout(masked, data.source or {}),
        balance=config.train.balance,
    )
    return Settings(
        step=0,
        ddpm=__version__,
        params=config.record(),
        network=asdict(network_config(config, data)),
        data=training_data,
        train_fingerprint=train_fingerprint(config, data.fingerprint),
        identity=identity(config, data.fingerprint),
    )


def caption_counts(data: PackedDataset, balance: str = "none") -> list[tuple[str, int]]:
    """Return captions and how often they occur, the most frequent first.

    With `train.balance: classes`, all captions of a class together count BALANCED.
    """
    counts: dict[str, int] = {}
    weights = [max(1, BALANCED // max(1, n)) for n in data.class_counts]
    if data.captions is not None:
        for row, label in zip(data.captions, data.labels, strict=True):
            text = bytes(row).rstrip(b"\0").decode("utf-8", "replace")
            weight = weights[label] if balance == "classes" else 1
            counts[text] = counts.get(text, 0) + weight
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def choose_snapshot(
    config: Config, workspace: Workspace, policy: Policy
) -> tuple[int, SnapshotContents | None]:
    """Return the step to resume from and its snapshot; (0, None) to start from the beginning.

    Moves snapshots that are damaged or too late to superseded/. Raises UserError if `policy` names
    a step that has no complete snapshot.
    """
    picked = policy.from_step
    steps = workspace.steps(SNAPSHOTS)
    if picked is not None and picked not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise UserError(f"--from-step {picked}: there is no such snapshot. Snapshots: {listed}.")
    limit = config.train.steps if picked is None else picked
    at, contents, skipped = snapshot.newest_complete(workspace, limit, config.train.steps)
    for reason in skipped.values():
        warn(f"A snapshot was skipped: {reason}")
    if picked is not None and at != picked:
        raise UserError(
            f"--from-step {picked}: this snapshot is damaged, or it is an old milestone, which has "
            "no optimizer state to resume from. Use another step."
        )
    late = {step for step in steps if step > limit} | set(damaged(workspace, steps, at))
    late |= skipped.keys()
    if late:
        place = discard(workspace, sorted(late))
        say(f"Snapshots damaged or beyond step {limit} were moved to {place}: {sorted(late)}")
    if not at and (kept := sorted(set(steps) - late)):
        warn(f"The snapshots of steps {kept} have no optimizer state. Training starts from step 0.")
    return at, contents


def damaged(workspace: Workspace, steps: list[int], after: int) -> list[int]:
    """Return the steps beyond `after` whose files are damaged or missing."""
    broken = []
    for step in steps:
        if step > after:
            try:
                Checkpoint.open(workspace.path(snapshot_key(step)))
            except Unreachable:
                raise
            except (Corrupt, OSError):
                broken.append(step)
    return broken
