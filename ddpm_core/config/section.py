"""What every section of params.yaml has in common, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# Every size has an upper bound, so that a slip such as 10^12 is a mistake with a message and not an
# attempt. Each bound is far beyond what anybody has: it stands in for no limit of memory or time.
Steps = Annotated[int, Field(gt=0, le=10**10)]
Images = Annotated[int, Field(gt=0, le=10**8)]
Batch = Annotated[int, Field(gt=0, le=10**6)]  # images that are in memory at once
Parts = Annotated[int, Field(gt=0, le=10**5)]  # shards, each with files and perhaps a pod
Processes = Annotated[int, Field(gt=0, le=10**4)]
Width = Annotated[int, Field(gt=0, le=2**14)]  # of a network
Depth = Annotated[int, Field(gt=0, le=2**10)]  # of a network, or a size in pixels
LEVELS = 16  # of a network; images of 1,024 pixels can be halved ten times
NAME = 255  # characters of a name in MLflow, whose databases have room for 256
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Auto = Literal["auto"]


def as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class Section(BaseModel):
    """Base of every section: unknown keys, wrong types and NaN are mistakes.

    The default of a new field is what was done before it: deciding.py says why, and where a field
    goes that only some methods use.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
