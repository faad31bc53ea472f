"""What is written into the test cluster's slurm.conf? Short timers, so that faults are found in seconds; no accounting.

Partitions: "all" (the hosts), "urgent" (the same hosts; takes them from jobs in "all"), "paper" and "ascend" (hosts that are
never woken: 'sbatch --test-only -p paper' tells whether a full-size job would be scheduled).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.slurm.cluster import Cluster

CONTROLLER = "ctl"
NETWORK = "10.77.0"
GRACE_S = 120  # from a preempted job's SIGTERM to its end


def slurm_conf(c: Cluster) -> str:
    """The whole file."""
    nodes = "\n".join(f"NodeName={name} NodeAddr={NETWORK}.{i} NodeHostname={name}" for i, name in enumerate(c.names, 1))
    return f"""\
ClusterName=test
SlurmctldHost={CONTROLLER}({NETWORK}.254)
SlurmUser=root
AuthType=auth/munge
# cred_expire is also how long a requeued job must wait (120 s by default)
AuthInfo=socket={c.root}/run/munge.socket,cred_expire=5
CredType=cred/munge
# PMIx makes a folder of the same name on every host, and these share one /tmp
TmpFS={c.root}/tmp/%n
StateSaveLocation={c.root}/state
SlurmdSpoolDir={c.root}/spool/%n
SlurmctldPidFile={c.root}/run/slurmctld.pid
SlurmdPidFile={c.root}/run/slurmd-%n.pid
SlurmctldLogFile={c.root}/log/slurmctld.log
SlurmdLogFile={c.root}/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SlurmdParameters=config_overrides
GresTypes=gpu,npu
ReturnToService=1
SlurmdTimeout={c.silent_s}
SlurmctldTimeout=10
MessageTimeout=10
TCPTimeout=2
KillWait=5
InactiveLimit=0
MinJobAge=3600
OverTimeLimit=0
EnforcePartLimits=ALL
# a job in "urgent" takes the hosts of one in "all", after the grace time
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,requeue_delay=1
# hosts that are never woken: 'sbatch --test-only -p paper' tells whether a full-size job would be scheduled
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=86400
SuspendExcNodes=n[1-{c.hosts}]
NodeName=DEFAULT CPUs={c.cpus} RealMemory={c.memory_mb} Gres=gpu:{c.gpus} State=UNKNOWN
{nodes}
PartitionName=all Nodes=n[1-{c.hosts}] Default=YES MaxTime=INFINITE GraceTime={GRACE_S} State=UP
PartitionName=urgent Nodes=n[1-{c.hosts}] MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
NodeName=p[1-{c.paper_hosts}] NodeAddr=127.0.0.1 CPUs=128 RealMemory=1000000 Gres=gpu:8 State=CLOUD
PartitionName=paper Nodes=p[1-{c.paper_hosts}] MaxTime=2-0 State=UP
NodeName=a[1-{c.paper_hosts}] NodeAddr=127.0.0.1 CPUs=192 RealMemory=1500000 Gres=npu:8 State=CLOUD
PartitionName=ascend Nodes=a[1-{c.paper_hosts}] MaxTime=2-0 State=UP
"""
