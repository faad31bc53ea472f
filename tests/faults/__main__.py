"""Every fault, for real: prints the table of docs/faults.md.

    python -m tests.faults [--scripted] [--only local|cluster]

`--scripted` takes engines that draw tokens instead of SGLang. Needs root (namespaces, a small filesystem) and Debian's Slurm
packages for the cluster's part. One engine and one rank are killed by their process numbers, of this very job.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from tests.faults import local, on_cluster
from tests.faults.row import Row, table
from tests.slurm.cluster import Cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripted", action="store_true")
    parser.add_argument("--only", choices=("local", "cluster"))
    asked = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rpipe-faults-") as folder:
        if asked.only != "cluster":
            rows += local.chain(Path(folder) / "local", real=not asked.scripted)
        if asked.only != "local":
            with Cluster(Path(f"/tmp/rpipe-faults-slurm-{os.getpid()}"), silent_s=10) as cluster:
                rows += on_cluster.chain(cluster, Path(folder) / "cluster", real=not asked.scripted)
    print(f"\nengines: {'scripted' if asked.scripted else 'SGLang'}; trainer: Megatron\n")
    print(table(rows))


if __name__ == "__main__":
    main()
