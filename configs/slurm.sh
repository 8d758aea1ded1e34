#!/bin/bash
# A run on two machines with eight GPUs each, from the repository's directory, which all of them see:
#     sbatch configs/slurm.sh istar_webshop.py --model Qwen/Qwen2.5-7B-Instruct --dtype bfloat16 \
#         --gradient-checkpointing --learning-rate 1e-6 --lr-halving inf --prm-learning-rate 1e-5 \
#         --max-action-tokens 512 --max-context-tokens 16384 ...    # for 16 GPUs of 80 GB
# Where the job ends early and is queued again, the same command goes on with the same run.
#SBATCH --job-name=istar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail

script=$1
shift
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}
processes=$((SLURM_NNODES * SLURM_GPUS_ON_NODE))

# one process for each GPU; those of a machine share a copy of the policy, unless an adapter is trained
case " $* " in
*" --policy"[-_]"lora"[-_]"rank"[\ =][1-9]* | *" --engine"[\ =]"hf "*)
    launcher=(
        torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "$SLURM_GPUS_ON_NODE"
        --rdzv_backend c10d --rdzv_endpoint "$first:29500" --rdzv_id "$SLURM_JOB_ID"
    ) ;;
*)
    launcher=(
        accelerate launch --config_file configs/fsdp.yaml
        --num_machines "$SLURM_NNODES" --num_processes "$processes"
        --parallelism_config_dp_replicate_size "$SLURM_NNODES"
        --rdzv_backend c10d --main_process_ip "$first" --main_process_port 29500
    ) ;;
esac
srun --kill-on-bad-exit=1 "${launcher[@]}" \
    "$script" --processes "$processes" --run-name "slurm-$SLURM_JOB_ID" --resume auto "$@"
