"""Parameters whose values are not here. At stages 1 and 2 they are on their way: the first use waits. At stage 3 the
ranks hold them in parts: a use outside of the module's forward is refused. What needs no values is the module's.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

_ABOUT = "grad requires_grad is_leaf _version shape ndim dtype device is_cuda layout"
_CALLS = "numel size dim stride is_floating_point is_complex element_size nelement register_hook"
_CALLS += " register_post_accumulate_grad_hook requires_grad_ is_contiguous"
#: What needs no values: loops look at these between two steps.
_WITHOUT_VALUES = {getattr(torch.Tensor, name) for name in _CALLS.split()}
_WITHOUT_VALUES |= {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like}
_WITHOUT_VALUES |= {torch.autograd.backward, torch.autograd.grad}
for _name in _ABOUT.split():
    _of = getattr(torch.Tensor, _name)
    _WITHOUT_VALUES |= {_of.__get__, _of.__set__, _of.__delete__}


class Awaited(nn.Parameter):
    """The class of a parameter while its values are not here. A module's hook waits before its forward; this
    class sees to what no hook sees: a weight used outside of its module's forward, parameters in a list, a model that
    is entered by another method.
    """

    _wait: Callable[[], None]

    @staticmethod
    def mark(param: nn.Parameter, wait: Callable[[], None]) -> bool:
        """From now on the first use of ``param`` calls ``wait``, which may refuse it by raising. Returns whether it
        can: not that of a subclass.
        """
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
        """Wait for the values, or raise what ``wait`` raises."""
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
