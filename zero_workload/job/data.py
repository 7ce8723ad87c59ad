"""Real text as bytes: the sources of the Python standard library, which every machine has."""

import sysconfig
from pathlib import Path

import torch

#: One byte in so many, the last, is never trained on.
HELD_OUT = 10


class Corpus:
    """The standard library's modules in alphabetical order, as bytes, in sequences of ``seq``.

    Raises:
        ValueError: they are shorter than a few sequences.
    """

    def __init__(self, seq: int) -> None:
        self.seq = seq
        folder = sysconfig.get_paths()["stdlib"]
        modules = sorted(Path(folder).glob("*.py"))
        sources = [module.read_bytes() for module in modules]
        raw = b"\n".join(sources)
        if len(raw) < 20 * HELD_OUT * seq:
            size = f"the standard library's {len(raw)} bytes"
            raise ValueError(f"{size} are too few for sequences of {seq}: lower --seq")
        copied = bytearray(raw)
        whole = torch.frombuffer(copied, dtype=torch.uint8)
        end = len(whole) - len(whole) // HELD_OUT
        self.text = whole[:end]
        self.held_out = whole[end:]

    def batch(self, start: int, stop: int, *, step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``start .. stop`` of step ``step``'s global batch: tokens and targets, int64 [stop - start, seq].

        A row depends on ``seed``, ``step`` and its number only: N ranks with b rows each read together what one
        process with N * b rows reads.
        """
        draw = torch.Generator()
        draw.manual_seed(seed * 1_000_003 + step)
        last = len(self.text) - self.seq - 1
        at = torch.randint(last, (stop,), generator=draw)
        mine = at[start:].tolist()
        return self._rows(self.text, mine)

    def unseen(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``start .. stop`` of the text that is held out, the same in every run."""
        last = len(self.held_out) - self.seq - 1
        length = self.seq + 1
        at = [row * length % last for row in range(start, stop)]
        return self._rows(self.held_out, at)

    def _rows(self, text: torch.Tensor, at: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.seq + 1
        rows = torch.stack([text[i : i + length] for i in at])
        tokens = rows.long()
        return tokens[:, :-1], tokens[:, 1:]
