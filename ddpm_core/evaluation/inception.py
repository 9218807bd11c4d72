"""The standard Inception network of FID, from a weights file of the user.

torch-fidelity builds the network and its exact preprocessing. Its own loader unpickles the file,
which can run any code in it. Here PyTorch's restricted unpickler reads a .pth file: it builds
tensors and refuses everything else. A .safetensors file contains no pickle.
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

# weights-inception-2015-12-05-6726825d.pth of torch-fidelity, which is also pytorch-fid's file.
STANDARD = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
LAYERS = ["2048", "logits_unbiased"]


def open_inception(weights: Path, device: torch.device) -> Extractor:
    """Return an extractor with 2,048 features and 1,008 logits.

    Only scores of the standard file are called FID. With any other file they are `fd_inception`.

    Raises:
        UserError: the file cannot be read, or is not a state dict of torch-fidelity's Inception.
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
    """Return the state dict in a .safetensors or .pth file. Raises UserError.

    A .pth file is the only pickle that this program reads, with `weights_only=True`.
    """
    try:
        if path.suffix == ".safetensors":
            return read_tensors(path)
        _refuse_compressed(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # problems become the error below
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (Corrupt, OSError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from error
    except Exception as error:
        # torch has many exception classes, and its messages advise reading the file unsafely.
        reason = "it is corrupt, or contains more than tensors"
        raise _unreadable(path, reason) from error
    if not isinstance(state, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()
    ):
        raise _unreadable(path, "it is not a state dict of tensors")
    return state


def _refuse_compressed(path: Path) -> None:
    """Raise Corrupt if a zip file claims more content than it has bytes.

    torch.save compresses nothing, but torch.load decompresses entries, and allocates whatever
    their headers claim.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        claimed = sum(member.file_size for member in archive.infolist())
    if claimed > (size := path.stat().st_size):
        raise Corrupt(f"it has {size:,} bytes and would unpack to {claimed:,}")


def _unreadable(path: Path, reason: str) -> UserError:
    return UserError(
        f"evaluate.inception_weights: {path} cannot be read as weights: {reason.rstrip('.')}. "
        "Fetch torch-fidelity's file again."
    )


def _network(state: dict[str, Tensor], path: Path) -> nn.Module:
    """Return the network with these weights, without drawing random numbers.

    The constructor requires a file, so it gets one with shapes but no content, on the meta device.
    """
    module = require("torch_fidelity.feature_extractor_inceptionv3", "eval")
    hollow = {name: value.to("meta") for name, value in state.items()}
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # copying into meta tensors does nothing and warns
            network: nn.Module = module.FeatureExtractorInceptionV3(
                "inception", LAYERS, feature_extractor_weights_path=_stream(hollow)
            )
        network.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise UserError(
            f"evaluate.inception_weights: {path} does not contain the weights of torch-fidelity's "
            f"Inception: {' '.join(str(error).split())[:200]}"
        ) from error
    return network.float().requires_grad_(False).eval()


def _stream(state: dict[str, Tensor]) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return stream
