"""What does a helper process of ours inherit?

Little: an allow-list of variables. MPI's would make the child believe that it is a rank; secrets are nobody's business.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SYSTEMROOT")


def child_environment(hash_seed: int = 0) -> dict[str, str]:
    """The environment of a helper that runs this interpreter with our modules, one thread, and a fixed hash seed."""
    root = str(Path(__file__).resolve().parents[2])
    path = list(dict.fromkeys([*(p for p in sys.path if p), root]))
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        **kept,
        **threads,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
