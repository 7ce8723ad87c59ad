"""ZeRO at its barest, to be read first: parameter by parameter, one collective after the other, nothing overlapped.

A rank's shard of a parameter is an equal part of its elements, the last one filled with zeros. Every rank uses every
parameter; all are float32. ``python -m dynamiccl.zero_workload.minimal`` runs the worked example on two ranks. Source:
Rajbhandari et al., ZeRO (SC20).
"""

import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from .buffers.comm import Collectives

#: Makes an optimizer of the shards that this rank updates.
OptimizerOf = Callable[..., torch.optim.Optimizer]


class Stage1:
    """Optimizer states are sharded. Held, in parameters: 2 (weights, gradients) + 3 / N (a shard, its moments).

    A step sends two times the parameters: gradients are reduced to the ranks that own them, new values are gathered.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerOf) -> None:
        self.comm = Collectives()
        self.params = list(model.parameters())
        #: Parameter -> its memory, with filling: [a multiple of N].
        self.flat: dict[nn.Parameter, torch.Tensor] = {}
        #: Parameter -> what this rank updates: [1 / N of that].
        self.shards: dict[nn.Parameter, nn.Parameter] = {}
        for p in self.params:
            self.comm.broadcast(p.detach())
            flat = self.filled(p)
            elements = flat[: p.numel()]
            p.data = elements.view(p.shape)
            parts = flat.chunk(self.comm.size)
            mine = parts[self.comm.rank].clone()
            self.flat[p] = flat
            self.shards[p] = nn.Parameter(mine)
        shards = list(self.shards.values())
        self.optimizer = optimizer(shards)

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """A flat copy, with zeros at the end so that N ranks can share it."""
        elements = tensor.detach().flatten()
        missing = -tensor.numel() % self.comm.size
        padded = nn.functional.pad(elements, (0, missing))
        return padded.clone()

    def reduce(self, p: nn.Parameter) -> None:
        """The mean of all ranks' gradients of ``p``: of it, this rank gets its shard."""
        assert p.grad is not None
        shard = self.shards[p]
        mine = torch.empty_like(shard)
        whole = self.filled(p.grad)
        self.comm.reduce_scatter(mine, whole).wait()
        shard.grad = mine
        p.grad = None

    def gather(self, p: nn.Parameter) -> None:
        """All ranks' shards of ``p``, end to end."""
        shard = self.shards[p].detach()
        self.comm.all_gather(self.flat[p], shard).wait()

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

    def __init__(self, model: nn.Module, optimizer: OptimizerOf) -> None:
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

    def __init__(self, model: nn.Module, optimizer: OptimizerOf) -> None:
        super().__init__(model, optimizer)
        for p in self.params:
            self.free(p)
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if own:
                module.register_forward_pre_hook(self.gather_module)
                module.register_forward_hook(self.after_forward)

    def free(self, p: nn.Parameter) -> None:
        """Only the shard is left."""
        memory = self.flat[p].untyped_storage()
        memory.resize_(0)

    def gather(self, p: nn.Parameter) -> None:
        """As before, into new memory."""
        flat = self.flat[p]
        memory = flat.untyped_storage()
        memory.resize_(flat.nbytes)
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
    """The model with its first weights 2, -3, 1, 0.5, and this rank's x1, x2 and t, [3]."""
    hidden = nn.Linear(2, 1, bias=False)
    output = nn.Linear(1, 1)
    model = nn.Sequential(hidden, nn.ReLU(), output)
    first_weights = ([[2.0, -3.0]], [[1.0]], [0.5])
    for p, values in zip(model.parameters(), first_weights, strict=True):
        p.data = torch.tensor(values)
    rows = [1.0, 3.0, 5.0], [2.0, 1.0, 7.0]  # x1, x2 and t of each rank
    rank = dist.get_rank()
    return model, torch.tensor(rows[rank])


def show(rank: int, store: str) -> None:
    """One rank of the example, which prints what each stage has come to."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for kind in (Stage1, Stage2, Stage3):
        model, row = example()
        zero = kind(model, partial(torch.optim.Adam, lr=0.1))
        error = model(row[:2]) - row[2]
        loss = 0.5 * error.square().sum()
        zero.backward(loss)
        shards = zero.shards.values()
        gradients = [shard.grad.tolist() for shard in shards if shard.grad is not None]
        zero.step()
        weights = []
        for shard in shards:
            rounded = [round(value, 4) for value in shard.tolist()]
            weights.append(rounded)
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
