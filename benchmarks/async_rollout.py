"""--async-rollout against rollouts that the trainer waits for: seconds an iteration and success.

    python benchmarks/async_rollout.py                               # cores 0 and 1: an hour
    python benchmarks/async_rollout.py --script istar_webshop --name async-rollout-istar
    python benchmarks/async_rollout.py --seeds 1 --iterations 2 --server-core 1 -- --group-size 2

A vLLM server has one core and the trainer the other. Runs with the flag and without take turns,
seed by seed, with the same server; what stands after -- goes to all of them. Each row is kept when
its run has ended, so that the same command goes on after a stop. Written: benchmarks/results/
async-rollout.jsonl and .md.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.intervals import interval  # noqa: E402
from sweeps.results import student  # noqa: E402

import numpy as np  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
SERVER = """-m vllm.entrypoints.openai.api_server --dtype float32 --max-model-len 3072
--enforce-eager --enable-scale-out --logprobs-mode processed_logprobs --no-enable-chunked-prefill
--max-num-batched-tokens 8192 --host 127.0.0.1 --block-size 32 --disable-uvicorn-access-log
--worker-extension-cls runtime.engines.server_extension.PolicyWeights"""
SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
SWITCHES |= {"VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TIMES = {"rollout": "waiting for episodes", "logprobs": "log-probabilities", "prm": "PRM"}
TIMES |= {"update": "update", "sync": "sync"}  # time/... of a row: how the page calls it
AT_MOST = 0.75  # of the seconds, with the flag


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--script", default="rloo_webshop", help="without .py")
    parser.add_argument("--model", default="models/tiny-webshop")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--trainer-core", type=int, default=1)
    parser.add_argument("--name", default="async-rollout", help="of the files that are written")
    parser.add_argument("words", nargs="*", help="flags of all runs, after --")
    given = parser.parse_args()
    table, words = RESULTS / f"{given.name}.jsonl", ["--iterations", given.iterations, *given.words]
    about = {"script": given.script, "model": given.model, "words": shlex.join(map(str, words))}
    about["cores"] = [given.server_core, given.trainer_core]
    kept = [json.loads(line) for line in table.open()] if table.exists() else []
    rows = [row for row in kept if about.items() <= row.items()]
    due = [
        (seed, on) for seed in range(1, given.seeds + 1) for on in (seed % 2 == 0, seed % 2 == 1)
    ]
    due = [each for each in due if each not in {(row["seed"], row["async"]) for row in rows}]
    if due:
        with tempfile.TemporaryDirectory() as home:
            server, url = started(given, Path(home))
            try:
                for seed, on in due:
                    row = about | {"seed": seed, "async": on} | run(given, words, url, seed, on)
                    rows.append(row)
                    with table.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            finally:
                server.terminate()
                server.wait()
    page = page_of(rows, about)
    (RESULTS / f"{given.name}.md").write_text(page)
    print(page)


def on_core(core: int, *words, **options) -> subprocess.Popen:
    """Python with these words, on this core."""
    command = ["taskset", "-c", core, sys.executable, *words]
    options["env"] = os.environ | SWITCHES
    return subprocess.Popen([*map(str, command)], **options)


def started(given, home: Path):
    """(process, address) of a server that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", home / "log"
    words = [*SERVER.split(), "--model", ROOT / given.model, "--port", port]
    with log.open("w") as said:
        server = on_core(given.server_core, *words, cwd=ROOT, stdout=said, stderr=said)
    while True:
        if server.poll() is not None:
            sys.exit(log.read_text())
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return server, url
        except OSError:
            time.sleep(0.5)


def run(given, words: list, url: str, seed: int, on: bool) -> dict:
    """What a run has taken, and its last evaluation: {task: success}."""
    flags = ["--model", given.model, "--engine-url", url, "--seed", seed, *words]
    flags += ["--eval-every", 10_000, "--quiet", *["--async-rollout"] * on]
    with tempfile.TemporaryDirectory() as home:
        flags += ["--runs-dir", home, "--run-name", "a"]
        process = on_core(given.trainer_core, ROOT / f"{given.script}.py", *flags, cwd=ROOT)
        if process.wait():
            sys.exit(f"{given.script} with seed {seed} ended with {process.returncode}")
        metrics = read(Path(home, "a/metrics.jsonl"))
        last = max(row["iteration"] for row in metrics)
        panel = [e for e in read(Path(home, "a/eval_episodes.jsonl")) if e["iteration"] == last]
    trained, solved = [row for row in metrics if row["iteration"]], {}
    for episode in panel:
        solved.setdefault(episode["task"], []).append(float(episode["success"]))
    times = [name for name in TIMES if f"time/{name}" in trained[0]]
    taken = {name: [round(row[f"time/{name}"], 3) for row in trained] for name in times}
    return {
        "seconds": [round(row["time/total"], 3) for row in trained],
        **taken,
        "gap": [row["policy/engine_gap"] for row in trained],
        "success": {str(t): sum(each) / len(each) for t, each in sorted(solved.items())},  # as JSON
        "before": metrics[0]["eval/success"],
    }


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def page_of(rows: list[dict], about: dict) -> str:
    """The results, as a page."""
    by = {(row["seed"], row["async"]): row for row in rows}
    seeds = sorted({seed for seed, _ in by if (seed, True) in by and (seed, False) in by})
    pairs = [(by[seed, True], by[seed, False]) for seed in seeds]
    ratios = np.array([np.mean(on["seconds"]) / np.mean(off["seconds"]) for on, off in pairs])
    server, trainer = about["cores"]
    where = "one core for both" if server == trainer else "one core each"
    lines = [f"`python benchmarks/async_rollout.py --script {about['script']}`", ""]
    lines += [f"`{about['script']}.py {about['words']}`, {about['model']}, float32. A vLLM server"]
    lines[-1] += f" samples and this process trains, {where}. Seconds are means of all iterations."
    times = [name for name in TIMES if name in rows[0]]
    told = ["seed", "`--async-rollout`", "seconds", *map(TIMES.get, times)]
    told += ["engine gap [nats]", "success before", "after"]
    lines += ["", f"| {' | '.join(told)} |", f"|{'---|' * len(told)}"]
    for pair in pairs:
        for row in pair[::-1]:
            cells = [row["seed"], "on" if row["async"] else "off"]
            cells += [f"{np.mean(row[name]):.2f}" for name in ("seconds", *times)]
            cells += [f"{np.mean(row['gap']):.4f}", f"{row['before']:.3f}"]
            cells += [f"{np.mean([*row['success'].values()]):.3f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    if len(seeds) < 2:
        return "\n".join([*lines, ""])
    half = student(len(seeds) - 1) * ratios.std(ddof=1) / len(seeds) ** 0.5
    holds = "holds" if ratios.mean() + half <= AT_MOST else "does not hold"
    if abs(ratios.mean() - AT_MOST) < half:
        holds = f"not decided by {len(seeds)} seeds"
    lines += [
        "",
        f"Seconds with the flag over those without: {ratios.mean():.3f} ± {half:.3f} (95 %",
    ]
    lines[-1] += f" interval over {len(seeds)} seeds); at most {AT_MOST}: **{holds}**."
    more = [
        [on["success"][task] - off["success"][task] for task in off["success"]] for on, off in pairs
    ]
    mean, half = interval(more)
    equal = "includes" if abs(mean) <= half else "does not include"
    lines += [f"Success with the flag minus that without: {mean:+.3f} ± {half:.3f} (over seeds and"]
    lines[-1] += f" tasks); the interval {equal} 0."
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
