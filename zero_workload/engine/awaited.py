"""Parameters whose values are on their way: whoever uses one first, in whatever way, waits for it."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

_ABOUT = [
    getattr(torch.Tensor, name) for name in ("grad", "requires_grad", "_version", "shape", "dtype", "device")
]
#: What needs no values: loops look at these between two steps.
_WITHOUT_VALUES = {use for of in _ABOUT for use in (of.__get__, of.__set__, of.__delete__)}
_WITHOUT_VALUES |= {torch.Tensor.numel, torch.Tensor.is_floating_point}


class Awaited(nn.Parameter):
    """The class that a parameter has while it is gathered. A module's hook waits before its forward; this class sees to
    what no hook sees: a weight used outside of its module's forward, parameters in a list, a model that is entered by
    another method.
    """

    _wait: Callable[[], None]

    @staticmethod
    def mark(param: nn.Parameter, wait: Callable[[], None]) -> bool:
        """From now on the first use of ``param`` calls ``wait``. Returns whether it can: not that of a subclass."""
        if type(param) not in (nn.Parameter, Awaited):
            return False
        param.__class__ = Awaited
        param._wait = wait  # type: ignore[attr-defined]
        return True

    @staticmethod
    def clear(param: nn.Parameter) -> None:
        """``param`` is a plain parameter again."""
        if type(param) is Awaited:
            param.__class__ = nn.Parameter  # type: ignore[assignment]
            param.__dict__.pop("_wait", None)  # a copy by its class has none

    def arrive(self) -> None:
        """Wait for the values."""
        wait = self.__dict__.get("_wait")
        if wait:
            wait()
        Awaited.clear(self)

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Any operation on it."""
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Awaited):
                leaf.arrive()
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.arrive()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.arrive()
        return self.__reduce_ex__(protocol)
