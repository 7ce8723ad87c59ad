"""What a step of a training loop is, seen from the optimizers that step and the backward passes between them.

A *boundary* is an optimizer step with a backward pass since the last one. Of several with own passes (GAN) the least
frequent counts, but none over sixteen times as seldom. Once a pass had collectives, passes without any make none. No
rank's safety depends on this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_RARER = 16  # how much less often than the others the optimizer that makes the boundaries may step
_NAME = "_dynamiccl_number"


class Steps:
    """Counts backward passes and says which optimizer steps are boundaries."""

    def __init__(self, asked: Callable[[], int] = lambda: 0) -> None:
        """``asked()`` counts the collectives that this process has begun so far; 0 where nothing counts them."""
        self._asked = asked
        self.backwards = 0  # outermost ones, begun
        self.ended = 0  # boundaries
        self._work = 0  # backward passes
        self._worked_at = 0  # of them, at the last optimizer step that had any
        self._asked_then, self._backwards_then = 0, 0  # when the first pass since that began
        self._shared: set[int] = set()  # optimizers that stepped on what other ranks had a part in
        self._depth = 0
        self._numbers = 0
        self._anchor = 0  # the optimizer whose steps are boundaries
        self._steps: dict[int, int] = {}  # of each optimizer, since the anchor became it
        self._gap = 1  # most steps with work from one of the anchor's to its next
        self._since = 0
        self._again: set[int] = set()  # without backward passes: who has stepped since the last boundary

    def stepped(self, optimizer: Any) -> bool:
        """An optimizer has stepped; True if that is a boundary."""
        worked = self._work != self._worked_at
        self._worked_at = self._work
        if worked and self._is_alone(optimizer):
            self.backwards = self._backwards_then
            return False
        if (
            worked and self._since == 0 and optimizer.__dict__.get(_NAME) == self._anchor
        ):  # the usual step, in short
            self._steps[self._anchor] += 1
            self.ended += 1
            return True
        number = self._number(optimizer)
        boundary = self._rhythm(number, worked) if self.backwards else self._without(number)
        self.ended += boundary
        return boundary

    def _number(self, optimizer: Any) -> int:
        number = optimizer.__dict__.get(_NAME)
        if number is None:
            self._numbers += 1
            number = optimizer.__dict__[_NAME] = self._numbers
        return int(number)

    def _is_alone(self, optimizer: Any) -> bool:
        """Whether this optimizer has always stepped on this rank's own affairs, where others have not."""
        if optimizer.__dict__.get(_NAME) in self._shared:
            return False
        if self._asked() == self._asked_then:
            return bool(self._shared)
        self._shared.add(self._number(optimizer))
        return False

    def _without(self, number: int) -> bool:
        """No backward pass was ever seen (gradients come from elsewhere): an optimizer that steps again."""
        again = number in self._again
        self._again = {number} if again else self._again | {number}
        return again

    def _rhythm(self, number: int, worked: bool) -> bool:
        if not worked:
            return False
        self._since += 1
        mine = self._steps[number] = self._steps.get(number, 0) + 1
        if number == self._anchor:
            self._gap = max(self._gap, self._since)
        else:
            anchors = self._steps.get(self._anchor, 0)
            rarer = mine >= 2 and 3 * mine < 2 * anchors and anchors <= _RARER * mine
            if not (rarer or self._anchor == 0 or self._since > 2 * self._gap):
                return False
            self._gap = anchors // mine + 1 if rarer else 1
            self._anchor, self._steps = number, {number: 1}
        self._since = 0
        return True

    def begun(self) -> None:
        """A backward pass begins, an outermost one."""
        if self._work == self._worked_at:
            self._asked_then, self._backwards_then = self._asked(), self.backwards
        self._work += 1
        self.backwards += 1

    def watch(self, torch: Any) -> None:
        """Count PyTorch's backward passes from now on: all of them go through one method of the engine.

        Wrapped on the instance that PyTorch keeps, since some frameworks call it directly. Nested passes (reentrant
        checkpoints) are parts of the outer one. Where it cannot be wrapped no pass is ever seen.
        """
        variable = torch.autograd.Variable
        engine = type(variable._execution_engine)
        steps = self

        class Engine(engine):  # type: ignore[misc, valid-type]
            def run_backward(self, *args: Any, **more: Any) -> Any:
                if not steps._depth:
                    steps.begun()
                steps._depth += 1
                try:
                    return super().run_backward(*args, **more)
                finally:
                    steps._depth -= 1

        Engine.run_backward._torchdynamo_disable = True  # type: ignore[attr-defined]
        variable._execution_engine = Engine()
