"""Groups of several calls, sends and receives: what NCCL also does, and the emulated backend never asks for."""

import ctypes

from dynamiccl.envs.sim.emulated.nccl_caller import SHARDED
from dynamiccl.traces.records import FUNCS
from nccl_halves import EVENT_GROUP
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
        self.answers = []  # channels that questions about all-gathers and reduce-scatters were answered with

    def start_coll(self, func, seq, *how):
        self._seq[func] = seq + 1
        return super().start_coll(func, seq, *how)

    def group(self, calls, cost, captured=False, runs=True, moment=lambda: None, windows=(), sends=False):
        """One ncclGroupStart to ncclGroupEnd around ``calls``: asked with ``cost``, told, stopped; handles as told.

        Without ``runs`` it ends with ncclGroupSimulateEnd. ``moment()`` is called between questions and launch.
        ``windows``: further calls, on memory windows, about which NCCL does not ask and which it does not launch with
        the others. ``sends``: this rank also sends in the group.
        """
        made = [*calls, *windows]
        handles = self.begin([call.func for call in made], captured, counts=[call.count for call in made])
        if sends and self.profiler.version > 4:
            self.profiler.stop(
                self.profiler.start(self.profiler.event(EVENT_P2P_API, parent=self._group_api))
            )
        ordered = []
        for func in dict.fromkeys(call.func for call in calls):
            found = [
                (call, handle) for call, handle in zip(calls, handles, strict=False) if call.func == func
            ]
            # Largest first from 2.29 on: calls up to four times as large as the first are priced together, so all are.
            found.sort(key=lambda one: self.n_bytes(one[0]), reverse=self.release >= (2, 29))
            self._ask([self.n_bytes(call) for call, _ in found], func, cost)
            ordered += found
        if not runs:
            self.end([], group=False)
            return []
        moment()
        told = [one for one in ordered if one[0].func != "broadcast" or self.release < (2, 29)]
        self.launch([call for call, _ in ordered], launches=bool(told) or sends)
        seen = [self._tell_next(call, handle) for call, handle in told]
        self.end(seen)
        return seen

    def _ask(self, sizes, func, cost):
        if func == "broadcast" and len(sizes) > 1 and self.release >= (2, 29):
            # Taken for broadcasts from several ranks, which NCCL runs and prices as one all-gather.
            self.tuner.ask("all_gather", max(sizes), cost.copy())
            return
        sums = []
        for n_bytes in sizes:
            if sums and n_bytes < 4 * sums[-1][0]:
                sums[-1].append(n_bytes)
            else:
                sums.append([n_bytes])
        self.ask_aside(func, sum(size // self.n_ranks if func in SHARDED else size for size in sizes))
        for together in sums:
            answer = self.tuner.ask(func, sum(together), cost.copy())
            self.answers += [answer] * (func in SHARDED)

    def _tell_next(self, call, handle):
        self._seq[call.func] += 1
        return self.tell(call, self._seq[call.func] - 1, 16, handle)

    def captures(self, calls, cost):
        """The calls go into a CUDA graph: they are asked about and launched, and told of at replays alone."""
        self._graph = self.begin([call.func for call in calls], captured=True)
        self._ask([self.n_bytes(call) for call in calls], calls[0].func, cost)
        self.launch(calls, launches=self.profiler.version > 4)
        self.end([])

    def replays(self, calls):
        """The graph runs: the thread of CUDA's tells of its calls, of which NCCL keeps no count, whenever it comes."""
        version = self.profiler.version
        for call in calls:
            event = self.coll_event(call, self._seq[call.func], 16)
            event.parent = self._graph[0] if version > 4 else None
            self.host_stream.add(lambda event=event: self._replay(event), self.profiler.stop)

    def _replay(self, event):
        if self.profiler.version == 4:
            event.parent = self.profiler.start(self.profiler.event(EVENT_GROUP))
        return self.profiler.start(event)

    def send_recv(self):
        """A send and a receive in one group, which ends before it is launched."""
        calls = self.begin(["send", "recv"], kind=EVENT_P2P_API)
        group_api = self._group_api
        self.end([], group=False)
        self._group_api = group_api
        self.launch([])
        self._group_api = None
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
