"""A small workspace with every kind of file that may come from an untrusted source."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from ddpm_core.checkpoint import Checkpoint, open_checkpoint
from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.data.prepare import prepare
from ddpm_core.evaluation import in_domain, reference
from ddpm_core.evaluation.features import PixelPCA
from ddpm_core.evaluation.freshness import stale as scores_stale
from ddpm_core.interop import tensors, unet2d
from ddpm_core.interop.diffusers import WEIGHTS, import_folder
from ddpm_core.models.unet import UNet
from ddpm_core.registry.freshness import best_row
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling import gather, plan
from ddpm_core.sampling.run import sample
from ddpm_core.sampling.shards import ShardStore
from ddpm_core.scores import Row
from ddpm_core.storage import Tagged
from ddpm_core.storage.lease import LEASE, read
from ddpm_core.storage.workspace import LOG, RESULTS, Workspace, samples_key, snapshot_key
from ddpm_core.tracking.rows import read_rows
from ddpm_core.tracking.tracker import Log
from ddpm_core.training import identity, resume, snapshot
from ddpm_core.training.init import initial_weights, network_config
from ddpm_core.training.optim import Execution
from ddpm_core.training.state import TrainState, to_contents
from support.images import config as image_config
from support.images import write_classes

STEP = 4
CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


@dataclass
class Target:
    """Files, the function that reads them, and their folder if it has a manifest."""

    name: str
    files: list[Path]
    read: Callable[[], None]
    sealed: Path | None = None
    content: dict[Path, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.content = {path: path.read_bytes() for path in self.files}


class Strangers:
    """The workspace, and a target for each kind of file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        source = write_classes(root / "images", ["a", "b"], each=5)
        given = image_config(source, image_size=4, holdout=0.3, channels=1).prepare
        self.config = params.validate(
            {
                "device": "cpu",
                "workspace": str(root / "run"),
                "prepare": given.model_dump(mode="json"),
                "model": {
                    "channels": 4,
                    "multipliers": [1],
                    "attention": [],
                    "conditioning": "class",
                },
                "diffusion": {"timesteps": 50},
                "train": {"ema": [0.9], "steps": STEP, "batch_size": 2, "snapshot_every": STEP},
                "sample": {
                    "count": 7,
                    "batch_size": 3,
                    "steps": 2,
                    "shards": 2,
                    "precision": "fp32",
                },
                "tracking": {"uri": ""},
            }
        )
        self.workspace = Workspace.open(self.config.workspace)
        prepare(self.config, self.workspace)
        self.train = open_dataset(self.workspace)
        self.held = open_dataset(self.workspace, "holdout")
        self.state = new_state(self.config, self.train)
        settings = resume.checkpoint_settings(self.config, self.train)
        snapshot.write(self.workspace, STEP, to_contents(self.state, settings))
        sample(self.config, self.workspace, ALONE)
        targets = [
            self._snapshot(),
            self._data(),
            self._samples(),
            self._reference(),
            self._neighbours(),
            self._extractor(),
            self._diffusers(),
            self._documents(),
            self._chunk(),
        ]
        self.targets = {target.name: target for target in targets}

    def _snapshot(self) -> Target:
        folder = self.workspace.path(snapshot_key(STEP))

        def read() -> None:
            checkpoint = open_checkpoint(self.workspace, STEP)
            assert isinstance(checkpoint, Checkpoint) and isinstance(checkpoint.params, Config)
            model = checkpoint.load("auto", CPU)
            assert all(weight.dtype == torch.float32 for weight in model.parameters())
            resume.restore(self.state, snapshot.read(folder), "it")
            assert identity.stale(self.config, self.workspace) is not False

        return Target("snapshot", files(folder), read, folder)

    def _data(self) -> Target:
        folder = self.workspace.path("data")

        def read() -> None:
            for split in ("train", "holdout"):
                data = open_dataset(self.workspace, split)  # type: ignore[arg-type]
                assert data.images[:].dtype == np.uint8 and len(data.labels) == len(data)
                assert data.take(np.arange(min(2, len(data)))).shape[1:] == data.images.shape[1:]
                assert sum(data.class_counts) == len(data)

        return Target("data", [p for p in files(folder) if p.suffix in (".json", ".npy")], read)

    def _samples(self) -> Target:
        folder = self.workspace.path(samples_key(STEP))
        recipe = plan.make_recipe(self.config, open_checkpoint(self.workspace, STEP), "fp32")
        shards = plan.shards(self.config.sample)

        def read() -> None:
            assert gather.complete(self.workspace, recipe, thorough=True) in (True, False)
            assert isinstance(gather.waiting(self.workspace, recipe, shards), str)
            samples = gather.open_samples(self.workspace, STEP)
            assert samples.images.dtype == np.uint8 and len(samples) == samples.manifest.count
            assert samples.labels is None or len(samples.labels) == len(samples)

        return Target("samples", [p for p in files(folder) if p.suffix != ".png"], read, folder)

    def _reference(self) -> Target:
        space = PixelPCA.fit(torch.from_numpy(self.train.images[:])).extractor()
        reference.open_reference(self.workspace, space, self.train, self.held)
        [folder] = self.workspace.path(reference.FOLDER).glob(f"{space.name}-*")

        def read() -> None:
            found = reference.load_reference(folder, space)
            assert found.train.kept.dim() == 2 and found.train.moments is not None

        return Target("reference", files(folder), read, folder)

    def _neighbours(self) -> Target:
        reference.open_neighbours(self.workspace, self.train, self.held, CPU)
        [folder] = self.workspace.path(reference.FOLDER).glob("neighbours-*")

        def read() -> None:
            found = reference.load_neighbours(folder, len(self.held), len(self.train))
            assert len(self.train.take(found.index)) == len(found.distance)

        return Target("neighbours", files(folder), read, folder)

    def _extractor(self) -> Target:
        network = in_domain.Network(1, 4, 2)
        for weight in network.state_dict().values():
            weight.zero_()
        facts = in_domain.Facts(channels=1, image_size=4, outputs=2, task="classes", accuracy=0.5)
        with self.workspace.storage.new_folder("extractor") as folder:
            in_domain.save_extractor(in_domain.InDomain(network, facts), folder)
        folder = self.workspace.path("extractor")

        def read() -> None:
            assert isinstance(in_domain.load_extractor(folder)[0], in_domain.InDomain)

        # No reader uses its manifest: the facts contain the checksum of the weights.
        return Target("extractor", [p for p in files(folder) if "manifest" not in p.name], read)

    def _diffusers(self) -> Target:
        folder, model = self.root / "diffusers", self.state.model
        described = unet2d.from_unet(model)
        scheduler = {"num_train_timesteps": 50, "beta_schedule": "squaredcos_cap_v2"}
        for name, document in (
            ("unet/config", described),
            ("scheduler/scheduler_config", scheduler),
        ):
            path = folder / f"{name}.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(document))
        save_file(tensors.from_weights(model), folder / "unet" / WEIGHTS, {"null_class": "2"})

        return Target("diffusers", files(folder), lambda: import_folder(folder))

    def _documents(self) -> Target:
        evidence = {"count": 7, "data": "d", "extractor_fingerprint": "e", "sampler": {}}
        row = {
            "step": STEP,
            "score_name": "fd",
            "score": 1.5,
            "evidence": evidence | {"weights": "w"},
        }
        problem = {"step": 8, "score_name": None, "score": None, "problem": "none"}
        self.workspace.write_json(
            RESULTS,
            {
                "rows": [Row.model_validate(row).with_checksum().plain(), problem],
                "best": {"step": STEP, "score": 1.5},
                "extractor": {"fingerprint": "e", "space": "s", "accuracy": None},
                "settings": {},
            },
        )
        self.workspace.write_json(LEASE, {"id": "a", "fence": 3, "renewed": 1.5, "pid": 1})
        rows = [{"step": step, "loss": 0.5, "time": 1e9} for step in (1, 2, 3)]
        log = "".join(json.dumps(row) + "\n" for row in rows)
        self.workspace.storage.write(LOG, log.encode())
        paths = [self.workspace.path(key) for key in (RESULTS, LEASE, LOG)]

        def read_all() -> None:
            assert all(type(row["step"]) is int for row in read_rows(paths[2]))
            assert all(type(row.step) is int for row in Log(paths[2]).peek()[0])
            if paths[1].is_file():
                owner = read(Tagged(paths[1].read_bytes(), "", 0.0))
                assert type(owner.fence) is int
            assert isinstance(scores_stale(self.config, self.workspace), str)
            assert isinstance(best_row(self.workspace).step, int)
            assert isinstance(plan.best_step(self.config, self.workspace), int)

        return Target("documents", paths, read_all)

    def _chunk(self) -> Target:
        recipe = plan.make_recipe(self.config, open_checkpoint(self.workspace, STEP), "fp32")
        recipe = recipe.model_copy(update={"samples_fingerprint": "0" * 16})
        parts, images = ShardStore(self.workspace, recipe), np.zeros((3, 4, 4, 1), np.uint8)
        parts.write_chunk(0, images)
        [path] = self.workspace.path(samples_key(STEP)).glob("parts-*/chunk-*")

        def read() -> None:
            found = parts.chunk(0, 3)
            assert found is None or np.array_equal(found, images)

        return Target("chunk", [path], read)


def new_state(config: Config, data: PackedDataset) -> TrainState:
    """Return a state after steps with zero gradients."""
    model = UNet(network_config(config, data))
    initial_weights(model, config)
    state = TrainState.create(config, ALONE, Execution("fp32", False), model)
    for weight in state.model.parameters():
        weight.grad = torch.zeros_like(weight)
    state.optimizer.step()
    state.step = STEP
    return state


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
