"""Whether the PRM learns credit at all: a policy that stands still, and tasks it never saw.

    python benchmarks/frozen_policy.py --script istar_sokoban        # some minutes on one core
    python benchmarks/frozen_policy.py --script istar_webshop
    python benchmarks/frozen_policy.py --prm-lora-rank 16 --prm-steps 1 --prm-replay 0

The script's own functions play --batches batches of --tasks training tasks with its initial policy,
and its PRM learns after each as in the script: from --tasks groups of the replay, in --prm-steps
steps of trajectory DPO. Then it ranks the preference pairs of --unseen other tasks. With a
policy that moves the same PRM may do worse: docs/results.md; with one that stands still it has to
find what the outcomes tell. Other flags go to the script. Exits with status 1 where the accuracy is
below --least. Written: benchmarks/results/frozen-SCRIPT.md, its name with the other flags.
"""

import argparse
import random
import sys
import time

from throughput import ROOT, load_script
from tqdm import tqdm

sys.path.insert(0, str(ROOT))


def players(args):
    """(policy, PRM, engine, chat) of the script's model. The PRM has weights of its own: all of
    them learn, or with --prm-lora-rank an adapter on them."""
    from runtime.chat import Chat
    from runtime.engines import HfEngine
    from runtime.networks import Network, add_adapter, trainable

    from torch.optim import AdamW
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = ROOT / args.model
    tokenizer = AutoTokenizer.from_pretrained(path)
    read = AutoModelForCausalLM.from_pretrained
    model = read(path)
    policy = Network("policy", model, AdamW(trainable(model), 0.0))
    phi = read(path)
    if args.prm_lora_rank:
        phi = add_adapter(phi, "prm", args.prm_lora_rank)
    prm = Network("prm", phi, AdamW(trainable(phi), args.prm_learning_rate, weight_decay=0.0))
    engine = HfEngine(str(path), [tokenizer.eos_token_id], args)
    engine.load(model)
    return policy, prm, engine, Chat(tokenizer, [tokenizer.eos_token_id])


def ranked(script, prm, batch, old_logprobs, pairs, args) -> dict:
    """What the PRM makes of these pairs, as the script logs it: runtime.statistics."""
    from runtime.statistics import pair_statistics

    rewards = script.score_steps(prm, batch, old_logprobs, args)  # [S]
    return pair_statistics(rewards, batch, pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--script", default="istar_sokoban", choices=["istar_sokoban", "istar_webshop"])
    add("--batches", type=int, default=16, help="from which the PRM learns")
    add("--tasks", type=int, default=32, help="of a batch, and groups that the PRM draws after it")
    add("--unseen", type=int, default=96, help="tasks whose pairs are ranked")
    add("--least", type=float, default=0.75, help="accuracy on unseen tasks that has to be reached")
    given, flags = parser.parse_known_args()

    from runtime.data import batch_logprobs
    from runtime.flags import parse
    from runtime.replay import Replay

    import torch

    command = " ".join(["python benchmarks/frozen_policy.py", *sys.argv[1:]])
    script = load_script(given.script)
    sys.argv = [given.script, "--tasks-per-iteration", str(given.tasks), *flags]
    args = parse(script.Args, "")
    world = script.Sokoban if given.script == "istar_sokoban" else script.WebShop
    env = world.from_args(args)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    policy, prm, engine, chat = players(args)
    replay = Replay(args.prm_replay)
    pairing = args.pair_margin, args.pair_threshold
    tasks = random.sample(env.train_tasks, given.tasks * given.batches + given.unseen)

    def measured(trajectories):
        """(batch, log pi_old, pairs) of these trajectories."""
        batch = script.flatten(trajectories)
        pairs = script.preference_pairs(batch.outcomes, batch.group, *pairing)
        return batch, batch_logprobs(policy, batch, args, label="log-probabilities"), pairs

    def play(first: int, number: int):
        """A group of trajectories for each of so many tasks."""
        chosen = tasks[first : first + number]
        repeated = sorted(chosen * args.group_size)
        played = script.rollout(env, engine, chat, repeated, args, args.temperature, "rollout")
        engine.sleep()
        return played

    begin = time.time()
    unseen = measured(play(0, given.unseen))
    rows = [(0, ranked(script, prm, *unseen, args))]
    for number in tqdm(range(given.batches), "batches", disable=None):
        trajectories = play(given.unseen + number * given.tasks, given.tasks)
        batch = script.flatten(trajectories)
        pairs = script.preference_pairs(batch.outcomes, batch.group, *pairing)
        replay.add(trajectories, pairs)
        for groups in replay.draw(given.tasks, args.prm_steps):
            script.prm_update(prm, *measured(groups), args)
        if (number + 1) % 4 == 0 or number + 1 == given.batches:
            rows.append((number + 1, ranked(script, prm, *unseen, args)))
            tqdm.write(f"{number + 1:3} batches  {rows[-1][1]['pair_accuracy']:.3f}")

    seconds = time.time() - begin
    told = [f"`{command}`: {len(unseen[2])} pairs of {given.unseen} unseen tasks, {seconds:.0f} s"]
    told += ["", "| batches learnt | pairs the PRM ranks right | pairs the shorter episode wins |"]
    told += ["|---|---|---|"]
    told += [f"| {n} | {r['pair_accuracy']:.3f} | {r['length_accuracy']:.3f} |" for n, r in rows]
    text = "\n".join(told) + "\n"
    name = "-".join(["frozen", given.script, *(flag.strip("-") for flag in flags)])
    (ROOT / "benchmarks" / "results" / f"{name}.md").write_text(text)
    print(text)
    reached = rows[-1][1]["pair_accuracy"]
    if reached < given.least:
        sys.exit(f"--least {given.least}: the PRM ranks {reached:.3f} right")


if __name__ == "__main__":
    main()
