#!/usr/bin/env bash
# The first thing to run on a GPU: does all of it work on one device? Prints a table of PASS and FAIL; exits with 1 at any FAIL.
#   srun -N1 --gpus=1 --pty slurm/smoke_gpu.sh          or, on a machine with a GPU:  slurm/smoke_gpu.sh [cuda|npu|cpu]
# Unrun on a GPU so far (cpu, which tries the script itself, was run). Takes ten minutes, most of them the environment's.
set -u
cd "$(dirname "$0")/.."
accelerator=${1:-cuda}
folder=$(mktemp -d "${TMPDIR:-/tmp}/rpipe-smoke.XXXXXX")
python=.venv/bin/python
engine=$python
rows=()
unset "${!SLURM_@}"  # one process each here, and mpirun for the job

check() {  # NAME COMMAND...: its last line is what was found
    local name=$1 log="$folder/${#rows[@]}.log" verdict=PASS
    shift
    printf '%s ...\n' "$name"
    timeout 1800 bash -c '"$@"' - "$@" >"$log" 2>&1 || verdict=FAIL
    rows+=("$(printf '%-4s  %-38s  %s' "$verdict" "$name" "$(grep -v '^ *$' "$log" | tail -n 1 | cut -c1-110)")")
    [ "$verdict" = PASS ]
}

ask() { "$python" -c "$1"; }
run() { ./launch.sh configs/smoke.yaml "cluster.accelerator=$accelerator" "engine.python=$engine" "run.dir=$folder/run" "$@"; }
export -f ask run  # for timeout's bash
export python

check "environment" ./launch.sh setup --accelerator "$accelerator"
case $accelerator in
    cuda)
        engine=.venv-engine/bin/python
        [ -f slurm/env/site.sh ] && . slurm/env/site.sh
        check "driver" nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
        check "NCCL" ask '
import torch, torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(1 << 20, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize(); dist.destroy_process_group()
print("NCCL", ".".join(map(str, torch.cuda.nccl.version())))'
        check "TransformerEngine or apex" ask '
import importlib.util as u
found = [n for n in ("transformer_engine", "apex") if u.find_spec(n)]
print("found:", *found) if found else print("neither: Megatron falls back to torch, slower (docs/slurm.md)")'
        ;;
    npu)
        [ -f slurm/env/site.sh ] && . slurm/env/site.sh
        check "driver" npu-smi info
        check "HCCL" ask '
import torch, torch_npu, torch.distributed as dist
dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(1 << 20, device="npu"); dist.all_reduce(x); torch.npu.synchronize(); dist.destroy_process_group(); print("HCCL")'
        ;;
esac
check "bf16 matrix product, device: $accelerator" ask "
import torch
$([ "$accelerator" = npu ] && echo 'import torch_npu')
a = torch.randn(1024, 1024, device='$accelerator', dtype=torch.bfloat16)
error = ((a @ a).float().cpu() - a.float().cpu() @ a.float().cpu()).abs().max().item()
assert error < 2.0, error
print(f'largest error {error:.3f} of values around 32')"
check "Megatron" ask '
import importlib.util, sys
if importlib.util.find_spec("torch_npu"): import torch_npu, mindspeed.megatron_adaptor
import megatron.core; print("megatron-core", megatron.core.__version__)'
check "SGLang ($engine)" "$python" -m rpipe.cli doctor --engine-python "$engine"
export folder accelerator engine
check "ten iterations" run
check "engine and trainer agree" ask "
import json
gaps = [i['logprob_gap_mean'] for i in json.load(open('$folder/run/report.json'))['iterations']]
assert len(gaps) == 10 and max(gaps) < 0.05, gaps
print(f'mean gap of log-probs at most {max(gaps):.1e} over {len(gaps)} iterations')"
check "goes on from its checkpoint" run run.iterations=11

printf '\n'
printf '%s\n' "${rows[@]}" | tee "$folder/table.txt"
printf '\nlogs: %s\n' "$folder"
! grep -q '^FAIL' "$folder/table.txt"
