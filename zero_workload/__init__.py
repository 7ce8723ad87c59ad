"""The job whose collectives are tuned: ZeRO stages 0 to 3 by hand, on asynchronous ``torch.distributed`` collectives.

::

    engine = zero(model, lambda shards: torch.optim.AdamW(shards, lr=1e-3), stage=3)
    for x, y in data:
        engine.backward(model(x, y))
        engine.step()

It knows nothing of tuning and imports nothing but torch. ``python -m dynamiccl.zero_workload`` trains a byte-level
transformer on real text, by itself or under torchrun.

A guided tour, from ``loss.backward()`` to the last collective:

1. ``layout.py``: every parameter gets a place in a *bucket*, a flat run of elements cut into one *shard* a rank.
   Stages 0 to 2 lay all parameters end to end in a ``Row`` and cut it at equal sizes (``cut``); stage 3 makes a row of
   one bucket of each *unit*, a block of the model (``find_units``).
2. ``zero.py``: ``zero()`` checks and builds an ``Engine``. The optimizer sees only this rank's shards of the master
   weights, and is stepped once a training step.
3. Backward begins. Whichever hook comes first calls ``Reducer.begin_backward``, which asks autograd to call back when
   all is done.
4. ``replicated.py`` (stages 0 to 2): autograd finishes the gradient of a parameter and calls ``_on_grad``, which counts
   it for its buckets; when the last bucket in the row is complete its reduction starts, while backward goes on with
   earlier layers. The order is the same on all ranks.
5. ``sharded.py`` (stage 3): ``_before_backward`` has gathered the unit, and started to gather the one before it;
   ``_after_backward`` frees it and reduces its gradients.
6. ``reducer.py``: ``launch`` packs gradients into one of a constant number of buffers (stages 2 and 3, freeing them)
   and starts the all-reduce (0), or the reduce-scatter (1 to 3), of ``comm.py``.
7. ``Engine.step``: waits for the reductions, clips by the norm over all shards, steps the optimizer.
8. ``publish``: masters are rounded into the shards. Stages 1 and 2 start one all-gather a bucket, and the next forward
   waits for each just before the first module that needs it; stage 3 gathers unit by unit in forward, ``prefetch``
   ahead, and again in backward. That gather is the step's last collective.

With tensor parallelism a parameter is a DTensor, and all of this happens to the part of it that a rank holds.

Beside it: ``model.py`` and ``data.py`` (what is trained), ``train.py`` and ``launch.py`` (the job, and its ranks on one
machine), ``optim.py`` (Adan, Lion, Muon), ``remat.py`` (activation checkpointing, also partitioned over ranks),
``checkpoint.py``, ``peers.py`` (DDP, ZeroRedundancyOptimizer, FSDP2 in the same job), ``planner.py`` (what each stage
holds). ``dynamiccl record --dry-run`` shows the collectives of any model on any number of ranks, without them.
"""

from .zero import Engine, zero

__all__ = ["Engine", "zero"]
