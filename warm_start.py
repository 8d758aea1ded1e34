"""Behaviour cloning from an expert: gives a cold policy its first successes, so that reinforcement learning can start.

    min_theta  -mean log pi_theta(a_t | o_1:t)     over every token of the expert's answers

The expert plays training tasks, and with probability --noise it takes a random action instead: the demonstrations visit
states off the best path, and the clone knows all moves but prefers the best one only a little. Without --model the
policy is made from nothing: a byte-level BPE tokenizer trained on the demonstrations, with a ChatML template, and a
small Qwen3. Training stops when success on held-out training tasks reaches --target; the panel is looked at once, at
the end. The README has the command that made models/tiny-sokoban.

    python warm_start.py --out models/tiny-sokoban
    python warm_start.py --model Qwen/Qwen2.5-0.5B-Instruct --out warm --learning-rate 1e-5
"""

import os
import random
import sys
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from typing import Literal, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # threads wait awake for microseconds; longer harms busy machines

import torch
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from envs import processes
from envs.bookkeeping import describe
from envs.checkpoints import attempt, begin
from envs.engines import HfEngine, plain

# the units inside which byte pairs are merged: what has to be copied or compared is the same token wherever it stands
UNITS = {
    # tags, phrases, pieces of three grid cells, digits
    "sokoban": r"(?:</?[a-z]+>)+| ?[A-Za-z]?[a-z]+(?: [a-z]+)*|[#_A-Z*]{1,3}\n?| ?[0-9]| ?[A-Z]|\s+|[^\s\w]+|.",
    # tags with the action's name, what separates actions and texts, words, asins, numbers in pairs of digits
    "webshop": r"(?:</?[a-z]+>)+(?:(?:click|search)\[)?|\](?: click\[|</action>)?| \[SEP\] "
    r"|(?<=[Bb])[0-9]{4}| ?[A-Za-z]+|[ $]*[0-9]{1,2}(?=(?:[0-9]{2})*(?![0-9]))|\.|\s+|[^\s\w]+|.",
    # tags, words, numbers
    "sotopia": r"(?:</?[a-z]+>)+| ?[A-Za-z]+|[ $]*[0-9]{1,3}|\s+|[^\s\w]+|.",
}
WORLDS = {"sokoban": "Sokoban", "webshop": "WebShop", "sotopia": "Sotopia"}
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELD_OUT = 256  # the last training tasks: never demonstrated, they tell when to stop
PANEL = 128  # the first evaluation tasks, as --eval-tasks of the scripts


@dataclass
class Args:
    environment: Literal["sokoban", "webshop", "sotopia"] = "sokoban"  # whose expert is cloned
    model: str = ""  # the policy to start from, a directory in Hugging Face format or a hub name; empty: from nothing
    out: str = "models/new"  # where the policy goes
    target: float = 0.3  # stop at this success on held-out tasks, at --eval-temperature
    min_updates: int = 200  # train so long before the first look: the clone has to know the moves, not only the form
    max_updates: int = 4000  # give up after so many
    demonstrations: int = 5000  # episodes of the expert
    noise: float = 0.85  # probability of a random action in a demonstration
    observation_share: float = 0.0  # of the environment's tokens, as targets too: pages that repeat teach to copy
    batch_size: int = 64  # episodes per update
    learning_rate: float = 3e-3  # of AdamW; 1e-5 suits a pretrained model
    decay: bool = False  # let the learning rate fall linearly to 0 at --max-updates; else it is constant
    eval_every: int = 20  # updates from one look at the held-out tasks to the next
    eval_temperature: float = 0.4  # of sampling in evaluation
    vocabulary: int = 640  # of a new tokenizer
    hidden: int = 64  # width of a new model
    layers: int = 3  # of a new model
    heads: int = 2  # query heads of a new model, 32 wide
    kv_heads: int = 1  # key-value heads of a new model
    rotary_base: float = 1000.0  # of a new model's rotary positions: short suits short sequences
    copying_heads: bool = False  # a new model's heads start by copying what they look at; halves the time to learn to
    max_steps: int = 15  # longest episode [steps]
    max_action_tokens: int = 16  # longest answer [tokens]
    max_context_tokens: int = 1024  # longest sequence [tokens], and the positions of a new model
    micro_batch_tokens: int = 8192  # most tokens in one forward and backward pass
    engine_memory: int = 2  # of the engine's KV cache on a CPU [GiB]; on a GPU it takes 40 %
    history: int = 0  # turns of the past that a step sees; 0: all
    temperature: float = 1.0  # of the log-probabilities
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the matrix products
    seed: int = 1  # of demonstrations, initialisation and order


