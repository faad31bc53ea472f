# What the training batch scripts do (they source this, from the checkout): environment, job, signals, requeue.
#
#   a signal                        means                        what is done
#   USR2 to the script              the time limit is near       stop at a safe point with a checkpoint, then requeue
#   TERM to the ranks               preemption (rpipe/train.py)  the same
#   TERM to the script, running     preemption                   the same
#   TERM to the script, cancelled   scancel                      stop at a safe point, for limits.stop_s at most
#
# The job's own exit code is the script's. 75: stopped at a safe point, to be started again; Slurm's requeue does that.

running() { scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null | grep -q 'JobState=RUNNING'; }

requeue() {  # a cancelled job must stay cancelled
    if running; then
        echo "slurm/job.sh: $1: requeue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
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

stop() { if running; then drain; else kill -TERM "$job" 2>/dev/null; fi; }

train() {  # NOTICE_S CONFIG [key=value ...]; %a in an argument is the array task's number
    set -u
    local rc=129 accelerator
    notice_s=$(notice_of "$@")
    local -a words=("${@:3}")
    [ $# -ge 2 ] || { echo "slurm/job.sh: wanted: CONFIG [key=value ...]" >&2; exit 2; }
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then words=("${words[@]//%a/$SLURM_ARRAY_TASK_ID}"); fi
    accelerator=$(cut -d' ' -f3 .venv/stamp 2>/dev/null)
    case ${accelerator:-cpu} in cuda) . slurm/env/a800.sh ;; npu) . slurm/env/ascend.sh ;; *) . slurm/env/cpu.sh ;; esac
    if [ -f slurm/env/site.sh ]; then . slurm/env/site.sh; fi  # yours: modules, interfaces; git ignores it
    echo "slurm/job.sh: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1))"
    ./launch.sh "$2" "limits.notice_s=$notice_s" ${words[@]+"${words[@]}"} &
    job=$!
    trap drain USR2
    trap stop TERM
    while [ "$rc" -gt 128 ] && kill -0 "$job" 2>/dev/null; do  # wait returns early when a signal was trapped
        wait "$job"
        rc=$?
    done
    if [ -n "${drainer:-}" ]; then kill "$drainer" 2>/dev/null; fi
    case $rc in
        75) requeue "stopped at a safe point" ;;
        140) requeue "asked to stop before it had begun" ;;  # USR2 ends a process that does not listen yet
    esac
    exit "$rc"
}
