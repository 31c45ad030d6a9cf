#!/usr/bin/env bash
# train.py under torchrun, on one machine or on each of several.
#
#     scripts/run_distributed.sh loss=sft model=pythia28 trainer=FSDPTrainer ...        # one process per GPU
#     scripts/run_distributed.sh 4 loss=sft model=pythia28 trainer=FSDPTrainer ...      # 4 processes
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 scripts/run_distributed.sh 8 ...           # the same on every machine,
#     NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 scripts/run_distributed.sh 8 ...           # with its own NODE_RANK
#
#     NNODES=2:4 JOB=mine MASTER_ADDR=node0 scripts/run_distributed.sh 8 ... resume=auto   # goes on with 2 to 4 machines
#
# MASTER_PORT (29500) must be reachable on MASTER_ADDR. Without GPUs the default is one process.
set -euo pipefail
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
    processes=$1
    shift
else
    processes=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
    processes=$((processes > 0 ? processes : 1))
fi
address=${MASTER_ADDR:-127.0.0.1}
port=${MASTER_PORT:-29500}
meeting=(--node-rank="${NODE_RANK:-0}" --master-addr="$address" --master-port="$port")
if [[ "${NNODES:-1}" == *:* ]]; then
    # Else machines that have lost the first one would go on asking it where to meet.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    meeting=(--rdzv-backend=c10d --rdzv-endpoint="$address:$port" --rdzv-id="${JOB:?JOB must name the job}"
        --rdzv-conf="last_call_timeout=10" --max-restarts=1000)
fi
exec python -m torch.distributed.run --nproc-per-node="$processes" --nnodes="${NNODES:-1}" "${meeting[@]}" \
    "$(dirname "$(readlink -f "$0")")/../train.py" "$@"