# === block: data ===
@dataclass
class Step:
    observation: str  # the environment's words before the action
    action: str  # the whole response
    valid: bool
    reward: float  # the environment's own step reward
    progress: float  # the ground truth where the world knows it: by how much the distance to the goal shrank
    anchor: Hashable  # the state after the action
    engine_logprobs: list[float]  # one per sampled token, as the engine saw them


@dataclass
class Trajectory:
    """An episode as tokens: the ids that the engine saw and sampled, never decoded and tokenised again."""

    task: int  # trajectories of one task form a group
    token_ids: list[int]  # [T] prompt, action, observation, action, ...
    step_ids: list[int]  # [T] the step whose action a token belongs to; -1 where it is the environment's word
    outcome: float  # r_o
    steps: list[Step]
    starts: list[int] = field(default_factory=lambda: [0])  # where sequences start in token_ids; --history: one a step
    success: bool = False
    score: float = 0.0
    truncated: bool = False  # ended by --max-context-tokens


class Batch(NamedTuple):
    """Trajectories as flat tensors: N trajectories, S steps, K action tokens, and the sequences that carry them."""

    sequences: list  # of (ids [T], step of each token [T] or -1, places of its action tokens among the K)
    group: torch.Tensor  # [N]
    outcomes: torch.Tensor  # [N]
    step_traj: torch.Tensor  # [S]
    token_step: torch.Tensor  # [K]


def flatten(trajectories: list[Trajectory]) -> Batch:
    """Number groups, trajectories, steps and action tokens through the batch; what belongs together are neighbours."""
    groups = {task: number for number, task in enumerate(dict.fromkeys(t.task for t in trajectories))}
    sequences, step_traj, token_step = [], [], []
    for number, t in enumerate(trajectories):
        for start, end in zip(t.starts, [*t.starts[1:], len(t.token_ids)]):
            steps = [step + len(step_traj) if step >= 0 else -1 for step in t.step_ids[start:end]]
            actions = [step for step in steps if step >= 0]
            places = torch.arange(len(token_step), len(token_step) + len(actions))
            sequences.append((torch.tensor(t.token_ids[start:end]), torch.tensor(steps), places))
            token_step += actions
        step_traj += [number] * len(t.steps)
    group, outcomes = [groups[t.task] for t in trajectories], [float(t.outcome) for t in trajectories]
    return Batch(sequences, *map(torch.tensor, (group, outcomes, step_traj, token_step)))


def micro_batches(batch: Batch, budget: int, members: list[int] | None = None) -> list:
    """[(sequences, places of their action tokens among the K)]: sequences of similar length, none a fifth shorter than
    the longest, at most `budget` tokens with their padding (or one sequence). members: which; None: all."""
    members, groups = range(len(batch.sequences)) if members is None else members, []
    for i in sorted(members, key=lambda i: -len(batch.sequences[i][0])):
        longest = len(groups[-1][0][0]) if groups else 0
        if not groups or longest * (len(groups[-1]) + 1) > budget or len(batch.sequences[i][0]) < 0.8 * longest:
            groups.append([])
        groups[-1].append(batch.sequences[i])
    return [(group, torch.cat([places for _, _, places in group])) for group in groups]


