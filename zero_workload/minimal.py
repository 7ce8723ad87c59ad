"""ZeRO at its barest, to be read first: parameter by parameter, one collective after the other, nothing overlapped.

A rank's shard of a parameter is an equal part of its elements, end to end, with zeros to fill the last one. Every rank
uses every parameter; all are float32. ``python -m dynamiccl.zero_workload.minimal`` runs the worked example at each
stage on two ranks. What the engine beside it adds - buckets, overlap, mixed precision, odd models - changes no number.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC20).
"""

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from .buffers.comm import Collectives


class Stage1:
    """Optimizer states are sharded. Held, in parameters: 2 (weights, gradients) + 3 / N (a shard, its moments).

    A step sends two times the parameters: gradients are reduced to the ranks that own them, new values are gathered.
    """

    def __init__(self, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.comm, self.params = Collectives(), list(model.parameters())
        self.flat: dict[
            nn.Parameter, torch.Tensor
        ] = {}  # [a multiple of N] the parameter's memory, with filling
        self.shards: dict[nn.Parameter, nn.Parameter] = {}  # [1 / N of that] what this rank updates
        for p in self.params:
            self.comm.broadcast(p.detach())
            flat = self.filled(p)
            p.data = flat[: p.numel()].view(p.shape)
            self.flat[p], self.shards[p] = (
                flat,
                nn.Parameter(flat.chunk(self.comm.size)[self.comm.rank].clone()),
            )
        self.optimizer = optimizer(list(self.shards.values()))

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """A flat copy, with zeros at the end so that N ranks can share it."""
        return nn.functional.pad(tensor.detach().flatten(), (0, -tensor.numel() % self.comm.size)).clone()

    def reduce(self, p: nn.Parameter) -> None:
        """The mean of all ranks' gradients of ``p``: of it, this rank gets its shard."""
        assert p.grad is not None
        mine = torch.empty_like(self.shards[p])
        self.comm.reduce_scatter(mine, self.filled(p.grad)).wait()
        self.shards[p].grad, p.grad = mine, None

    def gather(self, p: nn.Parameter) -> None:
        """All ranks' shards of ``p``, end to end."""
        self.comm.all_gather(self.flat[p], self.shards[p].detach()).wait()

    def backward(self, loss: torch.Tensor) -> None:
        """All gradients, in full, on every rank; then each is reduced."""
        loss.backward()
        for p in self.params:
            self.reduce(p)

    def step(self) -> None:
        """Every rank updates what it owns, then all get all."""
        self.optimizer.step()
        for p in self.params:
            self.gather(p)


class Stage2(Stage1):
    """Gradients are sharded too. Held: 1 (weights) + 4 / N. Sent: as at stage 1.

    The only change: a gradient is reduced as soon as autograd has it, and what other ranks own of it is forgotten, so
    that there is never more than one whole gradient.
    """

    def __init__(self, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(model, optimizer)
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.reduce)

    def backward(self, loss: torch.Tensor) -> None:
        """The hooks reduce."""
        loss.backward()


class Stage3(Stage2):
    """Parameters are sharded too. Held: 4 / N. Sent: three times the parameters.

    A module's parameters are gathered before its forward and freed after, and again around its backward. To free is to
    give the memory back: autograd keeps views of it, which find the values again when it has been filled again.
    """

    def __init__(self, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(model, optimizer)
        for p in self.params:
            self.free(p)
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                module.register_forward_pre_hook(self.gather_module)
                module.register_forward_hook(self.after_forward)

    def free(self, p: nn.Parameter) -> None:
        """Only the shard is left."""
        self.flat[p].untyped_storage().resize_(0)

    def gather(self, p: nn.Parameter) -> None:
        """As before, into new memory."""
        self.flat[p].untyped_storage().resize_(self.flat[p].nbytes)
        super().gather(p)

    def gather_module(self, module: nn.Module, *_: object) -> None:
        """All that the module itself holds."""
        for p in module.parameters(recurse=False):
            self.gather(p)

    def after_forward(self, module: nn.Module, _: object, output: torch.Tensor) -> None:
        """The same, freed, until the gradient of the module's output is known."""
        for p in module.parameters(recurse=False):
            self.free(p)
        output.register_hook(lambda _: self.gather_module(module))

    def reduce(self, p: nn.Parameter) -> None:
        """A parameter that has its gradient has done its part in backward."""
        super().reduce(p)
        self.free(p)

    def step(self) -> None:
        """Every rank updates what it owns; the next forward gathers it."""
        self.optimizer.step()


# The worked example: h = w1 x1 + w2 x2, a = relu(h), y = w3 a + w4, loss (y - t)^2 / 2; Adam, rate 0.1 ---------------


def example() -> tuple[nn.Module, torch.Tensor]:
    """The model with its first weights 2, -3, 1, 0.5, and this rank's loss."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1))
    for p, values in zip(model.parameters(), ([[2.0, -3.0]], [[1.0]], [0.5]), strict=True):
        p.data = torch.tensor(values)
    return model, torch.tensor([([1.0, 3.0, 5.0]), ([2.0, 1.0, 7.0])][dist.get_rank()])


def show(rank: int, store: str) -> None:
    """One rank of the example, which prints what each stage has come to."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for kind in (Stage1, Stage2, Stage3):
        model, row = example()
        zero = kind(model, lambda shards: torch.optim.Adam(shards, lr=0.1))
        zero.backward(0.5 * (model(row[:2]) - row[2]).square().sum())
        gradients = [s.grad.tolist() for s in zero.shards.values() if s.grad is not None]
        zero.step()
        weights = [[round(v, 4) for v in s.tolist()] for s in zero.shards.values()]
        whole = sum(p.untyped_storage().nbytes() for p in zero.params)
        for turn in range(2):
            dist.barrier()
            if turn == rank:
                print(f"{kind.__name__} rank {rank} owns gradients {gradients}, weights {weights}", end="; ")
                print(f"bytes of whole weights: {whole}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(show, (f"{folder}/store",), nprocs=2)
