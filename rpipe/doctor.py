"""`rpipe doctor`: is this machine ready, and what is to be done about what is not?

Everything is tried rather than looked up where trying is safe: two MPI ranks meet, a gloo group reduces, Megatron and SGLang
are imported, each in a process of its own with a time limit, so that a broken package is a row of the table and not its end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rpipe.policy.links import Link, judge
from rpipe.policy.seating import Seat
from rpipe.runtime import allocation, mpirun

State = Literal["ok", "missing", "wrong"]
PROBE_S = 180.0  # imports on a cold, loaded file system
SETUP = "./launch.sh setup"
LINK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20, "npu": 256 << 20}  # large enough for the bandwidth to count, not the latency
CPU_MODULES = Path(__file__).with_name("rollout") / "sglang_cpu"  # what SGLang imports and a CPU does not have


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: State
    found: str
    todo: str = ""
    needed: bool = True  # for a run on CPU


TORCH = """
import json, torch, torch.distributed as dist
found = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": [], "gloo": "absent", "nccl": "", "hccl": ""}
if torch.cuda.is_available():
    found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
npu = getattr(torch, "npu", None)
if npu is not None and npu.is_available():
    found["devices"] += [npu.get_device_name(i) for i in range(npu.device_count())]
    found["hccl"] = "available"
if dist.is_nccl_available():
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "built in, no device"
if dist.is_gloo_available():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(4); dist.all_reduce(x); found["gloo"] = "a group of one reduced"
    dist.destroy_process_group()
print(json.dumps(found))
"""
MEGATRON = "import megatron.core as m, json; print(json.dumps({'version': m.__version__}))"
SGLANG = """
import json, platform, sglang, torch, transformers
import sglang.srt.entrypoints.http_server
print(json.dumps({"version": sglang.__version__, "python": platform.python_version(), "torch": torch.__version__,
                  "transformers": transformers.__version__}))
"""
MPI = """
import json
from mpi4py import MPI
world = MPI.COMM_WORLD
met = world.allreduce(world.rank + 1)
if world.rank == 0:
    library = MPI.Get_library_version().strip(chr(0)).splitlines()[0].split(", package")[0]
    print(json.dumps({"size": world.size, "sum": met, "library": library}))
