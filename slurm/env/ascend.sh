# 8 x Ascend 910B3 a node, RoCE of the NPUs' own. Unrun: from CANN's and MindSpeed's documents. docs/slurm.md: how to check.
# . /usr/local/Ascend/ascend-toolkit/set_env.sh            # your site's place, in slurm/env/site.sh
export no_proxy="127.0.0.1,localhost${no_proxy:+,$no_proxy}"
export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-600}  # s, while the first collective waits for its last rank
export HCCL_EXEC_TIMEOUT=${HCCL_EXEC_TIMEOUT:-600}        # s, a collective; like limits.collective_s
export HCCL_WHITELIST_DISABLE=1                           # no list of hosts is kept
export CUDA_DEVICE_MAX_CONNECTIONS=1                      # MindSpeed reads Megatron's
export TASK_QUEUE_ENABLE=${TASK_QUEUE_ENABLE:-1}
# export HCCL_SOCKET_IFNAME=enp189s0f0                    # else what the job finds
ulimit -n "$(ulimit -Hn)" 2>/dev/null
