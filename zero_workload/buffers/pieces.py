"""A flat tensor of which each rank has some runs of elements, for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Pieces(torch.Tensor):
    """What this rank has of one flat tensor [numel]: start -> elements, by DCP's protocol for sharded tensors."""

    parts: dict[int, torch.Tensor]

    @staticmethod
    def of(numel: int) -> Pieces:
        """A tensor of that size without memory behind it."""
        element = torch.empty(1)
        every = element.expand(numel)
        pieces = torch.Tensor._make_subclass(Pieces, every)
        pieces.parts = {}
        return pieces

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunks = []
        for start, part in self.parts.items():
            place = torch.Size([start])
            chunk = ChunkStorageMetadata(place, part.shape)
            chunks.append(chunk)
        return chunks

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        items = []
        whole = self.size()
        chunks = self.__create_chunk_list__()
        parts = self.parts.values()
        for chunk, part in zip(chunks, parts, strict=True):
            kind = TensorProperties.create_from_tensor(part)
            data = TensorWriteData(chunk, kind, whole)
            index = MetadataIndex(fqn, chunk.offsets)
            item = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
            items.append(item)
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        offset = index.offset
        assert offset is not None
        return self.parts[offset[0]]
