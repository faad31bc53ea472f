# 8 x A800 a node, InfiniBand or RoCE. Unrun: written from NVIDIA's and SGLang's documents. docs/slurm.md says how to check.
# module load cuda/12.8 openmpi/5.0                        # your site's names, in slurm/env/site.sh
export no_proxy="127.0.0.1,localhost${no_proxy:+,$no_proxy}"
export CUDA_DEVICE_MAX_CONNECTIONS=1      # Megatron with tensor parallelism: the order of launches is the order of work
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}            # 4 us x 2^22 = 17 s: a link that flaps does not end the job
export NCCL_IB_RETRY_CNT=${NCCL_IB_RETRY_CNT:-7}
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1  # a dead peer is an error and not a hang
export NCCL_NVLS_ENABLE=0                 # Hopper's; A800 has none
# export NCCL_SOCKET_IFNAME=bond0         # else what the job finds; NCCL_IB_HCA=mlx5_0,mlx5_1,... where not all are cabled
# export NCCL_IB_GID_INDEX=3              # RoCE v2
ulimit -l unlimited 2>/dev/null           # registered memory
ulimit -n "$(ulimit -Hn)" 2>/dev/null
