"""What rounding to bfloat16 adds to the ratio of a step, whatever the policy has learnt.

    python benchmarks/ratio_rounding.py --model HuggingFaceTB/SmolLM2-135M-Instruct

The model continues 16 passages of docs/worlds.md, each by --answer sampled tokens: a step. Its
log-probabilities are computed with bfloat16 weights, as the scripts do: once for all 16, then for
halves, as minibatches have them, before and after a change of every weight by --changes, of random
signs. What a float32 model says that the change does to a step is taken away: the rest is rounding.
Written: benchmarks/results/ratio-rounding.md.
"""

import argparse
import copy
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.evidence import table
from runtime.data import Step, Trajectory, flatten, sum_per_step
from runtime.networks import Network, batch_logprobs

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TITLES = ["weights changed by", "rows packed", "change of a step by float32 [nats]"]
TITLES += ["rounding of a token [nats]", "of a step: mean [nats]", "largest", "beyond clip 0.2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="directory, or a name on the hub")
    parser.add_argument("--answer", type=int, default=48, help="tokens of a step")
    parser.add_argument("--changes", type=float, nargs="+", default=[0, 1e-7, 1e-6, 1e-5])
    given = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    ids = tokenizer((ROOT / "docs/worlds.md").read_text(), return_tensors="pt").input_ids[0]
    limits = {"max_new_tokens": given.answer, "min_new_tokens": given.answer}
    trajectories = []
    for number in range(16):
        passage = ids[None, 200 * number : 200 * number + 200 - 7 * number]  # of many lengths
        texts = model.generate(passage, do_sample=True, top_k=0, pad_token_id=0, **limits)
        text = texts[0].tolist()
        trajectory = Trajectory(number)
        trajectory.append(text[: -given.answer], text[-given.answer :])
        trajectory.steps.append(Step("", "", [0.0] * given.answer))
        trajectories.append(trajectory)
    batch, exact = flatten(trajectories), Network("policy", model)
    rounded = Network("policy", copy.deepcopy(model).bfloat16())
    halves = [torch.arange(16) % 2 == part for part in (0, 1)]

    def logprobs(policy: Network, parts=(None,)) -> torch.Tensor:
        dtype = "float32" if policy is exact else "bfloat16"
        run_args = SimpleNamespace(dtype=dtype, micro_batch_tokens=8192)
        args = SimpleNamespace(run_args=run_args, temperature=1.0)
        with torch.no_grad():
            return sum(batch_logprobs(policy, batch, args, only) for only in parts)

    whole, halved, first = logprobs(rounded), logprobs(rounded, halves), logprobs(exact)
    before = [weight.detach().clone() for weight in model.parameters()]
    lines = []
    for change in given.changes:
        with torch.no_grad():
            for weight, master, old in zip(exact.trained, rounded.trained, before):
                weight.copy_(old + change * torch.randn_like(old).sign())
                master.rounded.copy_(weight)
        new, learnt = logprobs(rounded, halves), logprobs(exact) - first
        for how, old in (("otherwise", whole), ("alike", halved)):
            noise = new - old - learnt
            steps, true = (sum_per_step(x, batch).abs() for x in (noise, learnt))
            beyond = (sum_per_step(noise, batch).exp() - 1).abs() > 0.2
            cells = [f"{change:g}", how, f"{true.mean():.4f}", f"{noise.abs().mean():.4f}"]
            cells += [f"{steps.mean():.3f}", f"{steps.max():.3f}", f"{beyond.float().mean():.2f}"]
            lines.append(cells)
    told = f"`python benchmarks/ratio_rounding.py --model {Path(given.model).name}`, steps of"
    told += f" {given.answer} tokens, seed 0, torch {torch.__version__}, one CPU.\n\n"
    told += f"{table(TITLES, lines)}\n"
    (ROOT / "benchmarks/results/ratio-rounding.md").write_text(told)
    print(told)


if __name__ == "__main__":
    main()
