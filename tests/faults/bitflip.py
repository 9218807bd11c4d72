"""Flip one bit of one weight in a worker's memory while it trains, as a faulty device might.

Training runs unchanged; a thread beside it finds the tensor among the objects of the process.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np

TENSOR = "conv_in.weight"


def begin(rank: int, step: int, average: bool) -> None:
    """On `rank`, flip a bit of the weights, or of their average, after `step`."""
    if os.environ["RANK"] == str(rank):
        threading.Thread(target=_flip, args=(step, average), daemon=True).start()


def _flip(step: int, average: bool) -> None:
    from ddpm_core.training.state import TrainState

    log = Path("workspace/log.jsonl")
    while not log.exists() or f'"step": {step},' not in log.read_text():
        time.sleep(0.001)
    (state,) = [thing for thing in gc.get_objects() if type(thing) is TrainState]
    tensors = state.emas[0].tensors if average else state.model.state_dict()
    # Write through NumPy: autograd would refuse a tensor that PyTorch saw change within a step.
    bits = tensors[TENSOR].detach().numpy().view(np.int32)
    bits[(0,) * bits.ndim] ^= 1 << 22  # the highest bit of the mantissa
