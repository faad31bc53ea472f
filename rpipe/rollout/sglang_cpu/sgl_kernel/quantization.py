"""Which of these kernels exist on CPU? None; see `sgl_kernel.missing`."""

from . import missing

__getattr__ = missing(__name__)
