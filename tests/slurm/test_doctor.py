"""Does doctor measure the links of an allocation and name the slow node?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.slurm.cluster import Cluster

DOCTOR = f"{sys.executable} -m rpipe.cli doctor --links --json"


def links(cluster: Cluster, folder: Path) -> list[dict[str, Any]]:
    out = folder / "doctor"
    job = cluster.submit("-N3", "--exclusive", "-o", str(out), "--open-mode=truncate", "--wrap", DOCTOR)
    cluster.wait(job, 120)
    text = out.read_text()
    return json.loads(text[text.index("[") :])  # type: ignore[no-any-return]


def test_it_names_the_node_with_the_slow_link_and_no_other(cluster: Cluster, tmp_path: Path) -> None:
    cluster.slow_down("n2", "200mbit")  # against a bridge in memory
    try:
        between, reduced = links(cluster, tmp_path)
    finally:
        cluster.full_speed("n2")
    assert between["state"] == "wrong" and between["found"].endswith("; node n2"), between
    assert "3 pairs over gloo" in between["found"] and reduced["state"] == "ok"
