#!/usr/bin/env bash
# A throw-away Slurm on this machine, for tests: no root services, no cgroups, no containers.
#   start_slurm.sh start | stop        (both may be repeated)
# Environment:
#   SLURM_SANDBOX  folder of everything it writes
#   PORT_BASE      slurmctld listens on +17, the nodes' slurmd on +18, +19, ...
#   NODES          virtual nodes, all on this machine (default 1), each of 32 CPUs and 8 "GPUs",
#                  which are character devices cloned from the null device
# Clients need SLURM_CONF=$SLURM_SANDBOX/etc/slurm.conf. Partitions: `gpu` (default), and `scav`,
# whose jobs are requeued, after 15 s of grace, when one of `gpu` needs their place.
set -euo pipefail
sandbox=${SLURM_SANDBOX:?set it to a folder}
port=${PORT_BASE:-17300}
num_nodes=${NODES:-1}
num_gpus=8
host=$(hostname -s)
export SLURM_CONF=$sandbox/etc/slurm.conf

nodes=()
for ((i = 0; i < num_nodes; i++)); do nodes+=("n$i"); done

is_alive() { # pid file, name of the program
  local pid
  pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ]
}

stop() {
  local file program pid
  for file in "$sandbox"/run/slurmd-*.pid "$sandbox/run/slurmctld.pid" "$sandbox/run/munged.pid"; do
    program=$(basename "$file" .pid)
    program=${program%%-*}
    is_alive "$file" "$program" || continue
    pid=$(cat "$file")
    kill -TERM "$pid"
    for ((i = 0; i < 100; i++)); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
  done
}

configure() {
  mkdir -p "$sandbox"/{etc,run,log,spool/ctld,munge,dev}
  if [ ! -s "$sandbox/munge/munge.key" ]; then
    dd if=/dev/urandom of="$sandbox/munge/munge.key" bs=1 count=1024 status=none
    chmod 400 "$sandbox/munge/munge.key"
  fi
  local node memory i
  memory=$(($(awk '/MemTotal/{print $2}' /proc/meminfo) / 1024 - 512))
  echo "AutoDetect=off" >"$sandbox/etc/gres.conf"
  for node in "${nodes[@]}"; do
    mkdir -p "$sandbox/dev/$node" "$sandbox/spool/$node"
    for ((i = 0; i < num_gpus; i++)); do
      [ -e "$sandbox/dev/$node/nvidia$i" ] || mknod "$sandbox/dev/$node/nvidia$i" c 1 3
    done
    echo "NodeName=$node Name=gpu Type=h200 File=$sandbox/dev/$node/nvidia[0-$((num_gpus - 1))]" \
      >>"$sandbox/etc/gres.conf"
  done
  cat >"$SLURM_CONF" <<CONF
ClusterName=sandbox
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$((port + 17))
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$sandbox/run/munge.socket
CredType=cred/munge
StateSaveLocation=$sandbox/spool/ctld
SlurmdSpoolDir=$sandbox/spool/%n
SlurmctldPidFile=$sandbox/run/slurmctld.pid
SlurmdPidFile=$sandbox/run/slurmd-%n.pid
SlurmctldLogFile=$sandbox/log/slurmctld.log
SlurmdLogFile=$sandbox/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2
JobRequeue=1
KillWait=20
OverTimeLimit=0
MaxArraySize=1001
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc=$sandbox/log/jobcomp.txt
SlurmdParameters=config_overrides
CONF
  for ((i = 0; i < num_nodes; i++)); do
    echo "NodeName=${nodes[i]} NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 18 + i)) CPUs=32" \
      "RealMemory=$memory Gres=gpu:h200:$num_gpus State=UNKNOWN"
  done >>"$SLURM_CONF"
  cat >>"$SLURM_CONF" <<CONF
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=scav Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=15
CONF
}

start() {
  configure
  is_alive "$sandbox/run/munged.pid" munged ||
    /usr/sbin/munged --force --key-file="$sandbox/munge/munge.key" \
      --socket="$sandbox/run/munge.socket" --pid-file="$sandbox/run/munged.pid" \
      --log-file="$sandbox/log/munged.log" --seed-file="$sandbox/munge/munge.seed"
  is_alive "$sandbox/run/slurmctld.pid" slurmctld || slurmctld -f "$SLURM_CONF"
  local node
  for node in "${nodes[@]}"; do
    is_alive "$sandbox/run/slurmd-$node.pid" slurmd || slurmd -f "$SLURM_CONF" -N "$node"
  done
  for ((i = 0; i < 600; i++)); do
    [ "$(sinfo -h -N -p gpu -o %T 2>/dev/null | grep -c '^idle$')" = "$num_nodes" ] && return 0
    for node in $(sinfo -h -N -p gpu -t down,drain -o %N 2>/dev/null); do
      scontrol update nodename="$node" state=resume 2>/dev/null || true
    done
    sleep 0.2
  done
  echo "no idle node after two minutes" >&2
  tail -n 20 "$sandbox"/log/*.log >&2
  return 1
}

case ${1:-} in
start) start ;;
stop) stop ;;
*) sed -n '2,10p' "$0" && exit 2 ;;
esac
