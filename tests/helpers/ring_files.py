"""Rings written by hand: files with the records that a test wants, whose process lives or not."""

import fcntl
import os
import struct

import numpy as np
from dynamiccl.envs.nccl.rings import _HEAD, _HEAD_AT, _HEAD_BYTES, _LIFE_AT, RING_MAGIC, RING_VERSION
from dynamiccl.traces.records import (
    COLL_DTYPE,
    FUNCS,
    KERNEL,
    KERNEL_DTYPE,
    RECORD_BYTES,
    STATE,
    STATE_DTYPE,
    STEP,
    STEP_DTYPE,
)

CAPACITY, KNOWN = 256, 16


class RingFile:
    """The ring of one process in a run folder; it holds the lock as a process does, until :meth:`die`."""

    def __init__(self, folder, rank, pid, moment=None):
        self.head, self.pid, self.life = 0, pid, int.from_bytes(os.urandom(8), "little")
        self.places = np.zeros(CAPACITY, COLL_DTYPE)
        self.fd = os.open(folder / f"ring-{rank}-{moment or pid}", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX)

    def put(self, *batches):
        none = np.zeros(0, COLL_DTYPE)
        for row in np.concatenate([none, *(batch.view(COLL_DTYPE) for batch in batches)]):
            at = self.head % CAPACITY
            self.places[at] = row
            self.head += 1
            self.places["stamp"][at] = self.head
        head = bytearray(_HEAD_BYTES)
        _HEAD.pack_into(head, 0, RING_MAGIC, RING_VERSION, RECORD_BYTES, CAPACITY, self.pid, KNOWN)
        struct.pack_into("<Q", head, _HEAD_AT, self.head)
        struct.pack_into("<Q", head, _LIFE_AT, self.life)
        os.pwrite(self.fd, bytes(head) + bytes(KNOWN * RECORD_BYTES) + self.places.tobytes(), 0)
        return self

    def die(self):
        os.close(self.fd)


def step(number, rank=0):
    row = np.zeros(1, STEP_DTYPE)
    row["kind"], row["rank"], row["step"] = STEP, rank, number
    row["duration_ns"], row["end_ns"] = 10_000_000, 10_000_000 * number
    return row


def state(code, why):
    row = np.zeros(1, STATE_DTYPE)
    row["kind"], row["code"], row["text"] = STATE, code, why.packed().encode() if why else b""
    return row


def kernel(rank, seq):
    row = np.zeros(1, KERNEL_DTYPE)
    row["kind"], row["comm_id"], row["rank"], row["seq"] = KERNEL, 7, rank, seq
    row["func"], row["start_ns"], row["end_ns"] = FUNCS.index("all_gather"), 1000 * seq, 1000 * seq + 500
    return row
