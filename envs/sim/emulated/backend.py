"""The emulated backend: ``torch.distributed`` moves the bytes with gloo, the timeline says when NCCL would be done.

Nothing sleeps: who waits for a collective has its emulated clock moved to the end (clock.py).

Registered as ``emulated`` by the ``torch.backends`` entry point when DYNAMICCL_CLUSTER is set; a default group on gloo
is one of its groups then, so that scripts need no change. Results are gloo's, bit for bit; only the time of all_gather,
reduce_scatter and all_reduce is emulated, and of the first two only where one tensor holds all shards, as ZeRO and FSDP
call them: a list of tensors takes no time and is not seen, unlike on NCCL.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from ...nccl.steps import clock as steps
from ...nccl_model.clusters import cluster
from .clock import Clock, Collective, CountedWork
from .settings import Emulated
from .timeline import Timeline, comm_id_of

_Tensors = list[torch.Tensor]


class EmulatedWork(dist.Work):
    """A collective in flight: done when gloo has moved the bytes; who waits for it waits to its emulated end."""

    def __init__(
        self, gloo: dist.Work, timeline: Timeline, clock: Clock, collective: Collective, outputs: _Tensors
    ) -> None:
        super().__init__()
        self._gloo, self._timeline, self._clock = gloo, timeline, clock
        self._collective, self._outputs = collective, outputs
        self._done = False

    def is_completed(self) -> bool:
        """True once gloo has moved the bytes: :meth:`wait` would return without sleeping."""
        return self._done or bool(self._gloo.is_completed())

    def wait(self, timeout: Any = None) -> bool:
        """Block until the emulated end. Raises what gloo raises (a rank that died, a time-out)."""
        if not self._done:
            self._gloo.wait(timeout) if timeout else self._gloo.wait()
        self._timeline.wait_for(self._collective)
        self._done = True
        return True

    def result(self) -> _Tensors:
        """The output tensors."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[_Tensors]:
        """A future of the outputs, waited for at once: DistributedDataParallel asks for it, whose all-reduces no table
        is for."""
        self.wait()
        future: torch.futures.Future[_Tensors] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class EmulatedGroup(dist.ProcessGroup):
    """One communicator of the emulated cluster; methods are c10d's, see ``torch.distributed.ProcessGroup``."""

    def __init__(self, options: Any, emulated: Emulated, clock: Clock) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        world = dist.get_world_size() if dist.is_initialized() else size
        self._name = str(options.group_id)
        # torchrun may keep its store when it starts all workers anew: what the dead ones left there is not for us. Its
        # agents count restarts each for itself; all ranks have come here equally often.
        store = dist.PrefixStore(f"life {options.store.add(f'lives of {rank}', 1)}", options.store)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options.timeout)
        ranks = list(options.global_ranks_in_group) or list(range(size))
        members = ",".join(map(str, ranks))
        self._timeline: Timeline | None = None
        self._clock = clock
        if size > 1:  # NCCL does not ask a tuner for a communicator of one rank
            comm_id = comm_id_of(f"{self._name}:{members}")
            self._timeline = Timeline(emulated, clock, store, rank, ranks, world, comm_id)

    def _timed(
        self, func: str, tensor: torch.Tensor, outputs: _Tensors, run: Callable[[], dist.Work]
    ) -> dist.Work:
        """Run on gloo, and on the emulated stream. ``tensor`` is the whole buffer."""
        if self._timeline is None:
            return run()
        collective = self._timeline.enqueue(
            func, tensor.numel() * tensor.element_size(), tensor.element_size()
        )
        with (
            _disable_current_modes()
        ):  # gloo copies where NCCL does not: that is not the job's work, in any thread
            work = run()
        return EmulatedWork(work, self._timeline, self._clock, collective, outputs)

    # -- what training uses; torch 2.13 names first, older spellings below -------------------------------------

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gather equal shards into one buffer."""
        opts = opts or c10d.AllgatherOptions()
        return self._timed(
            "all_gather", output, [output], lambda: self._gloo._allgather_base(output, input, opts)
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Reduce a buffer and keep this rank's shard."""
        opts = opts or c10d.ReduceScatterOptions()
        run = functools.partial(self._gloo._reduce_scatter_base, output, input, opts)
        return self._timed("reduce_scatter", input, [output], run)

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """Reduce on all ranks, in place."""
        opts = opts or c10d.AllreduceOptions()
        return self._timed("all_reduce", tensors[0], tensors, lambda: self._gloo.allreduce(tensors, opts))

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> dist.Work:
        """Several gathers; the last one's work stands for all, as they run in order on one stream."""
        works = [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _Several(works, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None
    ) -> dist.Work:
        """Several reduce-scatters, see :meth:`all_gather_single_coalesced`."""
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _Several(works, outputs)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """Several all-reduces, see :meth:`all_gather_single_coalesced`."""
        one = c10d.AllreduceOptions()
        if opts is not None:
            one.reduceOp = opts.reduceOp
        return _Several([self.allreduce([t], one) for t in tensors], tensors)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def shutdown(self) -> None:
        """End the communicator."""
        if self._timeline is not None:
            self._timeline.close()
            self._timeline = None
        # Its threads must be gone before the interpreter is: one that frees a tensor then would abort the process.
        self._gloo = None

    def getBackendName(self) -> str:
        """Name of the backend."""
        return "emulated"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """c10d's name of the group."""
        return self._name


def _untimed(name: str) -> Callable[..., Any]:
    return lambda self, *args, **options: getattr(self._gloo, name)(*args, **options)


# The rest passes through: set-up traffic that no tuner touches.
_UNTIMED = (
    "allgather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
)
for _name in (
    *_UNTIMED,
    "reduce_scatter",
    "alltoall",
    "alltoall_base",
    "allgather_coalesced",
    "monitored_barrier",
):
    setattr(EmulatedGroup, _name, _untimed(_name))


class _Several(dist.Work):
    """Works that were issued together."""

    def __init__(self, works: list[dist.Work], outputs: _Tensors) -> None:
        super().__init__()
        self._works, self._outputs = works, outputs

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> _Tensors:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])


