"""Real text as bytes: the sources of the Python standard library, which every machine has."""

import sysconfig
from pathlib import Path

import torch


class Corpus:
    """The standard library's modules in alphabetical order, as bytes, in sequences of ``seq``.

    Raises:
        ValueError: they are shorter than a few sequences.
    """

    def __init__(self, seq: int) -> None:
        self.seq = seq
        library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        raw = b"\n".join(module.read_bytes() for module in library)
        if len(raw) < 20 * seq:
            raise ValueError(
                f"the standard library's {len(raw)} bytes are too few for sequences of {seq}: lower --seq"
            )
        self.text = torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def batch(self, start: int, stop: int, *, step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``start .. stop`` of step ``step``'s global batch: tokens and targets, int64 [stop - start, seq].

        A row depends on ``seed``, ``step`` and its number only: N ranks with b rows each read together what one
        process with N * b rows reads.
        """
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        at = torch.randint(len(self.text) - self.seq - 1, (stop,), generator=draw)[start:]
        rows = torch.stack([self.text[i : i + self.seq + 1] for i in at.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]
