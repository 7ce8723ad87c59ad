"""Rows of figures in a CSV file that grows while a long measurement goes on."""

import csv


def read(path):
    """Rows by column name, as text; none without the file."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def append(path, fields, rows):
    """Add rows; a new file begins with ``fields``."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([fields, *rows] if is_new else rows)
