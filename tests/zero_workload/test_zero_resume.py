"""A resumed run goes on to the last bit with every elementwise optimizer, and refuses another one's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dynamiccl.zero_workload import Engine, zero
from torch import nn
from world import World


class Late(torch.optim.Optimizer):
    """As those of pytorch_optimizer: its first step makes a number of the group. Its states are of many kinds."""

    def __init__(self, params: Any, lr: Any = 0.1, betas: tuple[float, float] = (0.9, 0.8)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "foreach": None})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """A step whose length depends on all that a checkpoint must keep."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("sizes", torch.ones(2)).mul_(1.5)
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state |= {"turned": False, "pair": (0, 1.0), "none": None, "sum": torch.zeros_like(param)}
                assert param.grad is not None and state["none"] is None
                state["turned"] = not state["turned"]
                count, scale = state["pair"]
                state["pair"] = count + 1, scale * 0.5
                state["sum"].mul_(group["betas"][0]).add_(param.grad)
                sign = -1 if state["turned"] else -2
                length = (
                    sign * float(group["lr"]) / group["step"] + scale / 100 + 0.01 * group["sizes"][1].item()
                )
                param.add_(state["sum"], alpha=length)


OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "late": Late,
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-3, betas=(0.5, 0.6), amsgrad=True),
    "tensor": partial(torch.optim.AdamW, lr=torch.tensor(0.1), foreach=False),
    "Adamax": partial(torch.optim.Adamax, lr=0.1),
    "Adan": lambda params: pytest.importorskip("pytorch_optimizer").Adan(params, lr=0.1),
}


def engine_of(name: str) -> Engine:
    torch.manual_seed(0)
    return zero(nn.Linear(4, 4), OTHERS[name], stage=2, param_dtype=torch.float32, elementwise=True)


def train(engine: Engine, first: int, stop: int) -> torch.Tensor:
    for step in range(first, stop):
        batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        engine.backward((engine.model(batch) - batch).square().mean())
        engine.step()
    return engine.state_dict()["weight"]


def went_on(name: str, folder: str) -> tuple[bool, list[str]]:
    """Whether a run that is resumed trains as the one that was saved, and what its groups lack."""
    saved, resumed = engine_of(name), engine_of(name)
    train(saved, 0, 3)
    saved.save(folder)
    resumed.load(folder)
    same = torch.equal(train(resumed, 3, 6), train(saved, 3, 6))
    groups = [engine.optimizer.param_groups[0].keys() for engine in (saved, resumed)]
    return same, sorted(groups[0] - groups[1])


@pytest.mark.parametrize("name", ["late", "AdamW", "tensor", pytest.param("Adan", marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_to_the_last_bit(name: str, one: World, tmp_path: Path) -> None:
    """Before: what an optimizer makes in its first step was not read, so full-grown moments were taken for new ones."""
    pytest.importorskip("pytorch_optimizer", reason="not installed") if name == "Adan" else None
    assert one.run(went_on, name, str(tmp_path))[0] == (True, [])


class Scaled(nn.Module):
    """A layer and a scalar, whose moments look like its optimizer's counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * self.factor
        return out


def scalar_went_on(kind: str, folder: str) -> bool:
    def engine() -> Engine:
        torch.manual_seed(0)
        made = partial(getattr(torch.optim, kind), lr=0.1)
        return zero(Scaled(), made, stage=2, param_dtype=torch.float32)

    def trained(engine: Engine, first: int, stop: int) -> torch.Tensor:
        for step in range(first, stop):
            batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
            engine.backward((engine.model(batch) - batch).square().mean())
            engine.step()
        return engine.state_dict()["factor"]

    saved, resumed = engine(), engine()
    trained(saved, 0, 3)
    saved.save(folder)
    resumed.load(folder)
    return torch.equal(trained(resumed, 3, 6), trained(saved, 3, 6))


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
def test_a_scalar_goes_on_to_the_last_bit(kind: str, two: World, tmp_path: Path) -> None:
    assert two.run(scalar_went_on, kind, str(tmp_path)) == [True, True]


def settings_after(name: str, change: Any, folder: str) -> dict[str, Any]:
    """Settings of the group of ``name`` after it was loaded from a run of AdamW (0.1) whose lr became ``change``."""
    saved, resumed = engine_of("tensor" if name == "tensor" else "AdamW"), engine_of(name)
    train(saved, 0, 1)
    group = saved.optimizer.param_groups[0]
    group["lr"] = group["lr"] * 0 + change
    saved.save(folder)
    resumed.load(folder)
    train(resumed, 1, 2)
    return {key: value for key, value in resumed.optimizer.param_groups[0].items() if key != "params"}


def test_all_settings_are_those_of_the_checkpoint(one: World, tmp_path: Path) -> None:
    """Before: the rate was, betas and booleans were not, and a rate in a tensor was neither saved nor read."""
    found = one.run(settings_after, "amsgrad", 0.5, str(tmp_path))[0]
    assert (found["lr"], found["betas"], found["amsgrad"]) == (0.5, (0.9, 0.999), False)
    found = one.run(settings_after, "tensor", 0.5, str(tmp_path))[0]
    assert isinstance(found["lr"], torch.Tensor) and found["lr"].item() == 0.5 and found["foreach"] is False


def refusal(saves: str, loads: str, folder: str, cut: int) -> str:
    """What is said of a checkpoint of another optimizer, or of one whose index was cut to ``cut`` bytes."""
    saved, resumed = engine_of(saves), engine_of(loads)
    train(saved, 0, 1)
    saved.save(folder)
    (index,) = Path(folder).glob("zero-save-*/.metadata")
    if cut:
        index.write_bytes(index.read_bytes()[:cut])
    try:
        resumed.load(folder)
    except ValueError as error:
        return str(error)
    return ""


def test_another_optimizer_and_a_damaged_checkpoint_are_refused(one: World, tmp_path: Path) -> None:
    """Before: KeyError in the first step, another one's moments, or UnpicklingError."""
    said = one.run(refusal, "AdamW", "Adamax", str(tmp_path), 0)[0]
    assert "is of another optimizer: AdamW there, Adamax here" in said
    assert "holds no whole checkpoint" in one.run(refusal, "AdamW", "AdamW", str(tmp_path), 50)[0]
