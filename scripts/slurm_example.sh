#!/usr/bin/env bash
# Two nodes of eight GPUs under SLURM: sbatch scripts/slurm_example.sh PROGRAM [ARGUMENTS]
#SBATCH --job-name=roll_lite
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
# Five minutes before the time limit all ranks get SIGTERM and write a checkpoint.
# One torchrun a node; it starts that node's ranks and, with --max-restarts, starts them again: the
# arguments of a recipe then need --run-dir FOLDER and --resume auto.
set -euo pipefail

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280  # seconds for that; torchrun's default is 30
source .venv/bin/activate
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 8 --max-restarts 2 \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first_node:29400" \
  "$@"
