#!/usr/bin/env bash
# Pretraining on several nodes of a SLURM cluster: adapt the first lines, then
#   sbatch scripts/slurm.sh --model_name_or_path gpt2-medium-en --input_dir data --output_dir output/run ...
# One launcher per node starts one process per GPU; a requeued job resumes from its newest checkpoint.
#SBATCH --job-name=gptlm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:-$PWD}"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
gpus=${SLURM_GPUS_ON_NODE:-8}
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-$gpus} / gpus > 0 ? ${SLURM_CPUS_PER_TASK:-$gpus} / gpus : 1))

# the nodes share this folder, so one process builds the sample index for all
exec srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "$gpus" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$head:${MASTER_PORT:-29500}" \
    scripts/run_pretrain.py --share_folder 1 "$@"
