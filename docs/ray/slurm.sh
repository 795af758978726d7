#!/bin/bash
#SBATCH --job-name=kv-bench
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=08:00:00
#SBATCH --signal=INT@60

export HF_HUB_OFFLINE=1 HF_HOME=/local/huggingface   # models on each node's own disk, or a shared folder
export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32)   # one for all nodes of the job
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    ray symmetric-run --address "$address:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$SLURM_GPUS_ON_NODE" -- \
    bench run pg19 --ray auto --data /shared/pg19 --results /shared/results
