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
        return type(self)(**{name: taken(value, rows) for name, value in vars(self).items()})

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """All things of ``parts``, in their order; what rows share is the first part's."""
        columns = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
        return cls(**{name: _joined(values) for name, values in columns.items()})


def taken(value: Any, rows: Any) -> Any:
    """The part of a field at ``rows``; what all rows share stays as it is."""
    if isinstance(value, Columns):
        return value.take(rows)
    return value[rows] if hasattr(value, "dtype") else value


def _joined(values: Sequence[Any]) -> Any:
    import numpy as np  # here: the launcher checks a cluster without waiting for numpy

    if isinstance(values[0], Columns):
        return type(values[0]).join(values)
    return np.concatenate(values) if isinstance(values[0], np.ndarray) else values[0]


def as_columns(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """The columns of rows of numbers, as arrays."""
    import numpy as np

    return [np.array(column) for column in zip(*rows, strict=True)]
