"""What keeps a run going and decides nothing that is learnt: the plumbing behind every script.

    run.py  flags.py  data.py  networks.py  engines/__init__.py    what an algorithm takes: TAKEN
    rollout.py  worlds.py  chat.py          episodes side by side, what worlds return, their tokens
    engines/                                three ways to sample: vLLM, transformers, vLLM servers
    distributed/                            several processes, and weights that are sharded (FSDP)
    saving/                                 checkpoints, whole files, where a result comes from
    view/                                   what a run says: terminal, curve.png, view.html, W&B
    vision/                                 pictures, where a world shows them
    checks.py  memory.py                    what cannot work, said before anything is loaded
    models.py  ending.py                    reading --model; ends in one line
The scripts import this package before torch, which reads the settings of threads below."""

import os

# All that the scripts of algorithms import from here, and why none of it can change what is learnt.
TAKEN = {
    "Step": "a record of one answer and what the world said of it",
    "Trajectory": "a record of one episode, by the ids that the engine saw and sampled",
    "flatten": "the same records as tensors, in their order; nothing is left out or weighed",
    "joined": "lists of token ids one after the other, with the pictures among them",
    "micro_batches": "cuts a batch into parts that fit the memory; gradients add up over them",
    "sum_per_step": "adds up the numbers of a step's tokens",
    "SamplingParams": "holds what the script says about sampling, in vLLM's names",
    "Flat": "spells the flags of a nested dataclass without a prefix",
    "RunArgs": "flags of a run: engine, precision, evaluation, saving, logging",
    "parse": "reads the command line into the script's own flags",
    "Network": "a model, its adapters and the optimiser that the script gives it",
    "action_logprobs": "log pi of the sampled tokens, by the model at the script's temperature",
    "batch_logprobs": "the same of a whole batch, in the memory of a micro-batch",
    "over_batch": "any function of a micro-batch, of a whole batch, in the memory of one",
    "sum_gradients": "adds up gradients over processes, as if there were one",
    "Run": "directory, rows, clock, seeds, evaluation, checkpoints; calls the script's play",
    "ends_cleanly": "tells in one line why a run ended",
    "mean_of": "the mean of what is logged",
}

# Threads that wait stay awake for microseconds. Longer is slower beside other busy processes.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
# The engine lives in this process, where it can take the policy's weights.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM tells of its memory policy there