def action_logprobs(model, sequences: list, args) -> torch.Tensor:
    """Log-probabilities [k] of the action tokens of sequences [(ids, steps, ...), ...] at the sampling temperature.
    Padding is on the right, where causal attention never looks: no mask. The head runs only where an action token is
    predicted, never on [T, vocabulary]; its softmax is float32. Of many such tokens it takes a gigabyte's worth at a
    time, and its logits are computed again in the backward pass."""
    causal, device, pad = plain(model), model.device, torch.nn.utils.rnn.pad_sequence

    def head(hidden, targets):  # [c, H], [c] -> [c]
        logits = causal.get_output_embeddings()(hidden / args.temperature).float()  # [c, vocabulary]
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def forward():  # -> [k]
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            hidden = causal.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]
            predicts = steps[:, 1:] >= 0  # [B, T-1] position t predicts token t+1
            chunk = max(1, 2**28 // causal.config.vocab_size)
            parts = [*zip(hidden[:, :-1][predicts].split(chunk), ids[:, 1:][predicts].split(chunk))]
            again = len(parts) > 1
            parts = [checkpoint(head, *part, use_reentrant=False) if again else head(*part) for part in parts]
        return torch.cat(parts)

    ids = pad([s[0] for s in sequences], batch_first=True).to(device)  # [B, T]
    steps = pad([s[1] for s in sequences], batch_first=True, padding_value=-1).to(device)  # [B, T]
    return processes.through(causal, forward)


@torch.no_grad()
def score_tokens(model, batch: Batch, args, label: str, members: list[int] | None = None) -> torch.Tensor:
    """action_logprobs of the whole batch, [K] on the CPU, a micro-batch at a time; 0 where a sequence is no member."""
    logprobs, micro = torch.zeros(len(batch.token_step)), micro_batches(batch, args.micro_batch_tokens, members)
    for sequences, places in tqdm(processes.share(micro, even=True), label, leave=False, disable=None):
        logprobs[places] = action_logprobs(model, sequences, args).cpu()
    return processes.total(logprobs)
    # === end block ===


# === block: rollout ===
class Chat:
    """The token layout of a conversation, taken once from the tokenizer's chat template. Words of the environment are
    encoded as plain text: a template token that stands in them does not become control."""

    def __init__(self, tokenizer, stop_ids: list[int]):
        marks = ["<mark one>", "<mark two>", "<mark three>"]
        turns = [{"role": role, "content": mark} for role, mark in zip(["user", "assistant", "user"], marks)]
        head, rest = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True).split(marks[0])
        parts = head, *rest.split(marks[1])[1].split(marks[2])
        self.head, self.between, self.answer = (tokenizer.encode(p, add_special_tokens=False) for p in parts)
        self.tokenizer, self.stop_ids = tokenizer, stop_ids

    def prompt(self, text: str) -> list[int]:
        """From the start to where the agent answers."""
        words = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return self.head + words + self.answer

    def observation(self, text: str, action: list[int]) -> list[int]:
        """From the end of an action to where the agent answers again; its stop token is not fed twice."""
        return self.between[action[-1] == self.between[0] :] + self.prompt(text)[len(self.head) :]

    def response(self, action: list[int]) -> str:
        """The text of an action, without its stop token."""
        return self.tokenizer.decode(action[:-1] if action[-1] in self.stop_ids else action)


