"""Read a config of diffusers field by field: each one is carried over, or refused by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fields:
    """The fields that a class of diffusers may have in its config.

    `classes` are the names of the classes. `carried` has the fields that mean something to us, with
    the value of a file without them. `fixed` has the values that a field may have, the first of
    which is diffusers' default. `ignored` are fields without an effect on what is imported.
    """

    classes: Collection[str]
    carried: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]]
    ignored: Collection[str]

    def read(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the carried fields, defaults filled in, and the mistakes of all others.

        An unknown field may only be null: what a newer version means by another value cannot be
        known here. Names that begin with an underscore describe the file.
        """
        kind = given.get("_class_name", next(iter(self.classes)))
        if kind not in self.classes:
            return {}, [f"_class_name is {kind!r:.80}; it must be {' or '.join(self.classes)}"]
        mistakes = []
        for name, value in sorted(given.items()):
            if name in self.fixed and value not in self.fixed[name]:
                allowed = " or ".join(map(repr, self.fixed[name]))
                mistakes.append(f"{name} is {value!r:.80}; only {allowed} can be imported")
            elif value is not None and not name.startswith("_") and name not in self.names:
                mistakes.append(f"{name:.80} is {value!r:.80}; this field is unknown here")
        return {name: given.get(name, default) for name, default in self.carried.items()}, mistakes

    @property
    def names(self) -> set[str]:
        return {*self.carried, *self.fixed, *self.ignored}

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of each fixed field."""
        return {name: values[0] for name, values in self.fixed.items()}
