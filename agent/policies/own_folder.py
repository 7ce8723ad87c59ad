"""The policy in a user's folder: the modules beside it are its own, whatever names the modules of others have."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

#: Modules that no folder replaces: Python's, the program, and this package.
_KEPT = sys.stdlib_module_names | {"__main__", "__mp_main__", __name__.partition(".")[0]}


class _Beside:
    """Finds the modules in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Modules that Python had before.
        self.known = _tops()

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """As Python's finders do. A folder without ``__init__.py`` may be one of data: it hides no package."""
        if "." in name or name in _KEPT:
            return None
        found = PathFinder.find_spec(name, [str(self.folder)])
        is_plain = found is not None and found.loader is None
        return None if is_plain and PathFinder.find_spec(name) is not None else found

    def has(self, name: str) -> bool:
        """Whether the module ``name`` that Python has is the one in the folder."""
        module = sys.modules[name]
        places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
        files = [Path(place) for place in places if place]
        return any(one.parent == self.folder and one.name.partition(".")[0] == name for one in files)


#: The folder of the policy that was made last, which finds its modules still.
_left: list[_Beside] = []


def _tops() -> set[str]:
    return {name for name in sys.modules if "." not in name} - _KEPT


def _take(names: set[str]) -> dict[str, ModuleType]:
    """Take modules, and those in them, from Python."""
    found = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}


def forget() -> None:
    """Let the user's next policy find its own modules, not those that the policy of a folder left."""
    while _left:
        beside = _left.pop()
        sys.meta_path.remove(beside)
        _take({name for name in _tops() - beside.known if beside.has(name)})


@contextmanager
def modules_beside(file: Path) -> Iterator[None]:
    """Python finds the modules beside ``file`` first, also where it has others of their names.

    Afterwards it has again what it had before. What the policy imports later is still found beside ``file``, until the
    next own policy of a user is made; if it was made by another policy, only until then.
    """
    forget()
    is_within = any(isinstance(finder, _Beside) for finder in sys.meta_path)
    beside = _Beside(file.resolve().parent)
    others = _take({name for name in _tops() if beside.find_spec(name) and not beside.has(name)})
    sys.meta_path.insert(0, beside)
    try:
        yield
    finally:
        _take(_tops() & others.keys())
        sys.modules.update(others)
        _left.append(beside)
        if is_within:  # the other goes on with its own modules
            forget()


def load(file: Path) -> ModuleType:
    """The module in ``file``, under a name from its path: two folders have a file of the same name.

    It is loaded anew each time, as what lies beside it is. What it raises passes through.
    """
    file = file.resolve()
    digest = hashlib.sha256(str(file).encode()).hexdigest()
    name = f"{file.stem}_{digest[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # so for each file that ends in .py
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
