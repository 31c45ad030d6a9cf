#!/usr/bin/env bash
# train.py under torchrun, on one machine or on each of several.
#
#     scripts/run_distributed.sh loss=sft model=pythia28 trainer=FSDPTrainer ...        # one process per GPU
#     scripts/run_distributed.sh 4 loss=sft model=pythia28 trainer=FSDPTrainer ...      # 4 processes
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 scripts/run_distributed.sh 8 ...           # the same on every machine,
#     NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 scripts/run_distributed.sh 8 ...           # with its own NODE_RANK
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
exec python -m torch.distributed.run \
    --nproc-per-node="$processes" \
    --nnodes="${NNODES:-1}" \
    --node-rank="${NODE_RANK:-0}" \
    --master-addr="${MASTER_ADDR:-127.0.0.1}" \
    --master-port="${MASTER_PORT:-29500}" \
    "$(dirname "$(readlink -f "$0")")/../train.py" "$@"
