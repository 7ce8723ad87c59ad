"""Real text as bytes: the sources of the Python standard library, which every machine has."""

import sysconfig
from pathlib import Path

import torch

#: Tokens, and the token that follows each: int64 [rows, seq] both.
Batch = tuple[torch.Tensor, torch.Tensor]
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
        size = len(raw)
        if size < 20 * HELD_OUT * seq:
            found = f"the standard library's {size} bytes"
            raise ValueError(f"{found} are too few for sequences of {seq}: lower --seq")
        copied = bytearray(raw)
        whole = torch.frombuffer(copied, dtype=torch.uint8)
        end = size - size // HELD_OUT
        self.text = whole[:end]
        self.held_out = whole[end:]

    def batch(self, start: int, stop: int, *, step: int, seed: int) -> Batch:
        """Rows ``start .. stop`` of step ``step``'s global batch: tokens and targets, int64 [stop - start, seq].

        A row depends on ``seed``, ``step`` and its number only: N ranks with b rows each read together what one
        process with N * b rows reads.
        """
        draw = torch.Generator()
        draw.manual_seed(seed * 1_000_003 + step)
        last = self._last_start(self.text)
        starts = torch.randint(last, (stop,), generator=draw)
        mine = starts[start:].tolist()
        return self._rows(self.text, mine)

    def unseen(self, start: int, stop: int) -> Batch:
        """Rows ``start .. stop`` of the text that is held out, the same in every run."""
        last = self._last_start(self.held_out)
        length = self.seq + 1
        starts = [row * length % last for row in range(start, stop)]
        return self._rows(self.held_out, starts)

    def _last_start(self, text: torch.Tensor) -> int:
        """A row of ``text`` begins before this byte: its tokens and targets are all there then."""
        return len(text) - self.seq - 1

    def _rows(self, text: torch.Tensor, starts: list[int]) -> Batch:
        """Rows of ``text`` that begin at the bytes ``starts``."""
        rows = []
        length = self.seq + 1
        for start in starts:
            stop = start + length
            row = text[start:stop]
            rows.append(row)
        read = torch.stack(rows).long()
        tokens = read[:, :-1]
        targets = read[:, 1:]
        return tokens, targets
