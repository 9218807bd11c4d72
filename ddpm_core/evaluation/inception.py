"""The standard Inception network of FID, from a weights file that the user has.

torch-fidelity builds the network and its exact preprocessing. Its own loader would unpickle the
file with any code in it. Here a .pth file goes through PyTorch's restricted unpickler, which builds
tensors and refuses everything else; a .safetensors file has no pickle in it.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from ddpm_core.errors import Corrupt, UserError, require
from ddpm_core.evaluation.features import Extractor
from ddpm_core.storage import sha256_of
from ddpm_core.storage.files import read_tensors

# weights-inception-2015-12-05-6726825d.pth of torch-fidelity, the same file as pytorch-fid's.
STANDARD = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
LAYERS = ["2048", "logits_unbiased"]


def open_inception(weights: Path, device: torch.device) -> Extractor:
    """An extractor of 2,048 features and 1,008 logits. Raises UserError for an unfit file.

    Only the standard file's scores are called FID; any other's are named `fd_inception`.
    """
    checksum = sha256_of(weights)
    network = _network(_read(weights), weights).to(device)

    def run(pixels: Tensor) -> tuple[Tensor, Tensor]:
        x = pixels.permute(0, 3, 1, 2).expand(-1, 3, -1, -1).to(device)
        with torch.no_grad():
            features, logits = network(x)
        return features.cpu(), logits.cpu()

    return Extractor(
        name="inception",
        space="" if checksum == STANDARD else "inception",
        fingerprint=checksum[:16],
        run=run,
        facts={"weights": weights.name, "sha256": checksum, "standard": checksum == STANDARD},
    )


def _read(path: Path) -> dict[str, Tensor]:
    """Return the state dict of a .safetensors or .pth file. Raises UserError.

    A .pth file is the one pickle that this program reads, with `weights_only=True`.
    """
    try:
        if path.suffix == ".safetensors":
            return read_tensors(path)
        _refuse_packed(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it finds, which is told below
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (Corrupt, OSError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from error
    except Exception as error:
        # torch has many ways to fail, and advises to read the file in a way that runs its code.
        told = "it is damaged, or holds more than tensors: fetch torch-fidelity's file anew"
        raise _unreadable(path, told) from error
    if not isinstance(state, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()
    ):
        raise UserError(f"evaluate.inception_weights: {path} is not a state dict of tensors.")
    return state


def _refuse_packed(path: Path) -> None:
    """Raise Corrupt where a zip claims more content than it has bytes; torch.save packs nothing.

    PyTorch unpacks what is packed, and allocates whatever the entries claim.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        claimed = sum(member.file_size for member in archive.infolist())
    if claimed > (size := path.stat().st_size):
        raise Corrupt(f"it has {size:,} bytes and would unpack to {claimed:,}")


def _unreadable(path: Path, reason: str) -> UserError:
    return UserError(
        f"evaluate.inception_weights: {path} cannot be read as a file of weights: "
        f"{reason.rstrip('.')}."
    )


def _network(state: dict[str, Tensor], path: Path) -> nn.Module:
    """The network with these weights, made without a random draw.

    Its constructor insists on a file: it gets one of shapes without content, on the meta device.
    """
    module = require("torch_fidelity.feature_extractor_inceptionv3", "eval")
    hollow = {name: value.to("meta") for name, value in state.items()}
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # copying into meta tensors does nothing, and says so
            network: nn.Module = module.FeatureExtractorInceptionV3(
                "inception", LAYERS, feature_extractor_weights_path=_stream(hollow)
            )
        network.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise UserError(
            f"evaluate.inception_weights: {path} is not of torch-fidelity's Inception: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
    return network.float().requires_grad_(False).eval()


def _stream(state: dict[str, Tensor]) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return stream
