"""Many things of one kind, kept as a dataclass of arrays: row ``i`` of every array is of thing ``i``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self


class Columns:
    """Base of such dataclasses. A field holds an array, other columns, or something that all rows share."""

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def take(self, rows: Any) -> Self:
        """The things at ``rows``, any NumPy index; copies, unless it is a slice."""
        found = {}
        for name, value in vars(self).items():
            found[name] = taken(value, rows)
        return type(self)(**found)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """All things of ``parts``, in their order; what rows share is the first part's."""
        found = {}
        for name in vars(parts[0]):
            found[name] = _joined([getattr(part, name) for part in parts])
        return cls(**found)


def taken(value: Any, rows: Any) -> Any:
    """The part of a field at ``rows``; what all rows share stays as it is."""
    if isinstance(value, Columns):
        return value.take(rows)
    if hasattr(value, "dtype"):
        return value[rows]
    return value


def _joined(values: Sequence[Any]) -> Any:
    import numpy as np  # here: the launcher checks a cluster without waiting for numpy

    first = values[0]
    if isinstance(first, Columns):
        return type(first).join(values)
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    return first


def as_columns(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """The columns of rows of numbers, as arrays."""
    import numpy as np

    return [np.array(column) for column in zip(*rows, strict=True)]