def rollout(env, engine, chat: Chat, tasks: list[int], args, temperature: float, label: str) -> list[Trajectory]:
    """One trajectory per episode of tasks, all played side by side: each round, one answer of all whose turn it is. An
    environment of conversations (it has `start`) takes a round's answers together, and drops who got no outcome."""
    together, (tasks, episodes) = hasattr(env, "start"), begin(env, processes.own(tasks))
    prompts = dict(zip(tasks, (episode.prompt for episode in episodes)))
    assert all(prompts[task] == e.prompt for task, e in zip(tasks, episodes)), "a group's first observations differ"
    trajectories = [Trajectory(task, [], [], 0.0, [], []) for task in tasks]
    turns = [[] for _ in episodes]  # tokens: the prompt, then action and observation of each turn
    observations, said, active = {}, {}, list(range(len(episodes)))
    progress = tqdm(total=len(episodes), desc=label, leave=False, disable=None, unit="episode")
    while active:
        ready = [i for i in active if getattr(episodes[i], "ready", True)]
        for i in (i for i in ready if not turns[i]):  # only now: who speaks second has heard the opening
            observations[i], turns[i] = episodes[i].prompt, [chat.prompt(episodes[i].prompt)]
        contexts = {i: sum(turns[i][1:][-args.history :], turns[i][0]) for i in ready}  # [-0:] is the whole history
        longest = args.max_context_tokens - args.max_action_tokens
        answers = dict.fromkeys(episodes[i] for i in ready if len(contexts[i]) > longest)  # None: breaks off
        for i in [i for i in ready if episodes[i] in answers]:
            trajectories[i].truncated = True
            if not trajectories[i].steps:
                sys.exit(f"--max-context-tokens {args.max_context_tokens}: a prompt has {len(contexts[i])} tokens")
            del contexts[i]
        samples = engine.generate(list(contexts.values()), temperature) if contexts else []
        for (i, context), (action, logprobs) in zip(contexts.items(), samples):
            t, text = trajectories[i], chat.response(action)
            if args.history or not t.steps:  # a new sequence; with the whole history an episode is one
                t.starts.append(len(t.token_ids))
            words = context[len(t.token_ids) - t.starts[-1] :]
            t.token_ids += words + action
            t.step_ids += [-1] * len(words) + [len(t.steps)] * len(action)
            assert t.token_ids[t.starts[-1] :] == context + action, "not the ids that the engine saw and sampled"
            answers[episodes[i]], said[i] = text, (text, action, logprobs)
        alone = {episodes[i]: tasks[i] for i in contexts} if not together else {}
        results = env.step(answers) if together else {e: attempt(e, task, answers[e]) for e, task in alone.items()}
        for i in [i for i in active if episodes[i] in results]:
            (observation, reward, _, info), (text, action, logprobs), t = results[episodes[i]], said[i], trajectories[i]
            known = info["valid"], info["step_reward"], info["progress"], info["anchor"]
            t.steps.append(Step(observations[i], text, *known, logprobs))
            t.outcome, t.success, t.score = t.outcome + reward, info["success"], info["score"]
            turns[i].append(action + chat.observation(observation, action))
            observations[i] = observation
        active = [i for i in active if not episodes[i].done and not trajectories[i].truncated]
        progress.update(len(episodes) - len(active) - progress.n)
        progress.set_postfix(success=f"{sum(t.success for t in trajectories) / max(1, progress.n):.2f}")
    progress.close()
    for t, e, kept in zip(trajectories, episodes, env.finish(episodes)) if together else ():
        t.outcome, t.success, t.score = (e.outcome, e.success, e.score) if kept else (None, False, 0.0)
    return processes.gather([t for t in trajectories if t.outcome is not None])
    # === end block ===


def demonstrate(env, expert, args) -> list[tuple[str, list[tuple[str, str]]]]:
    """[(prompt, [(answer, observation), ...])], an episode of the noisy expert each."""
    rng, demonstrations = random.Random(args.seed), []
    tasks = env.train_tasks[:-HELD_OUT]
    for number in tqdm(range(args.demonstrations), "demonstrations", disable=None):
        episode = env.reset(tasks[number % len(tasks)])
        turns = [(answer, episode.step(answer)[0]) for answer in expert(episode, args.noise, rng)]
        demonstrations.append((episode.prompt, turns))
    return demonstrations


