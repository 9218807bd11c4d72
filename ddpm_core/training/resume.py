"""Where a run begins: at its own newest whole snapshot, or at a fresh network."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ddpm_core import __version__
from ddpm_core.checkpoint import SETTINGS, Checkpoint
from ddpm_core.config import Config
from ddpm_core.console import say, warn
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.masking import masked, throughout
from ddpm_core.models.unet import UNet, UNetConfig
from ddpm_core.runtime import compiling
from ddpm_core.runtime.distributed import World
from ddpm_core.storage import Unreachable
from ddpm_core.storage.workspace import RUN, SNAPSHOTS, Workspace, snapshot_key
from ddpm_core.training import snapshot
from ddpm_core.training.identity import identity, train_fingerprint
from ddpm_core.training.init import fresh_network, network_config
from ddpm_core.training.optim import Execution
from ddpm_core.training.snapshot import SnapshotContents
from ddpm_core.training.state import TrainState, from_contents
from ddpm_core.training.superseded import (
    Others,
    discard,
    find_others,
    find_superseded,
    set_aside,
    take_back,
)

MOST_CAPTIONS = 1000  # kept with a checkpoint, for sampling without the data


@dataclass(frozen=True)
class Policy:
    """`strict` refuses to set another run's snapshots aside; `from_step` picks where to go on."""

    strict: bool = False
    from_step: int | None = None


@dataclass(frozen=True)
class Start:
    """Where a run begins, the same on every worker."""

    settings: dict[str, Any]  # go with every snapshot, as config.json
    state: TrainState | None  # None: all steps are done
    step: int  # of the snapshot that it resumes from; 0: none
    source: str  # of its weights, for messages; "": drawn from the seed
    replaces: bool  # whether the workspace still holds a run with different settings
    others: Others | None  # that run, on the first worker


def start(
    config: Config, workspace: Workspace, world: World, data: PackedDataset, policy: Policy
) -> Start:
    """Choose where to begin, and load or draw the weights.

    A run with different settings stays where it is, unless the workspace also has one with these
    settings, in superseded/, to take its place.
    """
    settings = settings_of(config, data)
    at, others, contents = 0, None, None
    if world.rank == 0:
        others = settle(workspace, settings["identity"], policy)
        if others is None:
            at = choose_step(config, workspace, policy)
    at, replaces = world.broadcast(at), bool(world.broadcast(int(others is not None)))
    if at >= config.train.steps:
        say(f"train: up to date, at step {at} of {config.train.steps}.")
        return Start(settings, None, at, "", False, None)
    contents = snapshot.read(workspace.path(snapshot_key(at))) if at else None
    earlier = contents.documents[snapshot.STATE]["execution"] if contents else None
    execution = Execution.choose(config.train, world.device, earlier)
    if world.rank == 0 and (lack := compiling.lacks(world.device, config.train.compile)):
        warn(lack)
    source = f"train.init {config.train.init}" if config.train.init else ""
    if contents is None:
        model, told = fresh_network(config, data)
        if told and world.rank == 0:
            say(told)
    else:
        model = continued_network(config, data, contents)
    settings["network"] = asdict(model.config)  # that of an earlier version, or of train.init
    state = TrainState.create(config, world, execution, model)
    if contents is not None:
        source = f"the snapshot of step {at}"
        fit(state, contents, f"The snapshot of step {at}")
        say(f"train: going on from step {at} of {config.train.steps}.")
    return Start(settings, state, at, source, replaces, others)


def settle(workspace: Workspace, wanted: dict[str, Any], policy: Policy) -> Others | None:
    """Make the run with these settings, if there is one, that of the workspace.

    Returns the run with different settings that is in its place; None: the workspace is this
    run's. Raises UserError where `policy` forbids to move that run away.
    """
    others = find_others(workspace, wanted)
    if others and (policy.strict or policy.from_step is not None):
        given = "--resume=strict" if policy.strict else f"--from-step {policy.from_step}"
        raise UserError(
            f"{workspace.uri} contains a run with different settings, which {given} does not "
            f"move away:\n{others.listed()}\nUse its settings, leave out {given}, or use another "
            "workspace (-w)."
        )
    if others and not _has_snapshots(workspace, wanted, others):
        return others
    replace(workspace, others, wanted)
    return None


