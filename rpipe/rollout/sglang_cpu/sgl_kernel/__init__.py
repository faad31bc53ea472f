"""Which compiled kernels does SGLang import, where the real package needs CUDA and none may be called?

On CPU with `torch_native` attention none is called: every name imports, and raises NotImplementedError when it *is* called.
A stand-in that returned something would hide that SGLang took a wrong path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def missing(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__`: a function for every name, raising on call."""

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: Any, **options: Any) -> NoReturn:
            raise NotImplementedError(f"{module}.{name} needs the compiled sgl_kernel; this is the CPU stand-in")

        absent.__name__ = name
        return absent

    return attribute


__getattr__ = missing(__name__)
