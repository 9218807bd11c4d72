"""The base class of every section of params.yaml, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# Every size has an upper bound, so that a typo such as 10^12 is reported instead of tried. The
# bounds are far above what any machine can do, and do not replace limits of memory or time.
Steps = Annotated[int, Field(gt=0, le=10**10)]
Images = Annotated[int, Field(gt=0, le=10**8)]
Batch = Annotated[int, Field(gt=0, le=10**6)]  # images in memory at the same time
Parts = Annotated[int, Field(gt=0, le=10**5)]  # shards; each has files and perhaps a pod
Processes = Annotated[int, Field(gt=0, le=10**4)]
Width = Annotated[int, Field(gt=0, le=2**14)]  # of a network
Depth = Annotated[int, Field(gt=0, le=2**10)]  # of a network; also a size in pixels
LEVELS = 16  # of a network; images of 1,024 pixels can be halved 10 times
NAME = 255  # characters of a name in MLflow, whose databases store 256
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Auto = Literal["auto"]


def as_tuple(value: object) -> object:
    """Return a list as a tuple, which strict models require, and anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


class Section(BaseModel):
    """Base of every section. Unknown keys, wrong types, NaN and infinity are invalid.

    The default of a new field must be the behavior before the field existed. identity.py explains
    why, and lists the fields that only some methods use.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
