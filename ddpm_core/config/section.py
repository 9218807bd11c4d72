"""What every section of params.yaml has in common, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
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
