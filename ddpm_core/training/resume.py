"""Where a run begins: at its own newest whole snapshot, or at a fresh network."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ddpm_core import __version__, compiling
from ddpm_core.checkpoint import SETTINGS, Checkpoint
from ddpm_core.config import Config
from ddpm_core.console import say, warn
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.distributed import World
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.masking import masked, throughout
from ddpm_core.models.unet import UNet, UNetConfig
from ddpm_core.storage import Unreachable
from ddpm_core.training import snapshot
from ddpm_core.training.execution import Execution
from ddpm_core.training.freshness import Identified
from ddpm_core.training.identity import differences, identity, train_fingerprint
from ddpm_core.training.initial import fresh_network, network_config
from ddpm_core.training.snapshot import SnapshotContents
from ddpm_core.training.state import TrainState, from_contents
from ddpm_core.workspace import LOG, RUN, SNAPSHOTS, SUPERSEDED, Workspace, snapshot_key, step_name

MOST_CAPTIONS = 1000  # kept with a checkpoint, for sampling without the data


@dataclass(frozen=True)
class Policy:
    """`strict` refuses to set another run's snapshots aside; `from_step` picks where to go on."""

    strict: bool = False
    from_step: int | None = None


def start(
    config: Config, workspace: Workspace, world: World, data: PackedDataset, policy: Policy
) -> tuple[dict[str, Any], TrainState | None]:
    """The settings that go with every snapshot, and the state to go on from (None: all done)."""
    settings = settings_of(config, data)
    at, fresh = 0, None
    if world.rank == 0:
        if found := others(workspace, settings["identity"]):
            # What can't be made is refused before anything moves.
            fresh = fresh_network(config, data)
            set_aside(workspace, found, policy)
        if (run := workspace.read_json(RUN)).get("identity") != settings["identity"]:
            workspace.write_json(RUN, {**run, "identity": settings["identity"]})
        at = choose_step(config, workspace, policy)
    at = world.broadcast(at)
    if at >= config.train.steps:
        say(f"train: up to date, at step {at} of {config.train.steps}.")
        return settings, None
    contents = snapshot.read(workspace.path(snapshot_key(at))) if at else None
    earlier = contents.documents[snapshot.STATE]["execution"] if contents else None
    execution = Execution.choose(config.train, world.device, earlier)
    if world.rank == 0 and (lack := compiling.lacks(world.device, config.train.compile)):
        warn(lack)
    if contents is None:
        model, told = fresh or fresh_network(config, data)
        if told and world.rank == 0:
            say(told)
    else:
        model = continued_network(config, data, contents)
    settings["network"] = asdict(model.config)  # that of an earlier version, or of train.init
    state = TrainState.create(config, world, execution, model)
    if contents is not None:
        fit(state, contents, f"The snapshot of step {at}")
        say(f"train: going on from step {at} of {config.train.steps}.")
    return settings, state


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
            "source": throughout(masked, data.manifest.get("source", {})),
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


@dataclass(frozen=True)
class Others:
    """What a workspace holds of other settings or data: snapshots, and what differs."""

    steps: list[int]
    fields: list[str]


def others(workspace: Workspace, wanted: dict[str, Any]) -> Others | None:
    """What was made of something else than `wanted`, an identity; None: nothing.

    A run that ended before its first snapshot has left a log; run.json says of which settings.
    """
    found: dict[int, list[str]] = {}
    for at in workspace.steps(SNAPSHOTS):
        theirs = workspace.read_json(f"{snapshot_key(at)}/{SETTINGS}", Identified).get("identity")
        if theirs is not None and (fields := differences(theirs, wanted)):
            found[at] = fields
    if found:
        return Others(list(found), found[max(found)])
    begun = workspace.read_json(RUN).get("identity")
    if isinstance(begun, dict) and workspace.storage.exists(LOG):
        fields = differences(begun, wanted)
        return Others([], fields) if fields else None
    return None


def set_aside(workspace: Workspace, found: Others, policy: Policy) -> None:
    """Move it to superseded/, and tell what differs. Raises UserError where policy forbids it."""
    told = "\n".join(f"  {field}" for field in found.fields)
    if policy.strict or policy.from_step is not None:
        given = "--resume=strict" if policy.strict else f"--from-step {policy.from_step}"
        raise UserError(
            f"{workspace.uri} holds a run of other settings, and {given} was given:\n{told}"
        )
    place = move_aside(workspace, found.steps)
    if workspace.storage.exists(LOG):
        workspace.storage.move(LOG, f"{place}/{LOG}")
    workspace.storage.remove(RUN)
    warn(
        f"The run here is of other settings; it was moved to {place}, and training starts "
        f"afresh. What differs:\n{told}"
    )


def choose_step(config: Config, workspace: Workspace, policy: Policy) -> int:
    """The step to go on from, 0 for a fresh start; later snapshots are moved to superseded/."""
    picked = policy.from_step
    there = workspace.steps(SNAPSHOTS)
    if picked is not None and picked not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise UserError(f"--from-step {picked}: there is no such snapshot (there: {listed}).")
    limit = config.train.steps if picked is None else picked
    at, skipped = snapshot.newest_whole(workspace, limit, config.train.steps)
    for reason in skipped:
        warn(f"A snapshot was skipped: {reason}")
    if picked is not None and at != picked:
        raise UserError(
            f"--from-step {picked}: that snapshot is damaged, or a milestone kept as weights "
            "alone, from which training can't go on."
        )
    late = {step for step in there if step > limit} | set(damaged(workspace, there, at or 0))
    if late:
        place = move_aside(workspace, sorted(late))
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


def move_aside(workspace: Workspace, steps: list[int]) -> str:
    """Move snapshots to a new folder of superseded/; its key."""
    number = 1 + max(
        (int(n) for n in workspace.storage.names(SUPERSEDED) if n.isdigit()), default=0
    )
    place = f"{SUPERSEDED}/{number:03d}"
    for step in steps:
        workspace.storage.move(snapshot_key(step), f"{place}/{SNAPSHOTS}/{step_name(step)}")
    return place
