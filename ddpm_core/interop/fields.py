"""Read a config of diffusers field by field: each is used, ignored, or reported by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ddpm_core.errors import Problem, got


@dataclass(frozen=True)
class Fields:
    """The fields in the config of a class of diffusers.

    Attributes:
        classes: Names of the classes that have these fields.
        carried: The fields that are imported, with diffusers' defaults.
        fixed: The supported values of fields that ddpm cannot vary; diffusers' default is first.
        ignored: Fields without an effect on what is imported.
    """

    classes: Collection[str]
    carried: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]]
    ignored: Collection[str]

    def read(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        """Return the carried fields, completed by defaults, and the problems of all others.

        An unknown field must be null, because its meaning in a newer version of diffusers is
        unknown. Names that start with an underscore describe the file.
        """
        kind = given.get("_class_name", next(iter(self.classes)))
        if kind not in self.classes:
            expected = f"must be {' or '.join(self.classes)}"
            return {}, [Problem("_class_name", got(kind), expected)]
        problems = []
        for name, value in sorted(given.items()):
            if name in self.fixed and value not in self.fixed[name]:
                allowed = " or ".join(map(repr, self.fixed[name]))
                problems.append(Problem(name, got(value), f"must be {allowed}"))
            elif value is not None and not name.startswith("_") and name not in self.names:
                problems.append(Problem(f"{name:.80}", got(value), "this field is unknown to ddpm"))
        return {name: given.get(name, default) for name, default in self.carried.items()}, problems

    @property
    def names(self) -> set[str]:
        """All known fields."""
        return {*self.carried, *self.fixed, *self.ignored}

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of each fixed field."""
        return {name: values[0] for name, values in self.fixed.items()}
