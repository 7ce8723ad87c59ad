"""A two-stage pipeline with ZeRO inside each stage: ``torchrun --nproc-per-node 4 examples/pipelines/pipeline.py``.

Ranks 0 and 1 hold the first half of the blocks, 2 and 3 the second. Each half shards its optimizer states over its two
ranks. The schedule is torch's; it must not scale the gradients, because the engine has them by then.

dynamiccl tune --cluster dgx-h100-2x8 -- torchrun --nproc-per-node 4 examples/pipelines/pipeline.py
"""

import torch
import torch.distributed as dist
from dynamiccl.zero_workload import zero
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

STAGES, MICRO_BATCHES, WIDTH, ROWS = 2, 4, 32, 16


class Half(nn.Module):
    """One stage's blocks."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] to the same."""
        for block in self.blocks:
            x = x + block(x)
        return x


def train(steps: int, zero_stage: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """Losses of this pipeline, on the ranks of the last stage; 0 elsewhere."""
    world = dist.get_world_size()
    data = world // STAGES
    sharding = dist.new_subgroups(data)[0]
    pipes = []
    for first in range(data):
        ranks = range(first, world, data)
        pipes.append(list(ranks))
    pipe = dist.new_subgroups_by_enumeration(pipes)[0]
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for _ in range(4):
        layer = nn.Linear(WIDTH, WIDTH)
        blocks.append(nn.Sequential(layer, nn.Tanh()))
    place = pipe.rank()
    half = Half(blocks[:2] if place == 0 else blocks[2:])

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2)

    engine = zero(
        half,
        optimizer,
        stage=zero_stage,
        group=sharding,
        model_group=pipe,
        param_dtype=dtype,
        gradient_accumulation=MICRO_BATCHES,
        max_norm=0.05,
    )

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # The schedule calls backward, not engine.backward, so the loss is scaled here, by engine.scaling()'s factor.
        errors = output.float() - target
        return errors.square().mean() * factor

    # Shapes are given: to learn them torch would run a pass of its own, which stage 3 takes for the step's.
    shape = torch.zeros(ROWS // MICRO_BATCHES, WIDTH, dtype=dtype)
    graded = shape.clone().requires_grad_()
    stage = PipelineStage(
        half,
        place,
        STAGES,
        torch.device("cpu"),
        input_args=(graded if place else shape,),
        output_args=(graded,),
        group=pipe,
    )
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
    found = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        every = torch.randn(data, ROWS, WIDTH, generator=draw)
        rows = every[sharding.rank()]
        losses: list[torch.Tensor] = []
        with engine.scaling() as factor:
            if place == 0:
                schedule.step(rows.to(dtype))
            else:
                target = rows.roll(1, 1)
                schedule.step(target=target, losses=losses)
        engine.step()
        total = torch.zeros(())
        if losses:
            total = torch.stack(losses).mean() / factor
        dist.all_reduce(total, op=dist.ReduceOp.AVG, group=sharding)
        found.append(total.item())
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses = train(steps=20, zero_stage=1)
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        print(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
    dist.destroy_process_group()