def new_tokenizer(demonstrations: list, units: str, vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the demonstrations' text: whatever is written round-trips, what is common is one token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(units), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    texts = [text for prompt, turns in demonstrations for text in (prompt, *(t for turn in turns for t in turn))]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, "user\nassistant\nsystem\n"], trainer)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHATML, **ends)


def new_model(tokenizer, args) -> Qwen3ForCausalLM:
    """A small Qwen3. The wide initialisation and the short rotary base are what let so small a model learn quickly.

    --copying-heads ties each head's output projection to its value projection, W_o = W_v^T at the start: with tied
    embeddings a token that is attended to becomes likelier. In the manner of mimetic initialisation (arXiv 2305.09828).
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=32,
        max_position_embeddings=args.max_context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": args.rotary_base},
        initializer_range=0.8 / args.hidden**0.5,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    for attention in (layer.self_attn for layer in model.model.layers if args.copying_heads):
        values = attention.v_proj.weight.data.view(args.kv_heads, 32, args.hidden)
        values = values.repeat_interleave(args.heads // args.kv_heads, 0).flatten(0, 1)  # [heads * 32, hidden]
        attention.o_proj.weight.data = values.T / (32 * config.initializer_range**2)  # W_v^T W_v is 1 on the diagonal
    return model


def lay_out(chat, demonstration) -> Trajectory:
    """A demonstration as the tokens that a rollout with these answers would have."""
    prompt, turns = demonstration
    t = Trajectory(0, chat.prompt(prompt), [], 0.0, [])
    t.step_ids = [-1] * len(t.token_ids)
    for number, (answer, observation) in enumerate(turns):
        action = [*chat.tokenizer.encode(answer, add_special_tokens=False), chat.tokenizer.eos_token_id]
        words = chat.observation(observation, action) if number + 1 < len(turns) else []
        t.token_ids += action + words
        t.step_ids += [number] * len(action) + [-1] * len(words)
        t.steps.append(Step("", answer, True, 0.0, 0.0, None, []))
    return t


def cloning_loss(model, sequences: list, args) -> torch.Tensor:
    """Sum of -log pi over the tokens of the answers, and over a random share of the environment's."""
    if not args.observation_share:
        return -action_logprobs(model, sequences, args).sum()
    drawn = [torch.rand(len(steps)) < args.observation_share for _, steps, _ in sequences]
    marked = [(ids, torch.where((steps >= 0) | more, 0, -1)) for (ids, steps, _), more in zip(sequences, drawn)]
    return -action_logprobs(model, marked, args).sum()


def main():
    args = tyro.cli(Args, description=__doc__)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    world = import_module(f"envs.{args.environment}")
    env = getattr(world, WORLDS[args.environment])(max_steps=args.max_steps)
    demonstrations = demonstrate(env, world.expert, args)
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        tokenizer = new_tokenizer(demonstrations, UNITS[args.environment], args.vocabulary)
        model = new_model(tokenizer, args)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    engine = HfEngine("", chat.stop_ids, args)
    trajectories = [lay_out(chat, demonstration) for demonstration in demonstrations]
    trajectories = [t for t in trajectories if len(t.token_ids) <= args.max_context_tokens]
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{env.name}: {size:.2f} M parameters, {len(tokenizer)} tokens in the vocabulary, {len(trajectories)} episodes"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    held_out, order, success, begin = list(env.train_tasks[-HELD_OUT:]), iter(()), 0.0, time.time()
    for update in tqdm(range(1, args.max_updates + 1), "updates", disable=None):
        if len(chosen := list(islice(order, args.batch_size))) < args.batch_size:
            order = iter(torch.randperm(len(trajectories)).tolist())
            chosen = list(islice(order, args.batch_size))
        batch = flatten([trajectories[i] for i in chosen])
        rate = args.learning_rate * (1 - (update - 1) / args.max_updates if args.decay else 1.0)
        loss, optimizer.param_groups[0]["lr"] = 0.0, rate * min(1.0, update / 20)
        for sequences, _ in micro_batches(batch, args.micro_batch_tokens):
            part = cloning_loss(model, sequences, args) / len(batch.token_step)
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if update >= args.min_updates and update % args.eval_every == 0:
            torch.manual_seed(args.seed + update)
            engine.load(model)
            played = rollout(env, engine, chat, held_out, args, args.eval_temperature, "held out")
            seconds, looked = time.time() - begin, describe(played, "eval", env)
            success, score = looked["eval/success"], looked["eval/score"]
            reached = f"success {success:.3f}  score {score:.3f}"
            tqdm.write(f"{update:5} updates  {seconds:5.0f} s  loss {loss:.3f}  {reached}")
            if success >= args.target:
                break
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    panel = [task for task in env.eval_tasks[:PANEL] for _ in range(2)]
    engine.load(model)
    played = describe(rollout(env, engine, chat, panel, args, args.eval_temperature, "evaluation"), "eval", env)
    reached = f"success {played['eval/success']:.3f} +- {played['eval/success_error']:.3f} on the evaluation panel"
    print(f"{args.out}: {reached}")
    if success < args.target:
        sys.exit(f"--target {args.target}: held-out success {success:.3f} after {update} updates; saved all the same")


if __name__ == "__main__":
    main()
