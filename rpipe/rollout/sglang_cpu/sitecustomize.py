"""What does SGLang import at its top level that a CPU installation lacks and a text model never calls?

torchvision, triton and soundfile. This folder goes on the PYTHONPATH of the engine child only, where Python imports this
file before anything else: an absent one of the three then imports as a hollow module whose every attribute exists. In a
rank it would break torch and Megatron, which ask whether triton is there; for them here `find_spec` still says no. What is
installed wins.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

HOLLOW = frozenset(("torchvision", "triton", "soundfile"))
INTERPOLATION = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")


class Hollow:
    """Base of every class found in a hollow module."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()

    def __init__(self, *args: Any, **options: Any) -> None: ...


class HollowModule(types.ModuleType):
    """Has every attribute: a class where the name looks like one, a further hollow module otherwise."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__package__ = name
        self.__file__ = __file__
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "0.0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._make(name)
        setattr(self, name, value)
        return value

    def _make(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        if name == "InterpolationMode":  # iterated over by transformers, and must be one and the same everywhere
            mode: Any = enum.Enum(name, {key: key.lower() for key in INTERPOLATION})
            for other in [m for n, m in sys.modules.items() if n.startswith("torchvision.transforms")]:
                setattr(other, name, mode)
            return mode
        if name[:1].isupper() and not name.isupper():
            return type(name, (Hollow,), {"__module__": self.__name__})
        return HollowModule(full)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As a decorator (`@triton.jit`, `@triton.jit(...)`) it leaves the function as it is."""
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]
        return lambda function: function

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (Hollow,)


class HollowFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in HOLLOW:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return HollowModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


_find_spec = importlib.util.find_spec


def _honest_find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
    """`find_spec` is how libraries ask whether a package is installed: a hollow one is not."""
    if isinstance(sys.modules.get(name), HollowModule):
        return None
    spec = _find_spec(name, package)
    return None if spec is not None and isinstance(spec.loader, HollowFinder) else spec


sys.meta_path.append(HollowFinder())  # last: an installed package is found before
importlib.util.find_spec = _honest_find_spec
