# What the training batch scripts do (they source this, from the checkout): environment, job, signals, requeue.
#
#   a signal                        means                        what is done
#   USR2 to the script              the time limit is near       stop at a safe point with a checkpoint, then requeue
#   TERM to the ranks               preemption (rpipe/train.py)  the same
#   TERM to the script, running     preemption                   the same
#   the job fails, a node is gone   the ranks were quicker       requeue
#                                   than Slurm
#   TERM to the script, cancelled   scancel                      stop at a safe point, for limits.stop_s at most
#
# The job's own exit code is the script's. 75: stopped at a safe point, to be started again; Slurm's requeue does that.

PROBE_S=60  # more than Slurm's own patience with a node that does not answer (TCPTimeout, MessageTimeout)

running() { scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null | grep -q 'JobState=RUNNING'; }

requeue() {  # a cancelled job must stay cancelled
    if running; then
        echo "slurm/job.sh: $1: requeue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
}

nodes_answer() {  # a step of one task a node
    local groups=() nodes=${SLURM_JOB_NUM_NODES:-1}
    if [ -n "${SLURM_HET_SIZE:-}" ]; then groups=(--het-group=0,1); else groups=("--ntasks=$nodes"); fi
    timeout "$PROBE_S" srun "${groups[@]}" --ntasks-per-node=1 --overlap --mpi=none true >/dev/null 2>&1
}

# Slurm counts steps from 0 again when it starts a job again, and what ends late of an earlier start (a step behind a link that was
# cut) ends the step that has its number now. Each start uses two: these are skipped.
skip_steps() {
    local i
    for ((i = 0; i < 2 * ${SLURM_RESTART_COUNT:-0}; i++)); do
        timeout "$PROBE_S" srun --nodes=1 --ntasks=1 --overlap --mpi=none --cpu-bind=none --nodelist="$SLURMD_NODENAME" true >/dev/null 2>&1
    done
}

notice_of() {  # DEFAULT ARGUMENT...: limits.notice_s as the job will see it
    local word found=$1
    for word in "${@:2}"; do
        case $word in limits.notice_s=*) found=${word#*=} ;; esac
    done
    printf '%.0f' "$found"
}

drain() {  # ask for a safe point; what does not get there in nine tenths of the notice goes on from its last checkpoint
    [ -z "${drainer:-}" ] || return 0
    kill -USR2 "$job" 2>/dev/null
    local bound_s=$((notice_s * 9 / 10))
    # read waits without a process of its own, that would outlive this one
    { read -rt "$bound_s" <> <(:); requeue "no safe point within $bound_s s"; } &
    drainer=$!
}

asked() {  # WHAT: at once, or when there is a job to tell
    signalled=$1
    if [ -n "${job:-}" ]; then "$1"; else early=$1; fi
}

stop() { if running; then drain; else kill -TERM "$job" 2>/dev/null; fi; }

train() {  # NOTICE_S CONFIG [key=value ...]; %a in an argument is the array task's number
    trap 'asked drain' USR2
    trap 'asked stop' TERM
    set -u
    local accelerator
    notice_s=$(notice_of "$@")
    local -a words=("${@:3}")
    [ $# -ge 2 ] || { echo "slurm/job.sh: wanted: CONFIG [key=value ...]" >&2; exit 2; }
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then words=("${words[@]//%a/$SLURM_ARRAY_TASK_ID}"); fi
    accelerator=$(cut -d' ' -f3 .venv/stamp 2>/dev/null)
    case ${accelerator:-cpu} in cuda) . slurm/env/a800.sh ;; npu) . slurm/env/ascend.sh ;; *) . slurm/env/cpu.sh ;; esac
    if [ -f slurm/env/site.sh ]; then . slurm/env/site.sh; fi  # yours: modules, interfaces; git ignores it
    echo "slurm/job.sh: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1))"
    skip_steps
    ./launch.sh "$2" "limits.notice_s=$notice_s" ${words[@]+"${words[@]}"} &
    job=$!
    if [ -n "${early:-}" ]; then asked "$early"; fi
    local rc code
    while :; do
        signalled=""
        wait "$job"
        code=$?
        [ "$code" = 127 ] || rc=$code  # 127: it was waited for already
        [ -n "$signalled" ] || break  # a trapped signal ends the wait early, with a code of its own
    done
    if [ -n "${drainer:-}" ]; then kill "$drainer" 2>/dev/null; fi
    case $rc in
        75) requeue "stopped at a safe point" ;;
        1) nodes_answer || requeue "a node does not answer" ;;
        140) requeue "asked to stop before it had begun" ;;  # USR2 ends a process that does not listen yet
    esac
    exit "$rc"
}
