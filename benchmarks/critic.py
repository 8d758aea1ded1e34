"""How much of the returns a critic can explain: a policy that stands still, and tasks it never saw.

    python benchmarks/critic.py              # about 20 minutes on one core

The functions of ppo_webshop.py play --batches batches of --tasks training tasks with the initial
policy, and each of CRITICS learns from every batch by the script's critic_update, in one pass or in
more. Then it says the value of every step of --unseen other tasks. A return is the outcome less the
penalties to come (lambda 1), and what is explained of its variance is 1 - var(R - V) / var(R): of
all steps, of first steps, where little is known, and of last ones, where mostly nothing is left but
to buy what was chosen, so a critic that reads its episode well explains nearly all.

Beside the table stand the shares of the variance of returns that lie between tasks (at first steps)
and between states, a task and a page of the shop (where an episode is in them first): a critic that
knows the mean return of every task, or of every such state, explains so much. Other flags go to the
script. Written: benchmarks/results/critic.md.
"""

import argparse
import random
import sys
import time
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.throughput import load_script

CRITICS = {  # {name: (flags, passes over a batch)}; the first is the script's default
    "adapter of rank 16": ("", 1),
    "full copy": ("--critic-lora-rank 0", 1),
    "adapter, 4 passes": ("", 4),
    "full copy, 4 passes": ("--critic-lora-rank 0", 4),
    "full copy, 8 passes, rate 3e-4": ("--critic-lora-rank 0 --critic-learning-rate 3e-4", 8),
}


def explained(returns, values) -> float:
    """1 - var(R - V) / var(R), of tensors [U]."""
    return 1 - ((returns - values).var() / returns.var()).item()


def between(returns, group) -> float:
    """The share of the variance of returns [N] that lies between their groups [N]: the intraclass
    correlation, from the mean squares of a one-way analysis of variance."""
    import torch

    groups = [returns[group == number] for number in group.unique()]
    n, k = len(returns), len(groups)
    within = sum(((g - g.mean()) ** 2).sum() for g in groups) / (n - k)
    between = sum(len(g) * (g.mean() - returns.mean()) ** 2 for g in groups) / (k - 1)
    size = (n - sum(len(g) ** 2 for g in groups) / n) / (k - 1)
    variance = torch.clamp((between - within) / size, min=0.0)
    return (variance / (variance + within)).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--batches", type=int, default=8, help="from which a critic learns")
    add("--tasks", type=int, default=16, help="of a batch")
    add("--unseen", type=int, default=32, help="tasks on which it is judged")
    given, flags = parser.parse_known_args()

    from runtime.chat import Chat
    from runtime.data import flatten
    from runtime.engines import SamplingParams
    from runtime.engines.transformers import TransformersEngine
    from runtime.networks import Network, over_batch
    from runtime.rollout import Stage, rollout

    import torch
    from torch.optim import AdamW
    from transformers import AutoModelForCausalLM, AutoTokenizer

    script, gigpo = load_script("ppo_webshop"), load_script("gigpo_webshop")

    def args_of(words: str):
        sys.argv = ["ppo_webshop", *words.split(), *flags]
        return script.parse(script.Args, "")

    command = " ".join(["python benchmarks/critic.py", *sys.argv[1:]])
    args = args_of("")
    env = script.WebShop.from_args(args)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    path = ROOT / args.model
    tokenizer = AutoTokenizer.from_pretrained(path)
    engine = TransformersEngine(str(path), [tokenizer.eos_token_id], args)
    engine.load(AutoModelForCausalLM.from_pretrained(path))
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    stage = Stage(engine, chat, args)
    sampling = SamplingParams(args.temperature, args.max_action_tokens, chat.stop_ids)
    tasks = random.sample(env.train_tasks, given.tasks * given.batches + given.unseen)

    def play(first: int, number: int):
        """(batch, where its steps have values [S], their trajectories [S], rewards [S]), and the
        number of the state that each step was taken in, [S]."""
        repeated = sorted(tasks[first : first + number] * args.group_size)
        played = rollout(stage, script.play, env, repeated, sampling)
        engine.sleep()
        batch, state = flatten(played), gigpo.anchor_groups(played)
        units = script.credit_units(batch, batch.invalid, args.invalid_penalty, "step")
        return batch, *units, state

    def returns_of(rewards, chain):
        return script.gae_advantages(rewards, torch.zeros(len(rewards)), chain, 1.0, 1.0)  # [S]

    began = time.time()
    unseen, at, chain, rewards, state = play(0, given.unseen)
    returns = returns_of(rewards, chain)
    first = torch.cat([torch.ones(1, dtype=torch.bool), chain[1:] != chain[:-1]])  # [S]
    last = first.roll(-1)
    starts = range(given.unseen, given.unseen + given.tasks * given.batches, given.tasks)
    batches = [play(start, given.tasks) for start in tqdm(starts, "batches", disable=None)]

    lines = []
    for name, (words, passes) in CRITICS.items():
        own = args_of(words)
        torch.manual_seed(own.seed)
        critic = Network("critic", script.value_model(str(path), own.critic_lora_rank))
        critic.optimizer = AdamW(critic.trained, own.critic_learning_rate, weight_decay=0.0)
        for batch, where, along, paid, _ in tqdm(batches, name, disable=None):
            values = over_batch(script.token_values, critic, batch, own)[where]
            gains = script.gae_advantages(paid, values, along, own.gamma, own.gae_lambda)
            for _ in range(passes):
                script.critic_update(critic, batch, where, values, gains + values, own)
        values = over_batch(script.token_values, critic, batch, own)[where]
        learnt = explained(returns_of(paid, along), values)
        values = over_batch(script.token_values, critic, unseen, own)[at]
        of = [explained(returns[k], values[k]) for k in (first, last)]
        shares = [learnt, explained(returns, values), *of]
        lines.append(f"| {name} | {' | '.join(f'{share:.3f}' for share in shares)} |")
        print(lines[-1], flush=True)

    of_tasks = between(returns[first], unseen.group[chain][first])
    visits = {}  # {(trajectory, state): its first step there}
    for step, visit in enumerate(zip(chain.tolist(), state.tolist())):
        visits.setdefault(visit, step)
    visits = torch.tensor([*visits.values()])
    of_states = between(returns[visits], state[visits])
    told = [f"`{command}`: {len(at)} steps of {given.unseen} unseen tasks, seed {args.seed}, "]
    told[0] += f"{time.time() - began:.0f} s. Of the variance of returns {of_tasks:.3f} lies "
    told[0] += f"between tasks, and {of_states:.3f} between {len(state[visits].unique())} states."
    told += ["", "| critic | last batch learnt | unseen tasks | their first steps | last steps |"]
    told += ["|---|---|---|---|---|", *lines]
    text = "\n".join(told) + "\n"
    (ROOT / "benchmarks" / "results" / "critic.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