def _stand_in() -> None:
    """Let a job that asks for gloo train on the emulated cluster: its default group, where there is no GPU.

    Groups that it makes of gloo besides stay gloo's: in a job on NCCL those carry what no tuner sees.
    """
    plain, barrier = c10d.init_process_group, c10d.monitored_barrier

    @functools.wraps(plain)
    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        named = {part.rpartition(":")[2] for part in str(backend or "gloo").lower().split(",")}
        if named <= {"gloo", "nccl"} and "gloo" in named and not torch.cuda.is_available():
            backend = "emulated"
        plain(backend, *args, **options)

    @functools.wraps(barrier)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        found = c10d._get_default_group() if group is None else group
        if isinstance(found, EmulatedGroup):  # c10d refuses every backend whose name is not gloo
            found.monitored_barrier(timeout or c10d.default_pg_timeout, wait_all_ranks=wait_all_ranks)
        else:
            barrier(group, timeout, wait_all_ranks)

    for module in (c10d, dist, device_mesh):  # each took the name for itself
        module.init_process_group = init_process_group
    for module in (c10d, dist):
        module.monitored_barrier = monitored_barrier


def register() -> None:
    """Make ``init_process_group("emulated")`` known, and gloo mean the same; from now on the work of this process is
    counted, and steps are timed by the emulated clock. Raises ValueError when the environment is wrong."""
    emulated = Emulated.from_env()
    cluster(emulated.cluster)  # raises where there is none
    if "emulated" in dist.Backend.backend_list:
        return
    clock = Clock()
    dist.Backend.register_backend(
        "emulated",
        lambda options, _: EmulatedGroup(options, emulated, clock),
        extended_api=True,
        devices=["cpu"],
    )
    _stand_in()
    steps.now_ns = clock.now
    CountedWork(clock, emulated.compute_scale).__enter__()
    run = threading.Thread.run

    def counted(thread: threading.Thread) -> None:
        with CountedWork(clock, emulated.compute_scale):
            run(thread)

    threading.Thread.run = counted  # type: ignore[method-assign]
