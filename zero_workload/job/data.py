"""Real text as bytes: by default the sources of the Python standard library, which every machine has."""

import sysconfig
from pathlib import Path

import torch

VALIDATION_SHARE = 0.05


class Corpus:
    """A text as bytes, its last 5 % held out for validation.

    Args:
        path: any UTF-8 text; ``None`` takes the standard library's modules in alphabetical order.
        seq: bytes in a sequence.

    Raises:
        ValueError: the file is missing, empty, not text, or shorter than a few sequences.
    """

    def __init__(self, path: Path | None, seq: int) -> None:
        self.seq = seq
        library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        raw = _read(path) if path else b"\n".join(module.read_bytes() for module in library)
        split = int(len(raw) * (1 - VALIDATION_SHARE))
        if min(split, len(raw) - split) < seq + 2:
            name = path or "the standard library"
            raise ValueError(f"{name}: {len(raw)} bytes are too few for sequences of {seq}: use a longer text")
        text = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self.train, self.validation = text[:split], text[split:]

    def batch(self, start: int, stop: int, *, step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``start .. stop`` of step ``step``'s global batch: tokens and targets, int64 [stop - start, seq].

        A row depends on ``seed``, ``step`` and its number only: N ranks with b rows each read together what one
        process with N * b rows reads.
        """
        return self._rows(self.train, start, stop, seed=seed * 1_000_003 + step)

    def held_out(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``rows`` fixed sequences of the validation part, as ``batch``."""
        return self._rows(self.validation, 0, rows, seed=0)

    def _rows(self, text: torch.Tensor, start: int, stop: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        at = torch.randint(len(text) - self.seq - 1, (stop,), generator=draw)[start:]
        rows = torch.stack([text[i : i + self.seq + 1] for i in at.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]


def _read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        raw.decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): give a text file") from error
    if not raw or b"\0" in raw:
        raise ValueError(f"{path} {'holds zero bytes' if raw else 'is empty'}: give a text file")
    return raw
