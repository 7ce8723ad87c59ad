"""Groups of several calls, sends and receives: what NCCL also does, and the emulated backend never asks for."""

import ctypes

from dynamiccl.envs.sim.emulated.nccl_caller import SHARDED
from dynamiccl.traces.records import FUNCS
from nccl_releases import Communicator

EVENT_P2P, EVENT_P2P_API = 4, 1024


class P2p(ctypes.Structure):
    """One send or receive as profilers hear of it."""

    _fields_ = (
        ("func", ctypes.c_char_p),
        ("buffer", ctypes.c_void_p),
        ("datatype", ctypes.c_char_p),
        ("count", ctypes.c_size_t),
        ("peer", ctypes.c_int),
        ("n_channels", ctypes.c_uint8),
        ("parent_group", ctypes.c_void_p),  # from v5 on
    )


class Groups(Communicator):
    """A communicator whose calls may come in groups."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._seq = dict.fromkeys(FUNCS, 0)

    def start_coll(self, func, seq, *how):
        self._seq[func] = seq + 1
        return super().start_coll(func, seq, *how)

    def group(self, calls, cost, captured=False):
        """One ncclGroupStart to ncclGroupEnd around ``calls``: asked with ``cost``, told, stopped; handles as told."""
        handles = self.begin([call.func for call in calls], captured)
        ordered = []
        for func in dict.fromkeys(call.func for call in calls):
            found = [(call, handle) for call, handle in zip(calls, handles, strict=True) if call.func == func]
            # Largest first from 2.29 on: calls up to four times as large as the first are priced together, so all are.
            found.sort(key=lambda one: self.n_bytes(one[0]), reverse=self.release >= (2, 29))
            sizes = [self.n_bytes(call) for call, _ in found]
            sums = []
            for n_bytes in sizes:
                if sums and n_bytes < 4 * sums[-1][0]:
                    sums[-1].append(n_bytes)
                else:
                    sums.append([n_bytes])
            self.ask_aside(func, sum(size // self.n_ranks if func in SHARDED else size for size in sizes))
            for together in sums:
                self.tuner.ask(func, sum(together), cost.copy())
            ordered += found
        told = [one for one in ordered if one[0].func != "broadcast" or self.release < (2, 29)]
        self.launch([call for call, _ in ordered], launches=bool(told))
        seen = []
        for call, handle in told:
            seen.append(self.tell(call, self._seq[call.func], 16, handle))
            self._seq[call.func] += 1
        self.end(seen)
        return seen

    def send_recv(self):
        """A send and a receive in one group."""
        calls = self.begin(["send", "recv"], kind=EVENT_P2P_API)
        self.end([], group=False)
        self.launch([])
        events = [self.profiler.event(EVENT_P2P, rank=self.rank) for _ in calls]
        for event, func, call in zip(events, (b"Send", b"Recv"), calls, strict=False):
            body = P2p(func, None, b"ncclInt8", 1, 1 - self.rank, 1, self.group_handle)
            ctypes.memmove(ctypes.addressof(event.body), ctypes.addressof(body), ctypes.sizeof(body))
            event.parent = self.group_handle if self.profiler.version == 4 else call
        self.end(
            [
                self.profiler.start(event)
                for event in events
                if self.profiler.version > 4 or self.group_handle is not None
            ]
        )
