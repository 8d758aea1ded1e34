"""What keeps a run going and decides nothing that is learnt: the plumbing behind every script.

    run.py  flags.py  data.py  networks.py  engines/__init__.py    what an algorithm takes
    rollout.py  worlds.py  chat.py          episodes side by side, what worlds return, their tokens
    engines/                                three ways to sample: vLLM, transformers, vLLM servers
    distributed/                            several processes, and weights that are sharded (FSDP)
    saving/                                 checkpoints, whole files, where a result comes from
    view/                                   what a run says: terminal, curve.png, view.html, W&B
    vision/                                 pictures, where a world shows them
    checks.py  memory.py                    what cannot work, said before anything is loaded
    models.py  ending.py                    reading --model; ends in one line

The scripts import this package before torch: threads read their settings when torch begins."""

import os

# Threads that wait stay awake for microseconds. Longer is slower beside other busy processes.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
# The engine lives in this process, where it can take the policy's weights.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM tells of its memory policy there
