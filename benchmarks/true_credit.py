"""What is the credit of a finished run of iStar worth? The true advantage of steps, by playing on.

    python istar_webshop.py --run-name webshop
    python benchmarks/true_credit.py runs/webshop             # 5 minutes on one core

The run's last policy plays a group of episodes for each of --tasks training tasks. From the state
before every step of a group that has a pair the same policy plays on to the end, --plays times: the
mean outcome is the state's value V, and the true advantage of a step is V(next state) - V(state),
at the end r_o - V(state). (These worlds are deterministic, and a state is what the policy has
read.) Against it are held A^E; A^S by the run's last PRM; their sum as the run weighs it; and the
sum with the weight, of WEIGHTS, that follows the truth best on these very steps, so a little less
well on others. A correlation is Pearson's over the credited steps; the mean of so many plays is not
exact, which makes all of them smaller by the same factor, the root of the reliability that is told.
The 95 % intervals are a bootstrap over the tasks.

"Centred" are r_phi less their expectation over the answers that pi_old gives in the same state:
    E log pi_phi(a|o) - log pi_old(a|o) = -KL(pi_old(.|o) || pi_phi(.|o)),
token by token. What r_phi has beyond that depends on the state alone, and credits no action.

The run: istar_*.py or istar_paper_*.py on Sokoban or WebShop. Written: a row of
benchmarks/results/true-credit.jsonl, in place of an earlier one of the same run;
`python benchmarks/evidence.py --table` makes benchmarks/results/true-credit.md of these rows.
"""

import argparse
import random
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.throughput import load_script
from runtime.saving.files import read_json, replace_file, rows_of, to_json

import torch

ROWS = ROOT / "benchmarks" / "results" / "true-credit.jsonl"
WORLDS = {"sokoban": "Sokoban", "webshop": "WebShop"}
WEIGHTS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
SIDE_BY_SIDE = 2048  # episodes that are played on at once
RESAMPLES = 1000  # of the bootstrap


class State(NamedTuple):
    """Where an episode stands before a step."""

    task: int
    tokens: tuple[int, ...]  # o_1:t, all that the policy has read
    actions: tuple[str, ...]  # the answers that led here


class Midway:
    """The world and the chat that a script's play asks for, of episodes that begin in `states`:
    their task is the state's number."""

    def __init__(self, env, chat, states: list[State]):
        self.env, self.states = env, states
        self.response, self.observation = chat.response, chat.observation

    def reset(self, number: int):
        state = self.states[number]
        episode = self.env.reset(state.task)
        for action in state.actions:
            episode.step(action)
        episode.prompt = str(number)  # in place of its words: prompt() knows the tokens
        return episode

    def prompt(self, number: str) -> list[int]:
        return list(self.states[int(number)].tokens)


def states_of(trajectory) -> list[State]:
    """The states before each step of a trajectory whose turns are one sequence (--history 0)."""
    texts = [step.action for step in trajectory.steps]
    starts = map(trajectory.step_ids.index, range(len(texts)))
    return [
        State(trajectory.task, tuple(trajectory.token_ids[:start]), tuple(texts[:number]))
        for number, start in enumerate(starts)
    ]


