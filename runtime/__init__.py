"""What keeps a run going and changes nothing that is learnt: the plumbing behind every script.

    flags.py          RunArgs, the flags of a run; the command line; refusing what cannot work
    ranges.py         what a flag's value may be, declared beside the flag
    run.py            Run: directory, rows, clock, seeds, evaluation and saving; clean ends
    report.py         what episodes were like, the terminal's lines, curve.png
    terminal.py       lines that stay, and text that cannot move the cursor
    viewer.py         view.html, the run as a page; page/ has its frame, style and script
    checkpoints.py    checkpoints that are whole or absent, and taking them up again
    memory.py         what an iteration takes of memory, predicted; flags that would fit
    tensors.py        safetensors files that are written tensor by tensor
    provenance.py     what a result has to name: command, versions, hardware, hashes
    files.py          JSON, JSON lines and files that are written whole
    models.py         reading --model: all of its weights, its tokenizer and its chat template
    networks.py       a model with its adapter and optimiser; log-probabilities of a micro-batch
    batching.py       sequences of similar length in the memory of one micro-batch
    engines.py        what samples: vLLM, or transformers
    caches.py         keys and values of transformers' engine, which are not copied for every token
    remote.py         what samples elsewhere: vLLM servers
    server_extension.py   what such a server is started with, to take the policy's weights
    pictures.py       from a PNG to what a vision tower made of it; its place in a sequence
    vllm_pictures.py  vLLM reads pictures without torchvision
    rounds.py         episodes side by side; worlds that fail
    chat.py           the token layout of a conversation, from the tokenizer's template
    processes.py      several processes: work divided, results together, FSDP
    replay.py         the groups of episodes that a PRM learns from again
    statistics.py     what the scripts log beside their losses, and how far a PRM is trusted

The scripts import this package before torch, because threads read their settings when torch begins.
"""

import os

# Threads that wait stay awake for microseconds. Longer is slower beside other busy processes.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
# The engine lives in this process, where it can take the policy's weights.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM tells of its memory policy there
