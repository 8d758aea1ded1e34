"""Whether the PRM learns credit at all: a policy that stands still, and tasks it never saw.

    python benchmarks/frozen_policy.py --script istar_sokoban        # some minutes on one core
    python benchmarks/frozen_policy.py --script istar_webshop

The script's own functions play --batches batches of --tasks training tasks with its initial policy,
and its PRM takes one step of trajectory DPO on each. Then it ranks the preference pairs of
--tasks other tasks, compared as in training. With a policy that moves the same PRM may do worse:
docs/results.md; with one that stands still it has to find what the outcomes tell. Exits with status
1 where the accuracy is below --least. Written: benchmarks/results/frozen-SCRIPT.md.
"""

import argparse
import random
import sys
import time

from throughput import ROOT, load_script
from tqdm import tqdm

sys.path.insert(0, str(ROOT))


def players(script, args):
    """(policy, PRM, engine, chat) of the script's default model; the PRM is the policy with an
    adapter, on weights of its own."""
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
    phi = add_adapter(read(path), "prm", args.prm_lora_rank)
    options = {"lr": args.prm_learning_rate, "weight_decay": args.prm_weight_decay}
    prm = Network("prm", phi, AdamW(trainable(phi), **options))
    engine = HfEngine(str(path), [tokenizer.eos_token_id], args)
    engine.load(model)
    return policy, prm, engine, Chat(tokenizer, [tokenizer.eos_token_id])


def accuracies(script, prm, batch, old_logprobs, pairs, args) -> dict:
    """The shares of pairs that the PRM ranks right, and that the shorter episode wins."""
    from runtime.batching import batch_logprobs

    import torch

    new = script.sum_per_step(batch_logprobs(prm, batch, args, label="ranked"), batch)
    ratios = new - script.sum_per_step(old_logprobs, batch)
    compared = args.equal_length_pairs, args.prm_reduce
    sides, _ = script.pair_log_ratios(ratios, batch.step_traj, pairs, *compared)
    lengths = torch.bincount(batch.step_traj)
    winners, losers = torch.tensor(pairs).T
    right = (sides[0::2] > sides[1::2]).double().mean().item()
    return {"PRM": right, "length": (lengths[winners] < lengths[losers]).double().mean().item()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--script", default="istar_sokoban", choices=["istar_sokoban", "istar_webshop"])
    add("--batches", type=int, default=16, help="of training, one step of the PRM each")
    add("--tasks", type=int, default=32, help="of a batch, a group of 8 each")
    add("--seed", type=int, default=1)
    add("--least", type=float, default=0.75, help="accuracy on unseen tasks that has to be reached")
    given = parser.parse_args()

    from runtime.batching import batch_logprobs

    import torch

    script = load_script(given.script)
    args = script.Args()
    world = script.Sokoban if given.script == "istar_sokoban" else script.WebShop
    env = world.from_args(args)
    random.seed(given.seed)
    torch.manual_seed(given.seed)
    policy, prm, engine, chat = players(script, args)
    tasks = random.sample(env.train_tasks, given.tasks * (given.batches + 1))

    def play(number: int):
        """(batch, log pi_old, pairs) of the tasks of this number."""
        chosen = tasks[number * given.tasks : (number + 1) * given.tasks]
        repeated = sorted(chosen * args.group_size)
        played = script.rollout(env, engine, chat, repeated, args, args.temperature, "rollout")
        batch = script.flatten(played)
        engine.sleep()
        pairs = script.preference_pairs(batch.outcomes, batch.group)
        return batch, batch_logprobs(policy, batch, args, label="log-probabilities"), pairs

    begin = time.time()
    unseen = play(given.batches)
    rows = [(0, accuracies(script, prm, *unseen, args))]
    for number in tqdm(range(given.batches), "batches", disable=None):
        batch, old_logprobs, pairs = play(number)
        script.prm_update(prm, batch, old_logprobs, pairs, args)
        if (number + 1) % 4 == 0 or number + 1 == given.batches:
            rows.append((number + 1, accuracies(script, prm, *unseen, args)))
            tqdm.write(f"{number + 1:3} batches  {rows[-1][1]['PRM']:.3f}")

    command = " ".join(["python benchmarks/frozen_policy.py", *sys.argv[1:]])
    seconds = time.time() - begin
    told = [f"`{command}`: {len(unseen[2])} pairs of {given.tasks} unseen tasks, {seconds:.0f} s"]
    told += ["", "| batches learnt | pairs the PRM ranks right | pairs the shorter episode wins |"]
    told += ["|---|---|---|"]
    told += [f"| {n} | {row['PRM']:.3f} | {row['length']:.3f} |" for n, row in rows]
    text = "\n".join(told) + "\n"
    (ROOT / "benchmarks" / "results" / f"frozen-{given.script}.md").write_text(text)
    print(text)
    if rows[-1][1]["PRM"] < given.least:
        sys.exit(f"--least {given.least}: the PRM ranks {rows[-1][1]['PRM']:.3f} right")


if __name__ == "__main__":
    main()
