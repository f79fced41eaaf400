#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append

# One launcher on each node, which starts one process on each of its GPUs. They meet at the first node. The same script
# is right for the first job and for all that follow: it resumes by itself. Three minutes before the time is over SLURM
# sends SIGTERM, the run saves and ends with exit code 143, and the job goes into the queue again.
#
#     sbatch examples/slurm_multi_node.sh

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

srun omnitrain launch -n 4 --nnodes "$SLURM_JOB_NUM_NODES" --rdzv-endpoint "$first:$port" --max-restarts 2 \
    examples/multi_gpu.py --out "$SLURM_SUBMIT_DIR/runs/digits"
code=$?

if [ $code -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
