#!/usr/bin/env bash
# Start train.py on each machine of a cluster: the variables that its engine sets become flags of accelerate launch.
#   accelerate_configs/start.sh train.py --data my.yaml --sync-bn
# Flags of accelerate launch stand before the script: --config_file accelerate_configs/deepspeed_zero2.yaml train.py
# PROCESSES_PER_MACHINE, if it is set, replaces the last column. Without a number there, or with 0, a machine gets a
# process per GPU, or one. The port is 29500 if its variable is not set, under SLURM one made of the job's number.
set -euo pipefail
shopt -s inherit_errexit # an error in $(...) ends the script

# The first engine whose variable for the machine's rank is set.
# engine    rank of this machine  number of machines    addresses, main first  port             processes per machine
table='
Kubeflow    PET_NODE_RANK         PET_NNODES            PET_MASTER_ADDR        PET_MASTER_PORT  PET_NPROC_PER_NODE
SkyPilot    SKYPILOT_NODE_RANK    SKYPILOT_NUM_NODES    SKYPILOT_NODE_IPS      MASTER_PORT      SKYPILOT_NUM_GPUS_PER_NODE
OpenMPI     OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  MASTER_ADDR            MASTER_PORT      PROCESSES_PER_MACHINE
SLURM       SLURM_NODEID          SLURM_STEP_NUM_NODES  SLURM_STEP_NODELIST    MASTER_PORT      SLURM_GPUS_ON_NODE
Kubernetes  JOB_COMPLETION_INDEX  MACHINES              MASTER_ADDR            MASTER_PORT      PROCESSES_PER_MACHINE
'

refuse() {
	echo "error: $*" >&2
	exit 2
}

# Print the value of a variable that must be set.
value() {
	[ -n "${!1:-}" ] || refuse "$rank_variable is set ($engine), $1 is not; set it on each machine (SLURM: start by srun)"
	echo "${!1}"
}

# Print the value of a variable that must be a number from $2.
number() {
	local text
	text=$(value "$1")
	if ! [[ $text =~ ^[0-9]{1,6}$ ]] || ((10#$text < $2)); then
		refuse "$1 is '$text' instead of a number from $2"
	fi
	echo $((10#$text))
}

[[ " $* " == *".py "* ]] || refuse "no script to start; give train.py and its flags"
while read -r engine rank_variable machines_variable addresses_variable port_variable processes_variable; do
	[ -z "${rank_variable:+${!rank_variable:-}}" ] || break
done <<<"$table"
[ -n "$engine" ] || refuse "no engine has set the rank of this machine; on one machine start python train.py"

tasks=1
case $engine in
OpenMPI) tasks=${OMPI_COMM_WORLD_LOCAL_SIZE:-1} ;;
SLURM)
	tasks=${SLURM_STEP_TASKS_PER_NODE:-1} # 1(x2): one on each of two
	: "${MASTER_PORT:=$((20000 + (${SLURM_JOB_ID:-0} + 97 * ${SLURM_STEP_ID:-0}) % 20000))}"
	;;
esac
[[ $tasks =~ ^1(\(x[0-9]+\))?$ ]] ||
	refuse "$engine has started $tasks tasks on a machine; start one on each (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node --bind-to none)"

rank=$(number "$rank_variable" 0)
machines=$(number "$machines_variable" 1)
((rank < machines)) || refuse "$rank_variable is $rank and $machines_variable $machines; ranks are from 0 to $((machines - 1))"
main=127.0.0.1
if ((machines > 1)); then # node03 of SLURM's node[03-10,12],other; the first line of SkyPilot's list
	main=$(value "$addresses_variable" | sed -n '1{s/\[\([^],-]*\)[^]]*\]/\1/g;s/[, ].*//;p}')
fi
[ -n "${!port_variable:-}" ] || declare "$port_variable=29500"
port=$(number "$port_variable" 1)
[ -z "${PROCESSES_PER_MACHINE:-}" ] || processes_variable=PROCESSES_PER_MACHINE
case ${!processes_variable:-auto} in
0 | auto | cpu | gpu) processes=$(python -c 'import torch; print(max(1, torch.cuda.device_count()))') ;;
*) processes=$(number "$processes_variable" 1) ;;
esac
total=$((machines * processes))

if [[ $1 == *.py ]]; then
	# accelerate launch would not pass signals on to a single process.
	((total > 1)) || exec python "$@"
	# It would also wait for all machines, before the doctor could name the one that cannot be reached.
	if [[ " $* " == *" --doctor "* ]]; then
		export MASTER_ADDR=$main MASTER_PORT=$port WORLD_SIZE=$total LOCAL_WORLD_SIZE=$processes
		trap 'kill $(jobs -p)' TERM
		for ((local_rank = 0; local_rank < processes; local_rank++)); do
			RANK=$((rank * processes + local_rank)) LOCAL_RANK=$local_rank python "$@" &
		done
		code=0
		for process in $(jobs -p); do wait "$process" || code=$?; done
		exit $code
	fi
fi

# The launcher passes these signals on; the second name is that of torch before PET_SIGNALS_TO_HANDLE.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export TORCHELASTIC_SIGNALS_TO_HANDLE=$PET_SIGNALS_TO_HANDLE
# Machines may come up to half an hour apart: a cluster has to find them first, or has lost one.
exec accelerate launch --config_file "$(dirname "$0")/2node.yaml" --rdzv_conf timeout=1800 \
	--deepspeed_multinode_launcher standard --num_machines "$machines" --num_processes "$total" \
	--machine_rank "$rank" --main_process_ip "$main" --main_process_port "$port" "$@"
