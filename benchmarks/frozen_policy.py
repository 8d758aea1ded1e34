"""Whether the PRM learns credit at all: a policy that stands still, and tasks it never saw.

    python benchmarks/frozen_policy.py --script istar_sokoban        # some minutes on one core
    python benchmarks/frozen_policy.py --script istar_webshop
    python benchmarks/frozen_policy.py --prm-lora-rank 4 --prm-steps 2

The script's own functions play --batches batches of --tasks training tasks with its initial policy,
and its PRM learns after each as in the script: --prm-steps steps of trajectory DPO on past groups.
Then it ranks the preference pairs of --unseen other tasks. With a policy that moves the same PRM
may do worse (docs/results/sokoban.md); with one that stands still it has to find what the outcomes
tell. Other flags go to the script. Exits with status 1 where the accuracy is below --least.
Written: benchmarks/results/frozen-SCRIPT.md, its name with the other flags.
"""

import argparse
import random
import sys
import time

from throughput import ROOT, load_script
from tqdm import tqdm

sys.path.insert(0, str(ROOT))


def players(script, args):
    """(policy, PRM, stage) of the script's model; the PRM is the policy plus an adapter."""
    from runtime.chat import Chat
    from runtime.engines.transformers import TransformersEngine
    from runtime.networks import Network
    from runtime.rollout import Stage

    from torch.optim import AdamW
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = ROOT / args.model
    tokenizer = AutoTokenizer.from_pretrained(path)
    policy = Network("policy", AutoModelForCausalLM.from_pretrained(path))
    prm = policy.with_adapter("prm", script.lora(args.prm_lora_rank))
    prm.optimizer = AdamW(prm.trained, args.prm_learning_rate, weight_decay=0.0)
    engine = TransformersEngine(str(path), [tokenizer.eos_token_id], args)
    engine.load(policy.model)
    return policy, prm, Stage(engine, Chat(tokenizer, [tokenizer.eos_token_id]), args)


def ranked(script, policy, prm, batch, args) -> tuple[int, float, float]:
    """(pairs of the batch, the share that the PRM ranks right, and that the shorter one wins); a
    tie counts half."""
    from runtime.data import sum_per_step
    from runtime.networks import batch_logprobs

    import torch

    pairs = script.preference_pairs(batch.outcomes, batch.group, args.pair_margin)
    old, phi = (
        sum_per_step(batch_logprobs(network, batch, args), batch) for network in (policy, prm)
    )
    rewards = script.step_rewards(phi, old, args.beta)  # [S]
    winners, losers = torch.tensor(pairs).T
    lengths = torch.bincount(batch.step_traj)  # [N]
    margins = script.margins(rewards, batch.step_traj, pairs), lengths[losers] - lengths[winners]
    shares = [(margin.sign() + 1).float().mean().item() / 2 for margin in margins]
    return len(pairs), *shares


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--script", default="istar_sokoban", choices=["istar_sokoban", "istar_webshop"])
    add("--batches", type=int, default=16, help="from which the PRM learns")
    add("--tasks", type=int, default=32, help="of a batch")
    add("--unseen", type=int, default=96, help="tasks whose pairs are ranked")
    add("--least", type=float, default=0.75, help="accuracy on unseen tasks that has to be reached")
    given, flags = parser.parse_known_args()

    from runtime.data import flatten
    from runtime.engines import SamplingParams
    from runtime.flags import parse
    from runtime.rollout import rollout

    import torch

    command = " ".join(["python benchmarks/frozen_policy.py", *sys.argv[1:]])
    script = load_script(given.script)
    sys.argv = [given.script, "--tasks-per-iteration", str(given.tasks), *flags]
    args = parse(script.Args, "")
    world = script.Sokoban if given.script == "istar_sokoban" else script.WebShop
    env = world.from_args(args)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    policy, prm, stage = players(script, args)
    sampling = SamplingParams(args.temperature, args.max_action_tokens, stage.chat.stop_ids)
    tasks = random.sample(env.train_tasks, given.tasks * given.batches + given.unseen)
    replay = []

    def play(first: int, number: int):
        """A group of trajectories for each of so many tasks."""
        repeated = sorted(tasks[first : first + number] * args.group_size)
        stage.engine.load(policy.model)
        return rollout(stage, script.play, env, repeated, sampling)

    begin = time.time()
    unseen = flatten(play(0, given.unseen))
    rows = [(0, *ranked(script, policy, prm, unseen, args))]
    for number in tqdm(range(given.batches), "batches", disable=None):
        episodes = play(given.unseen + number * given.tasks, given.tasks)
        batch = flatten(episodes)
        pairs = script.preference_pairs(batch.outcomes, batch.group, args.pair_margin)
        for task in sorted({episodes[winner].task for winner, _ in pairs}):
            replay.append([t for t in episodes if t.task == task])
        del replay[: -args.prm_replay]
        for part in script.draw(replay, args):
            script.prm_update(prm, policy, part, args)
        if (number + 1) % 4 == 0 or number + 1 == given.batches:
            rows.append((number + 1, *ranked(script, policy, prm, unseen, args)))
            tqdm.write(f"{number + 1:3} batches  {rows[-1][2]:.3f}")

    seconds = time.time() - begin
    told = [f"`{command}`: {rows[0][1]} pairs of {given.unseen} unseen tasks, {seconds:.0f} s"]
    told += ["", "| batches learnt | pairs the PRM ranks right | pairs the shorter episode wins |"]
    told += ["|---|---|---|"]
    told += [f"| {n} | {right:.3f} | {shorter:.3f} |" for n, _, right, shorter in rows]
    text = "\n".join(told) + "\n"
    name = "-".join(["frozen", given.script, *(flag.strip("-") for flag in flags)])
    (ROOT / "benchmarks" / "results" / f"{name}.md").write_text(text)
    print(text)
    reached = rows[-1][2]
    if reached < given.least:
        sys.exit(f"--least {given.least}: the PRM ranks {reached:.3f} right")


if __name__ == "__main__":
    main()