def _has_snapshots(workspace: Workspace, wanted: dict[str, Any], others: Others) -> bool:
    """Whether a run with the wanted settings has proved already that it can run."""
    if set(workspace.steps(SNAPSHOTS)) - set(others.steps):
        return True
    place = find_superseded(workspace, wanted)
    return place is not None and bool(workspace.storage.names(f"{place}/{SNAPSHOTS}"))


def replace(workspace: Workspace, others: Others | None, wanted: dict[str, Any]) -> None:
    """Move a run with different settings away, and make the workspace that of the wanted run."""
    if others:
        set_aside(workspace, others)
    if place := find_superseded(workspace, wanted):
        take_back(workspace, place, wanted)
    if (run := workspace.read_json(RUN)).get("identity") != wanted:
        workspace.write_json(RUN, {**run, "identity": wanted})


def continued_network(config: Config, data: PackedDataset, contents: SnapshotContents) -> UNet:
    """Return the network of a snapshot, without its weights. Raises Corrupt.

    What the settings leave open is as it was when the run began, maybe with an earlier version.
    """
    try:
        there = UNetConfig.from_dict(contents.documents[SETTINGS]["network"])
        return UNet(network_config(config, data).with_details(there))
    except (TypeError, ValueError) as error:
        raise Corrupt(f"The network in the {SETTINGS} of a snapshot is damaged: {error}") from error


def fit(state: TrainState, contents: SnapshotContents, name: str) -> None:
    """Set the state to what a snapshot holds. Raises Corrupt where that is another's."""
    try:
        from_contents(state, contents)
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise Corrupt(f"{name} does not fit its settings: {error!r:.300}.") from error


def settings_of(config: Config, data: PackedDataset) -> dict[str, Any]:
    """What a checkpoint must know so that nobody needs the params file to use it."""
    captions: list[tuple[str, int]] = []
    if config.model.conditioning == "text":
        captions = caption_counts(data)[:MOST_CAPTIONS]
    return {
        "ddpm": __version__,
        "params": config.record(),
        "network": asdict(network_config(config, data)),
        "data": {
            "fingerprint": data.fingerprint,
            "classes": data.classes,
            "class_counts": data.class_counts,
            "captions": captions,
            "image_size": data.image_size,
            "channels": data.channels,
            "count": len(data),
            "source": throughout(masked, data.source or {}),
        },
        "train_fingerprint": train_fingerprint(config, data.fingerprint),
        "identity": identity(config, data.fingerprint),
    }


def caption_counts(data: PackedDataset) -> list[tuple[str, int]]:
    """Captions with how often they occur, the most frequent first."""
    counts: dict[str, int] = {}
    if data.captions is not None:
        for row in data.captions:
            text = bytes(row).rstrip(b"\0").decode("utf-8", "replace")
            counts[text] = counts.get(text, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def choose_step(config: Config, workspace: Workspace, policy: Policy) -> int:
    """The step to go on from, 0 for a fresh start; later snapshots are moved to superseded/."""
    picked = policy.from_step
    there = workspace.steps(SNAPSHOTS)
    if picked is not None and picked not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise UserError(f"--from-step {picked}: there is no such snapshot (there: {listed}).")
    limit = config.train.steps if picked is None else picked
    at, skipped = snapshot.newest_whole(workspace, limit, config.train.steps)
    for reason in skipped.values():
        warn(f"A snapshot was skipped: {reason}")
    if picked is not None and at != picked:
        raise UserError(
            f"--from-step {picked}: that snapshot is damaged, or a milestone kept as weights "
            "alone, from which training can't go on."
        )
    late = {step for step in there if step > limit} | set(damaged(workspace, there, at or 0))
    late |= skipped.keys()
    if late:
        place = discard(workspace, sorted(late))
        say(f"Snapshots that don't belong to what follows were moved to {place}: {sorted(late)}")
    if not at and (kept := sorted(set(there) - late)):
        warn(f"The snapshots here, {kept}, are weights alone: training starts from step 0 again.")
    return at or 0


def damaged(workspace: Workspace, steps: list[int], after: int) -> list[int]:
    """The steps beyond `after` whose files are not whole."""
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
