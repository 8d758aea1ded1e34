#!/bin/bash
# A run on one machine of a Ray cluster, which Ray chooses by its free GPUs (GPUS=8):
#     RAY_ADDRESS=http://HEAD:8265 bash configs/ray.sh NAME istar_webshop.py --dtype bfloat16 ...
# from the repository's directory, which the cluster sees under the same path. A job of the same NAME
# goes on with the same run.
set -euo pipefail

name=$1
script=$2
shift 2
gpus=${GPUS-8}
processes=${PROCESSES:-$gpus}
if [ "$processes" = 0 ]; then echo "ray.sh: without a GPU PROCESSES too, as GPUS=0 PROCESSES=2" >&2; exit 2; fi

# all processes share the policy, unless an adapter is trained
case " $* " in
*" --policy"[-_]"lora"[-_]"rank"[\ =][1-9]* | *" --engine"[\ =]"hf "*)
    launcher=(torchrun --standalone --nproc_per_node "$processes") ;;
*) launcher=(accelerate launch --config_file configs/fsdp.yaml --num_processes "$processes") ;;
esac
command=("${launcher[@]}" "$script" --processes "$processes" --run-name "$name" --resume auto "$@")
ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" --entrypoint-num-gpus "$gpus" -- \
    bash -c "cd $(printf %q "$PWD") && PATH=$(printf %q "$PATH") $(printf '%q ' "${command[@]}")"