def outcomes_from(states: list[State], env, play, chat, plays: int):
    """The outcomes of playing on from each state, [states, plays]. play(world, chat, tasks) gives
    an episode for each entry of tasks."""
    midway, outcomes = Midway(env, chat, states), []
    most = max(1, SIDE_BY_SIDE // plays)
    for first in tqdm(range(0, len(states), most), "playing on", disable=None):
        numbers = range(first, min(first + most, len(states)))
        tasks = [number for number in numbers for _ in range(plays)]
        outcomes += [t.outcome for t in play(midway, midway, tasks)]
    return torch.tensor(outcomes).reshape(len(states), plays)


def true_advantages(trajectories: list, play_on) -> tuple[torch.Tensor, torch.Tensor]:
    """(V(next) - V, the variance that few plays leave in it) of the steps of these trajectories,
    [S] each. play_on(states) gives outcomes [states, plays]; equal states are asked once."""
    walks = [states_of(t) for t in trajectories]
    number_of = {state: n for n, state in enumerate(dict.fromkeys(s for w in walks for s in w))}
    outcomes = play_on([*number_of])  # [states, plays]
    values = outcomes.mean(1)
    errors = outcomes.var(1) / outcomes.shape[1]

    advantages, noise = [], []
    for trajectory, walk in zip(trajectories, walks):
        at = [number_of[state] for state in walk]
        along = torch.cat([values[at], torch.tensor([float(trajectory.outcome)])])  # [T+1]
        error = torch.cat([errors[at], torch.zeros(1)])  # an outcome is exact
        advantages.append(along[1:] - along[:-1])
        noise.append(error[1:] + error[:-1])
    return torch.cat(advantages), torch.cat(noise)


@torch.no_grad()
def divergences(policy, prm, batch, args) -> torch.Tensor:
    """KL(pi_old || pi_phi) at each action token, [K]: minus the mean of log pi_phi - log pi_old
    over what pi_old could have sampled there."""
    from runtime.data import micro_batches
    from runtime.networks import plain

    def logprobs(network, micro):  # [k, vocabulary]
        head = plain(network.model).get_output_embeddings()
        logits = network.at_actions(micro, args, lambda hidden, _: head(hidden).float())
        return (logits / args.temperature).log_softmax(-1).cpu()

    kl = torch.zeros(len(batch.token_step))
    for micro in micro_batches(batch, args):
        old, phi = logprobs(policy, micro), logprobs(prm, micro)
        kl[micro.tokens] = (old.exp() * (old - phi)).sum(-1)
    return kl


def correlation(x, y, weights) -> torch.Tensor:
    """Pearson's of x and y, [S], each step counting as often as its weight says; [R] of weights
    [R, S]."""
    weights = weights / weights.sum(1, keepdim=True)
    x, y = x - (weights @ x)[:, None], y - (weights @ y)[:, None]  # [R, S]
    return (weights * x * y).sum(1) / ((weights * x**2).sum(1) * (weights * y**2).sum(1)).sqrt()


def counts_of(task: torch.Tensor) -> torch.Tensor:
    """How often a step counts, [1 + RESAMPLES, S]: once, and as often as each resample of the
    bootstrap draws its task; task [S]."""
    tasks, place = task.unique(return_inverse=True)
    draws = torch.Generator().manual_seed(1)
    drawn = torch.randint(len(tasks), (RESAMPLES, len(tasks)), generator=draws)
    drawn = torch.stack([torch.bincount(row, minlength=len(tasks)) for row in drawn])
    return torch.cat([torch.ones(1, len(task)), drawn[:, place]]).double()


def told(values: torch.Tensor) -> list[float]:
    """A number and its interval, [middle, low, high], from [1 + RESAMPLES] of counts_of."""
    edges = values[1:].quantile(torch.tensor([0.025, 0.975]).double())
    return [round(value, 4) for value in (values[0].item(), *edges.tolist())]


def correlations(credits: dict[str, torch.Tensor], truth, task) -> dict[str, dict]:
    """How each credit follows the truth, of the credited steps, [S] each: {name: its correlation,
    and by how much it is more than that of A^E}."""
    counts = counts_of(task)
    follow = {
        name: correlation(credit.double(), truth.double(), counts)
        for name, credit in credits.items()
    }
    return {
        name: {"correlation": told(values), "more": told(values - follow["A^E"])}
        for name, values in follow.items()
    }


def best_weight(episode_adv, step_adv, truth) -> float:
    """The weight of A^S whose sum with A^E follows the truth best, of the same steps, [S] each."""
    once = torch.ones(1, len(truth)).double()

    def follows(weight):
        return correlation((episode_adv + weight * step_adv).double(), truth.double(), once)

    return max(WEIGHTS, key=follows)


def of_turns(turns, step_adv, centred_adv, kl, truth, noise) -> list[dict]:
    """What the credited steps of each turn have, [S] each."""
    rows = []
    for turn in turns.unique().tolist():
        these = turns == turn
        if these.sum() > 1:
            spread = (truth[these].var() - noise[these].mean()).clamp(min=0).sqrt()
            numbers = {
                "A^S": step_adv[these].mean(),
                "A^S centred": centred_adv[these].mean(),
                "KL": kl[these].mean(),
                "true spread": spread,
            }
            numbers = {name: round(number.item(), 4) for name, number in numbers.items()}
            rows.append({"turn": turn + 1, "steps": int(these.sum()), **numbers})
    return rows


def text_of(row: dict) -> str:
    """A row as it is read."""

    def shown(values) -> str:
        return f"{values[0]:.3f} ({values[1]:.3f} to {values[2]:.3f})"

    names = {
        "A": f"A^E + {row['alpha']:.2f} A^S, as the run weighs it",
        "best": f"A^E + {row['best_weight']:g} A^S, the best weight",
        "best centred": f"A^E + {row['best_weight_centred']:g} A^S centred, the best weight",
    }
    credits = [
        f"| {names.get(name, name)} | {shown(each['correlation'])} | {shown(each['more'])} |"
        for name, each in row["credits"].items()
    ]
    titles = [*row["turns"][0]]
    turns = [
        f"| {' | '.join(str(n) if isinstance(n, int) else f'{n:.2f}' for n in turn.values())} |"
        for turn in row["turns"]
    ]
    heads = [
        f"`python {row['command']} --seed {row['seed']}`, then `{row['how']}`:",
        f"{row['steps']} steps of {row['tasks']} tasks, {row['seconds']:.0f} s. The reliability of "
        f"the true advantages is {row['reliability']:.2f}.\n",
        f"Of {row['pairs']} pairs r_phi ranks {row['ranked_right']:.3f} right, and centred "
        f"{row['ranked_right_centred']:.3f}.\n",
        "| credit | correlation with the true advantage | more than that of A^E |",
        "|---|---|---|",
    ]
    columns = [f"\n| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return "\n".join([*heads, *credits, *columns, *turns]) + "\n"


def pairs_of(script, batch, args) -> list[tuple[int, int]]:
    """The preference pairs of a batch, by the run's own flags."""
    margin = [args.pair_margin] if hasattr(args, "pair_margin") else []
    return script.preference_pairs(batch.outcomes, batch.group, *margin)


def networks_of(run: Path, dense_prm: bool) -> list:
    """[policy, PRM] of a finished run: the PRM is a full copy, or the policy plus an adapter."""
    from runtime.networks import Network

    from peft import LoraConfig, set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    policy = Network("policy", AutoModelForCausalLM.from_pretrained(run / "policy"))
    if dense_prm:
        return [policy, Network("prm", AutoModelForCausalLM.from_pretrained(run / "prm"))]
    path = run / "prm_average" if (run / "prm_average").exists() else run / "prm"  # what scores
    lora = LoraConfig.from_pretrained(path)
    lora.base_model_name_or_path = None  # where it was trained, which peft would warn of
    prm = policy.with_adapter("prm", lora)
    weights = load_file(path / "adapter_model.safetensors")
    set_peft_model_state_dict(prm.model, weights, adapter_name="prm")
    return [policy, prm]


def flags_of_run(run: Path, script) -> list[str]:
    """The words of the run's flags, as far as they are not the script's defaults."""
    from runtime.flags import flags_of

    defaults, saved = flags_of(script.Args()), read_json(run / "args.json")
    others = "runs_dir run_name resume override engine_url processes track seed".split()
    return [
        f"--{name}={value}"
        for name, value in saved.items()
        if name not in others and value != defaults.get(name)
    ]


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("run", type=Path, help="Directory of a finished run of iStar on Sokoban or WebShop.")
    add("--tasks", type=int, default=48, help="Training tasks that are played, a group each.")
    add("--plays", type=int, default=16, help="Episodes from each state; two or more.")
    add("--seed", type=int, default=7, help="Seed of the tasks and of all sampling.")
    add("--out", type=Path, default=ROWS, help="File of the rows.")
    given = parser.parse_args()
    dense_prm = (given.run / "prm" / "config.json").exists()
    if not dense_prm and not (given.run / "prm" / "adapter_config.json").exists():
        sys.exit(f"{given.run}: no finished run of iStar")
    start = read_json(given.run / "run.json")["starts"][0]
    published = start["script"].startswith("istar_paper_")
    world = start["script"].removeprefix("istar_").removeprefix("paper_")
    if world not in WORLDS:
        told = "what is measured here is iStar's credit on Sokoban or WebShop"
        sys.exit(f"{given.run}: {start['script']}; {told}")
    if published and not dense_prm:
        sys.exit(f"{given.run}: its PRM is an adapter on a base that the run does not keep")
    if given.plays < 2 or given.tasks < 1:
        sys.exit("--plays has to be 2 or more, and --tasks 1 or more")
    script = load_script(start["script"])
    words = flags_of_run(given.run, script)

    from runtime.chat import Chat
    from runtime.data import flatten, sum_per_step
    from runtime.engines import SamplingParams
    from runtime.flags import parse
    from runtime.networks import batch_logprobs
    from runtime.rollout import Stage, rollout

    from transformers import AutoTokenizer

    sys.argv = [start["script"], "--seed", str(given.seed), *words]
    args = parse(script.Args, "")
    if args.history or args.run_args.drop_thoughts:
        told = "--drop-thoughts" if args.run_args.drop_thoughts else f"--history {args.history}"
        sys.exit(f"{given.run}: {told}; a state is measured as one sequence")
    if not args.beta:
        sys.exit(f"{given.run}: --beta 0; the rewards of such a run are all 0")
    env = getattr(script, WORLDS[world]).from_args(args)
    random.seed(given.seed)
    torch.manual_seed(given.seed)
    began = time.time()

    # ------------ The run's policy and PRM play a group for each task ------------
    tokenizer = AutoTokenizer.from_pretrained(given.run / "policy")
    stops = [tokenizer.eos_token_id]
    chat = Chat(tokenizer, stops)
    policy, prm = networks_of(given.run, dense_prm)
    if args.run_args.engine == "hf" or not find_spec("vllm"):
        from runtime.engines.transformers import TransformersEngine as Engine
    else:
        from runtime.engines.vllm import VllmEngine as Engine
    engine = Engine(str(given.run / "policy"), stops, args)
    engine.load(policy.model)
    sampling = SamplingParams(args.temperature, args.max_action_tokens, stops)

    def play(world, chat, tasks):
        return rollout(Stage(engine, chat, args), script.play, world, tasks, sampling)

    tasks = sorted(random.sample(env.train_tasks, given.tasks) * args.group_size)
    played = play(env, chat, tasks)
    paired = {played[n].task for n, _ in pairs_of(script, flatten(played), args)}
    played = [t for t in played if t.task in paired]
    if not played:
        sys.exit(f"--tasks {given.tasks}: no group has a pair; more tasks may have one")
    batch = flatten(played)
    pairs = pairs_of(script, batch, args)
    old, phi = (batch_logprobs(network, batch, args) for network in (policy, prm))  # [K] each
    log_old, log_phi = sum_per_step(old, batch), sum_per_step(phi, batch)  # [S] each
    rewards = script.step_rewards(log_phi, log_old, args.beta)  # [S]
    of_tokens = divergences(policy, prm, batch, args)  # [K]
    centred = rewards + args.beta * sum_per_step(of_tokens, batch)  # [S]

    # ------------ What their steps were worth ------------
    def play_on(states):
        return outcomes_from(states, env, play, chat, given.plays)

    truth, noise = true_advantages(played, play_on)  # [S] each
    credited = ~batch.invalid | published  # [S]
    task = batch.group[batch.step_traj]  # [S]

    def standardised(rewards):
        advantages = torch.zeros_like(rewards)
        advantages[credited] = script.step_advantages(rewards[credited], task[credited])
        return advantages

    # As in the loop, but for the penalty: the truth has none.
    episode_adv = script.episode_advantages(batch, args.estimator)  # [S]
    step_adv, centred_adv = standardised(rewards), standardised(centred)  # [S] each
    logged = rows_of(given.run / "metrics.jsonl")
    alpha = args.alpha * logged[-1].get("prm/skill", 1.0)
    kl = sum_per_step(of_tokens, batch)  # [S]
    turns = torch.cat([torch.arange(len(t.steps)) for t in played])  # [S]
    right = []
    for values in (rewards, centred):
        ranked = script.margins(values, batch.step_traj, pairs).sign()
        right.append((ranked + 1).mean().item() / 2)  # a tie: 0.5

    everything = episode_adv, step_adv, centred_adv, kl, turns, task, truth, noise
    episode_adv, step_adv, centred_adv, kl, turns, task, truth, noise = (
        values[credited] for values in everything
    )
    weight = best_weight(episode_adv, step_adv, truth)
    weight_centred = best_weight(episode_adv, centred_adv, truth)
    credits = {
        "A^E": episode_adv,
        "A^S": step_adv,
        "A": episode_adv + alpha * step_adv,
        "best": episode_adv + weight * step_adv,
        "A^S centred": centred_adv,
        "best centred": episode_adv + weight_centred * centred_adv,
    }

    # ------------ The row ------------
    command = re.sub(r"^.*?(istar_\w+\.py)", r"\1", start["command"])
    command = re.sub(r" --(runs-dir|run-name|resume|seed)[= ]\S+", "", command)
    flags = f"--tasks {given.tasks} --plays {given.plays} --seed {given.seed}"
    row = {
        "command": command,
        "seed": read_json(given.run / "args.json")["seed"],
        "iteration": logged[-1]["iteration"],
        "how": f"python benchmarks/true_credit.py runs/NAME {flags}",
        "tasks": len(paired),
        "steps": len(truth),
        "seconds": round(time.time() - began),
        "reliability": round((1 - noise.mean() / truth.var()).item(), 4),
        "pairs": len(pairs),
        "ranked_right": round(right[0], 4),
        "ranked_right_centred": round(right[1], 4),
        "alpha": round(alpha, 4),
        "best_weight": weight,
        "best_weight_centred": weight_centred,
        "credits": correlations(credits, truth, task),
        "turns": of_turns(turns, step_adv, centred_adv, kl, truth, noise),
    }
    which = row["command"], row["seed"]
    others = [r for r in rows_of(given.out) if (r["command"], r["seed"]) != which]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(given.out, "".join(f"{to_json(each)}\n" for each in [*others, row]))
    print(text_of(row), end="")


if __name__ == "__main__":
    main()