"""


def main(argv: Sequence[str]) -> int:
    """Print the table; 0 where a CPU run has all it needs, 1 where not."""
    parser = argparse.ArgumentParser(prog="rpipe doctor", description="What this machine has, what it lacks, what to do.")
    parser.add_argument("--json", action="store_true", help="for machines: a list of {name, state, found, todo, needed}")
    parser.add_argument("--engine-python", metavar="PATH", default=sys.executable, help="engine.python; default: this one")
    parser.add_argument("--links", action="store_true", help="only the links between the nodes of this Slurm allocation")
    asked = parser.parse_args(list(argv))
    checks = check_links() if asked.links else examine(asked.engine_python)
    if asked.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        _print(checks)
    return 1 if unmet(checks) or (asked.links and any(check.state != "ok" for check in checks)) else 0


def unmet(checks: Sequence[Check]) -> list[Check]:
    """What a run on CPU lacks."""
    return [check for check in checks if check.needed and check.state != "ok"]


def examine(engine_python: str) -> list[Check]:
    """All checks, two at a time, in the table's order."""
    tasks: list[Callable[[], list[Check]]] = [
        check_python, check_mpi, check_torch, check_megatron, lambda: check_engine(engine_python),
        check_apex, check_transformer_engine, check_ascend, check_slurm, check_links,
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        return [check for found in pool.map(lambda task: task(), tasks) for check in found]


# ---- one row each ----------------------------------------------------------------------------------------------------


def check_python() -> list[Check]:
    found = f"{platform.python_version()}, {sys.executable}"
    if (3, 10) <= sys.version_info[:2] <= (3, 11):
        return [Check("Python", "ok", found)]
    return [Check("Python", "wrong", found, f"3.10 or 3.11: {SETUP} --python PATH")]


def check_mpi() -> list[Check]:
    try:
        starter = mpirun.find()
    except mpirun.LaunchError as error:
        return [Check("MPI", "missing", str(error), SETUP)]
    command = starter.command(2, [sys.executable, "-m", "mpi4py", "-c", MPI])
    with starter.environment() as told:
        found, words = probe(command, told)
    remedy = f"load the site's Open MPI, or {SETUP}"
    if found is None:
        return [Check("MPI", "wrong", f"{starter.path}: {words}", f"two ranks did not meet: {remedy}")]
    if (found["size"], found["sum"]) != (2, 3):
        todo = f"every rank is alone, as mpi4py's library is not the starter's: {remedy}"
        return [Check("MPI", "wrong", f"{starter.path} with {found['library']}: world size {found['size']}, wanted 2", todo)]
    return [Check("MPI", "ok", f"{found['library']}; 2 ranks met through {starter.path}")]


def check_torch() -> list[Check]:
    found, error = probe([sys.executable, "-c", TORCH], {})
    if found is None:
        return [Check("torch", "missing" if "No module named 'torch'" in error else "wrong", error, SETUP)]
    rows = [Check("torch", "ok", found["version"])]
    devices = ", ".join(f"{found['devices'].count(name)} x {name}" for name in dict.fromkeys(found["devices"]))
    todo = "" if devices else "fine on CPU; else the vendor's driver, and setup --accelerator cuda|npu"
    rows.append(_optional("accelerator", devices, todo))
    gloo = found["gloo"] != "absent"
    rows.append(Check("gloo", "ok" if gloo else "wrong", found["gloo"], "" if gloo else "torch was built without it: " + SETUP))
    rows.append(_optional("NCCL", found["nccl"], "comes with torch's CUDA wheel: setup --accelerator cuda"))
    rows.append(_optional("HCCL", found["hccl"], "comes with CANN and torch_npu: setup --accelerator npu"))
    return rows


def check_megatron() -> list[Check]:
    found, error = probe([sys.executable, "-c", MEGATRON], {"TORCHDYNAMO_DISABLE": "1"})
    if found is None:
        state: State = "missing" if "No module named 'megatron" in error else "wrong"
        return [Check("megatron-core", state, error, SETUP)]
    return [Check("megatron-core", "ok", found["version"])]


def check_engine(python: str) -> list[Check]:
    if shutil.which(python) is None:
        return [Check("engine.python", "wrong", f"{python} does not start", "name an interpreter that has SGLang")]
    env = {"PYTHONPATH": str(CPU_MODULES), "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    other = not Path(python).samefile(sys.executable) if Path(python).exists() else True
    found, error = probe([python, "-c", SGLANG], {} if other else env)
    if found is None:
        state: State = "missing" if "No module named 'sglang'" in error else "wrong"
        return [Check("SGLang", state, f"{python}: {error}", SETUP)]
    facts = f"{found['version']} with torch {found['torch']}, transformers {found['transformers']}"
    return [Check("engine.python", "ok", f"Python {found['python']}, {python}"), Check("SGLang", "ok", facts)]


def check_apex() -> list[Check]:
    return [apex_at(_package("apex"))]


def apex_at(place: Path | None) -> Check:
    """NVIDIA's apex or the unrelated web toolkit of that name on PyPI? Looked at, not imported: that one breaks on import."""
    if place is None:
        return _optional("apex", "", "for CUDA alone: build NVIDIA's from source; PyPI's apex is another package")
    if (place / "optimizers").is_dir() and (place / "multi_tensor_apply").is_dir():
        return Check("apex", "ok", f"NVIDIA's, {place}", needed=False)
    found = f"{place} is not NVIDIA's: PyPI's unrelated web toolkit breaks Megatron's import"
    return Check("apex", "wrong", found, f"{sys.executable} -m pip uninstall apex")


def check_transformer_engine() -> list[Check]:
    version = _version("transformer_engine", "transformer-engine")
    return [_optional("TransformerEngine", version, "for CUDA alone, where it imports: NVIDIA's wheel or source")]


def check_ascend() -> list[Check]:
    return [
        _optional("torch_npu", _version("torch_npu", "torch-npu"), "Ascend alone: setup --accelerator npu"),
        _optional("MindSpeed", _version("mindspeed", "mindspeed"), "Ascend alone: from source, branch core_r0.16.0"),
    ]


def check_slurm() -> list[Check]:
    srun = shutil.which("srun")
    if srun is None or shutil.which("sinfo") is None:
        return [_optional("Slurm", "", "one machine needs none; on a cluster run this where srun and sinfo are")]
    version = _output(["sinfo", "--version"]) or "sinfo does not answer"
    plugins = mpirun.slurm_mpi(srun)
    pmix = any(name.startswith("pmix") for name in plugins)
    listed = ", ".join(plugins) or "none listed"
    todo = "" if pmix else "jobs start with srun --mpi=pmix: install Slurm's PMIx plug-in (it opens the unversioned libpmix)"
    return [
        Check("Slurm", "ok", version, needed=False),
        Check("Slurm's MPI plug-ins", "ok" if pmix else "wrong", listed, todo, needed=False),
    ]


def check_links() -> list[Check]:
    """Point to point and all-reduce between the nodes of this allocation; outside of one there is nothing to try."""
    try:
        starter = mpirun.find()
        found = allocation.components() if starter.kind == "srun" else ()
    except mpirun.LaunchError as error:
        return [Check("links between nodes", "wrong", str(error), needed=False)]
    seats = [
        Seat(0, name, 0, "training" if k else "rollout", 0) for k, component in enumerate(found) for name in component.names
    ]
    if len(seats) < 2:
        return [_optional("links between nodes", "", "tried inside a Slurm allocation of several nodes")]
    accelerator = installed_for()
    program = [
        sys.executable, "-m", "mpi4py", "-m", "rpipe.runtime.linktest", "--ranks", str(len(seats)),
        "--accelerator", accelerator, "--bytes", str(LINK_BYTES[accelerator]),
    ]  # fmt: skip
    command = [*starter.srun, *allocation.Plan(found, seats).srun_words(program)]
    with starter.environment() as environment:
        told, words = probe(command, environment)
    if told is None:
        return [Check("links between nodes", "wrong", words, "docs/slurm.md, When hosts do not meet", needed=False)]
    return link_rows([Link(*link) for link in told["links"]], told["all_reduce_bytes_per_s"], told["backend"])


def link_rows(found: Sequence[Link], all_reduce_bytes_per_s: float, backend: str) -> list[Check]:
    """The measured links as rows; what is slow is named."""
    verdict = judge(found)
    slowest = min(found, key=lambda link: link.bytes_per_s)
    figures = f"median {_rate(verdict.median_bytes_per_s)}, slowest {_rate(slowest.bytes_per_s)}"
    facts = f"{len(found)} pairs over {backend}: {figures}"
    slow = [f"node {name}" for name in verdict.slow_nodes]
    slow += [f"{link.name} ({_rate(link.bytes_per_s)})" for link in verdict.slow_links]
    todo = "slower than half of the others: look at its cable, port and interface (docs/slurm.md)" if slow else ""
    return [
        Check("links between nodes", "wrong" if slow else "ok", "; ".join([facts, *slow]), todo, needed=False),
        Check("all-reduce", "ok", f"{_rate(all_reduce_bytes_per_s)} on every link", needed=False),
    ]


def installed_for() -> Literal["cpu", "cuda", "npu"]:
    """The accelerator that launch.sh made this environment for."""
    try:
        word = (Path(sys.prefix) / "stamp").read_text().split()[2]
    except (OSError, IndexError):
        return "cpu"
    return word if word in ("cuda", "npu") else "cpu"  # type: ignore[return-value]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


# ---- how ---------------------------------------------------------------------------------------------------------------


def probe(command: Sequence[str], extra: dict[str, str]) -> tuple[dict[str, Any] | None, str]:
    """(what the program printed as JSON on its last line, "") or (None, its last words)."""
    env = {**os.environ, **extra}
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, errors="replace", timeout=PROBE_S, env=env)
    except subprocess.TimeoutExpired:
        return None, f"no answer in {PROBE_S:.0f} s"
    except OSError as error:
        return None, str(error)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found, ""
    words = [line.strip() for line in done.stderr.splitlines() if line.strip(" -")]
    errors = [line for line in words if "Error" in line.split(":")[0]]
    return None, (errors or words or [f"exit code {done.returncode}"])[-1]


def _optional(name: str, found: str, todo: str) -> Check:
    return Check(name, "ok", found, needed=False) if found else Check(name, "missing", "", todo, needed=False)


def _package(name: str) -> Path | None:
    """A package's folder, without importing it."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def _version(module: str, distribution: str) -> str:
    """Of an installed package; empty where it is not."""
    if importlib.util.find_spec(module) is None:
        return ""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"{_package(module)}"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _print(checks: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.table import Table

    colour = {"ok": "green", "wrong": "red", "missing": "red"}
    table = Table("what", "state", "found", "what to do")
    for check in checks:
        state = check.state if check.needed or check.state != "missing" else "missing (optional)"
        style = "dim" if state == "missing (optional)" else colour[check.state]
        table.add_row(check.name, f"[{style}]{state}[/]", check.found, check.todo)
    console = Console()
    console.print(table)
    lacking = [check.name for check in unmet(checks)]
    console.print(f"A run on CPU lacks: {', '.join(lacking)}." if lacking else "A run on CPU has all it needs.")
