r"""Behaviour cloning of an expert: trains a policy until it sometimes succeeds, so that
reinforcement learning can start.

    min_theta  -mean log pi_theta(a_t | o_1:t)     over every token of the expert's answers

The expert plays training tasks and takes a random action with probability --noise. So the
demonstrations include states off the best path, and the clone prefers the best action only
slightly. Without --model the policy starts from random weights: a small Qwen3, or a small
Qwen2.5-VL if the world shows pictures, with a byte-level BPE tokenizer trained on the
demonstrations and a ChatML template. Training stops when success on held-out training tasks reaches
--target; the panel is evaluated once, at the end. docs/worlds.md has the commands that made the
tiny models.

    python warm_start.py --out models/tiny-sokoban
    python warm_start.py --model Qwen/Qwen2.5-0.5B-Instruct --out warm \
        --learning-rate 1e-5  # one GPU of 48 GB
"""

import asyncio
import inspect
import os
import random
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Literal

from runtime.chat import Chat
from runtime.checks import check_files
from runtime.data import Seen, Step, Trajectory, flatten, joined, micro_batches
from runtime.engines import SamplingParams
from runtime.engines.transformers import TransformersEngine
from runtime.flags import Flat, parse, refuse
from runtime.models import ModelError, read_causal_model, read_seeing_model, read_tokenizer
from runtime.networks import Network, action_logprobs
from runtime.rollout import Stage, rollout
from runtime.view.report import describe
from runtime.vision.pictures import PictureProcessor

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from tqdm import tqdm

# Byte pairs are merged only inside these units, so text to copy or compare has the same tokens.
UNITS = {
    # tags, phrases, pieces of three grid cells, digits
    "sokoban": r"(?:</?[a-z]+>)+| ?[A-Za-z]?[a-z]+(?: [a-z]+)*|[#_A-Z*]{1,3}\n?"
    r"| ?[0-9]| ?[A-Z]|\s+|[^\s\w]+|.",
    # tags, phrases, words
    "visual_sokoban": r"(?:</?[a-z]+>)+| ?[A-Za-z]?[a-z]+(?: [a-z]+)*|\s+|[^\s\w]+|.",
    # tags with the action's name, separators of actions and texts, words, asins, pairs of digits
    "webshop": r"(?:</?[a-z]+>)+(?:(?:click|search)\[)?|\](?: click\[|</action>)?| \[SEP\] "
    r"|(?<=[Bb])[0-9]{4}| ?[A-Za-z]+|[ $]*[0-9]{1,2}(?=(?:[0-9]{2})*(?![0-9]))|\.|\s+|[^\s\w]+|.",
    # tags, words, numbers
    "sotopia": r"(?:</?[a-z]+>)+| ?[A-Za-z]+|[ $]*[0-9]{1,3}|\s+|[^\s\w]+|.",
    # tags with a verb, names without their number, phrases between them, words, numbers
    "alfworld": r"(?:</?[a-z]+>)+(?:go to|[a-z]+)?| ?[a-z]+(?= [0-9])"
    r"|(?:[.,] | ?(?=[A-Z]))[A-Za-z]+(?![A-Za-z]| [0-9])"
    r"(?:[.,]? [A-Za-z]+(?![A-Za-z]| [0-9]))*| ?[A-Za-z]+| ?[0-9]+|\s+|[^\s\w]+|.",
}
UNITS["crossings"] = UNITS["sotopia"]
WORLDS = {
    "crossings": "Crossings",
    "sokoban": "Sokoban",
    "visual_sokoban": "VisualSokoban",
    "webshop": "WebShop",
    "sotopia": "Sotopia",
    "alfworld": "AlfWorld",
}
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICTURE = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SEEING_CHATML = CHATML.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}",
)
HELD_OUT = 256  # the last training tasks, for early stopping; in Sokoban other tasks share rooms


@dataclass
class RunArgs:
    """Limits of the machine; only dtype changes results."""

    micro_batch_tokens: int = 8192  # Maximum tokens of a forward and backward pass.
    engine_memory: int = 2  # Engine's KV cache on a CPU [GiB]; what does not fit is recomputed.
    engine_gpu_share: float = 0.4  # Share of a GPU's memory for the key-value cache.
    dtype: Literal["float32", "bfloat16"] = "float32"  # Precision; bfloat16 trains float32 copies.


@dataclass
class Args:
    run_args: Flat[RunArgs] = field(default_factory=RunArgs)

    environment: Literal[
        "sokoban", "visual_sokoban", "webshop", "sotopia", "alfworld", "crossings"
    ] = "sokoban"
    """World whose expert is cloned."""
    model: str = ""
    """Initial policy: a directory, or a name on the hub; empty: a new model."""
    out: str = "models/new"  # Output directory of the policy.
    target: float = 0.3  # Success on held-out tasks at which training stops.
    min_updates: int = 200
    """Updates before the first evaluation: a clone has to learn moves, not only the format."""
    max_updates: int = 4000  # Maximum number of updates, if the target is not reached before.
    demonstrations: int = 5000  # Number of the expert's episodes.
    noise: float = 0.85  # Probability of a random action in a demonstration.
    observation_share: float = 0.0
    """Share of the environment's tokens that are targets too; repeated text teaches copying."""
    batch_size: int = 64  # Episodes per update.
    learning_rate: float = 3e-3  # Learning rate (AdamW); 1e-5 for a pretrained model.
    decay: bool = False  # Linear decay of the rate to 0 at --max-updates; else constant.
    eval_every: int = 20  # Updates between evaluations on held-out tasks.
    eval_tasks: int = field(default=256, metadata={"least": 2, "most": 256})
    """Episodes of an evaluation: one of each held-out task, two of each of the panel's."""
    eval_temperature: float = 0.4  # Sampling temperature in evaluations.
    vocabulary: int = 640
    """Tokens of a new tokenizer, including 256 bytes and three special tokens."""
    hidden: int = 64  # Width of a new model.
    layers: int = 3  # Number of layers of a new model.
    heads: int = 2  # Number of query heads of a new model, each 32 wide.
    kv_heads: int = 1  # Number of key and value heads of a new model.
    rotary_base: float = 1000.0
    """Base of a new model's rotary positions: small for short sequences, 10 for pictures."""
    copying_heads: bool = False
    """New heads are initialised to copy the tokens they attend to, so copying is learnt faster."""
    matching_heads: bool = False
    """New heads are initialised to attend to tokens that are equal, near ones most."""
    max_steps: int = 15  # Longest episode [steps].
    signs: int = field(default=40, metadata={"most": 40})  # Number of different signs, Crossings.
    max_action_tokens: int = 16  # Longest answer [tokens].
    max_context_tokens: int = 1024
    """Longest context [tokens]; longer episodes are truncated. Also a new model's positions."""
    history: int = 0  # Past turns that a step sees in evaluations; 0: all, as in demonstrations.
    temperature: float = 1.0  # Temperature of log-probabilities.
    seed: int = 1  # Seed of demonstrations, initialisation and order.


async def play(env, engine, chat, task: int, sampling: SamplingParams, args) -> Trajectory:
    """One episode of any world, with or without an async `step`."""
    episode = env.reset(task)
    seen = await episode.opening() if args.environment == "sotopia" else episode.prompt
    turns = [chat.prompt(seen)]
    t = Trajectory(task)

    for _ in range(args.max_steps):
        context = joined([turns[0], *turns[1:][-args.history :]])  # [-0:] is all of them
        if len(context) + args.max_action_tokens > args.max_context_tokens:
            t.truncated = True
            break
        action, logprobs = await engine.sample(context, sampling)
        text = chat.response(action)
        observation, reward, done, info = await awaited(episode.step(text))

        t.append(context, action)
        t.steps.append(Step(seen, text, logprobs, **info))
        t.outcome += reward
        if done:
            break
        turns.append(joined([action, chat.observation(observation, action)]))
        seen = observation
    return t


async def awaited(result):
    """A step's result, of a world with or without an async `step`."""
    return await result if inspect.isawaitable(result) else result


Demonstration = tuple[Seen, list[tuple[str, Seen]]]  # (prompt, [(answer, observation), ...])


def split(env) -> tuple:
    """(tasks of the demonstrations, held-out ones: the last HELD_OUT, but at most half of all)."""
    cut = max(len(env.train_tasks) - HELD_OUT, (len(env.train_tasks) + 1) // 2)
    return env.train_tasks[:cut], env.train_tasks[cut:] or env.train_tasks


def demonstrate(env, expert, args) -> list[Demonstration]:
    """An episode of the noisy expert for each of --demonstrations."""
    rng = random.Random(args.seed)
    tasks, _ = split(env)
    with asyncio.Runner() as runner:
        return [
            runner.run(demonstration(env, expert, tasks[number % len(tasks)], args.noise, rng))
            for number in tqdm(range(args.demonstrations), "demonstrations", disable=None)
        ]


async def demonstration(env, expert, task: int, noise: float, rng) -> Demonstration:
    """An episode of the expert, who takes a random action with probability noise."""
    episode = env.reset(task)
    if hasattr(episode, "opening"):
        await episode.opening()
    prompt, turns = shown(episode.prompt, episode), []
    for answer in expert(episode, noise, rng):
        observation, *_ = await awaited(episode.step(answer))
        turns.append((answer, shown(observation, episode)))
    return prompt, turns


def shown(words: str, episode) -> Seen:
    """What a world shows: text, with a PNG if there is one."""
    seen = Seen(words)
    seen.picture = getattr(episode, "picture", None)
    return seen


def new_tokenizer(demonstrations: list, units: str, vocabulary: int, seeing: bool):
    """A byte-level BPE trained on the demonstrations' text, so any text round-trips, and frequent
    text is one token. seeing: it has the tokens that represent pictures."""
    from transformers import PreTrainedTokenizerFast  # imported here, so that --help is fast

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(units), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [
        text
        for prompt, turns in demonstrations
        for text in (prompt, *(t for answer, seen in turns for t in (answer, seen)))
    ]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(PICTURE if seeing else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, "user\nassistant\nsystem\n"], trainer)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    template = SEEING_CHATML if seeing else CHATML
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **ends)


def new_model(tokenizer, args):
    """A small Qwen3. The wide initialisation and the small rotary base allow such a small model to
    learn quickly.

    --copying-heads ties each head's output projection to its value projection, W_o = W_v^T at the
    start: with tied embeddings this increases the probability of tokens that are attended to, as in
    mimetic initialisation (arXiv 2305.09828). --matching-heads gives keys the weights of queries,
    as there: what is equal attends to itself, and by rotary positions less to what is far away."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

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
        values = values.repeat_interleave(args.heads // args.kv_heads, 0)
        values = values.flatten(0, 1)  # [heads * 32, hidden]
        size = 32 * config.initializer_range**2  # W_v^T W_v is 1 on the diagonal
        attention.o_proj.weight.data = values.T / size
    for attention in (layer.self_attn for layer in model.model.layers if args.matching_heads):
        queries = attention.q_proj.weight.data.view(args.kv_heads, -1, 32, args.hidden)
        attention.k_proj.weight.data = queries[:, 0].flatten(0, 1).clone()
    return model


def new_seeing_model(tokenizer, args):
    """A small Qwen2.5-VL with its picture processor. Its patches are cells of 16 x 16 pixels, each
    one token. The patches' first layer has small initial weights, as a patch has 1,536 numbers."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    std = 0.8 / args.hidden**0.5
    rope = {"rope_type": "default", "rope_theta": args.rotary_base, "mrope_section": [4, 6, 6]}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.max_context_tokens,
        rope_parameters=rope,
        initializer_range=std,
        bos_token_id=None,
        **ends,
    )
    tower = dict(
        depth=2,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_heads=4,
        patch_size=16,
        spatial_merge_size=1,
        out_hidden_size=args.hidden,
        fullatt_block_indexes=[0, 1],
        initializer_range=std,
    )
    names = ["vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"]
    marks = dict(zip(names, tokenizer.convert_tokens_to_ids(PICTURE)))
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=tower, tie_word_embeddings=True, **marks, **ends
    )
    config.initializer_range = std
    model = Qwen2_5_VLForConditionalGeneration(config)
    visual = model.base_model.visual
    visual.patch_embed.proj.weight.data.normal_(std=0.02)
    for distance, block in enumerate(visual.blocks, 1):
        look_at_neighbours(block.attn, distance)

    bounds = {"shortest_edge": 16 * 16, "longest_edge": 256 * 256}  # [pixels]
    pil = Qwen2VLImageProcessorPil(patch_size=16, merge_size=1, size=bounds)
    model.picture_processor = PictureProcessor("", config, args.out, pil)
    return model


@torch.no_grad()
def look_at_neighbours(attention, distance: int):
    """Initialise the four heads of a tower's layer to attend left, right, up and down, `distance`
    patches away. A tower without this initialisation had learnt nothing in 300 updates.

    This is as in ConViT (arXiv 2103.10697), by the biases of queries and keys: rotated by their
    patches' positions, their product is largest where the key's position is the query's plus the
    offset. The weights start at 1/10, so that the biases dominate at first."""
    heads, width = attention.num_heads, attention.head_dim
    frequencies = 1e4 ** (-torch.arange(0, width // 2, 2) / (width // 2))  # of rows, and of columns
    weight = attention.qkv.weight.view(3, heads, width, -1)  # query, key, value
    bias = attention.qkv.bias.view(3, heads, width)
    weight[:2] *= 0.1
    strength = 6.0  # a neighbour's neighbour gets 1/60 of its attention

    offsets = [(0, -distance), (0, distance), (-distance, 0), (distance, 0)]  # rows, columns
    for head, (rows, columns) in enumerate(offsets):
        angles = torch.cat([frequencies * rows, frequencies * columns])  # [width / 2]
        bias[0, head, : width // 2] = strength
        bias[1, head, : width // 2] = strength * angles.cos()
        bias[1, head, width // 2 :] = -strength * angles.sin()


def lay_out(chat: Chat, demonstration: Demonstration) -> Trajectory:
    """A demonstration as the tokens of a rollout with these answers."""
    prompt, turns = demonstration
    context = chat.prompt(prompt)
    t = Trajectory(0)
    for answer, observation in turns:
        ids = chat.tokenizer.encode(answer, add_special_tokens=False)
        action = [*ids, chat.tokenizer.eos_token_id]
        t.append(context, action)
        t.steps.append(Step("", answer, []))
        context = joined([context, action, chat.observation(observation, action)])
    return t


def cloning_loss(policy: Network, micro, args) -> torch.Tensor:
    """Sum of -log pi over the tokens of the answers and over a random share of the
    environment's."""
    if args.observation_share:
        places = torch.arange(micro.ids.shape[1])  # [T]
        last = (places * micro.is_action).amax(1, keepdim=True)  # [B, 1] an episode ends with one
        drawn = (torch.rand(micro.ids.shape) < args.observation_share) & (places < last)
        micro = micro._replace(is_action=micro.is_action | drawn)
    return -action_logprobs(policy, micro, args).sum()


def update(policy: Network, trajectories: list[Trajectory], args) -> float:
    """One optimiser step on these demonstrations. Returns the loss per answer token before it."""
    batch, loss = flatten(trajectories), 0.0
    policy.optimizer.zero_grad()
    for micro in micro_batches(batch, args):
        part = cloning_loss(policy, micro, args) / len(batch.token_step)
        part.backward()
        loss += part.item()
    clip_grad_norm_(policy.trained, 1.0)
    policy.optimizer.step()
    return loss


def check_writable(directory: str) -> None:
    trial = Path(directory, f".{os.getpid()}")
    try:
        trial.mkdir(parents=True)
        trial.rmdir()
    except OSError as error:
        refuse("out", directory, f"cannot be written ({error.strerror})")


def main():
    args = parse(Args, __doc__)
    if args.heads % args.kv_heads:
        refuse("kv_heads", args.kv_heads, f"has to divide --heads {args.heads}")
    if "visual" in args.environment and not args.model and args.hidden != 32 * args.heads:
        refuse("hidden", args.hidden, f"a model that sees is 32 x --heads {args.heads} wide")
    check_files(Path(args.model or "no model"), args.model)
    check_writable(args.out)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    world = import_module(f"envs.{args.environment}")
    own = {"signs": args.signs} if args.environment == "crossings" else {}
    env = getattr(world, WORLDS[args.environment])(max_steps=args.max_steps, **own)
    demonstrations = demonstrate(env, world.expert, args)
    seeing = getattr(env, "shows_pictures", False)

    if args.model:
        reading = {"use_safetensors": True, "trust_remote_code": False}
        reading["dtype"] = getattr(torch, args.run_args.dtype)
        try:
            sees = args.model, args.model, reading
            model = read_seeing_model(*sees) if seeing else read_causal_model(args.model, **reading)
            tokenizer = read_tokenizer(args.model, model, trust=False)
        except ModelError as error:
            refuse("model", args.model, str(error))
    else:
        tokenizer = new_tokenizer(demonstrations, UNITS[args.environment], args.vocabulary, seeing)
        model = new_seeing_model(tokenizer, args) if seeing else new_model(tokenizer, args)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    policy = Network("policy", model)
    policy.optimizer = AdamW(policy.trained, lr=args.learning_rate, weight_decay=0.0)
    processor = getattr(model, "picture_processor", None)
    chat = Chat(tokenizer, [tokenizer.eos_token_id], processor)
    engine = TransformersEngine("", chat.stop_ids, args)
    stage = Stage(engine, chat, args)
    sampling = SamplingParams(
        temperature=args.eval_temperature,
        max_tokens=args.max_action_tokens,
        stop_token_ids=chat.stop_ids,
    )

    def evaluate(tasks: list[int]) -> dict:
        engine.load(model)
        return describe(rollout(stage, play, env, tasks, sampling), "eval", env)

    answers = {answer for _, turns in demonstrations for answer, _ in turns}
    longest = max(len(tokenizer.encode(text, add_special_tokens=False)) + 1 for text in answers)
    if longest > args.max_action_tokens:
        reason = f"the expert's longest answer has {longest} tokens, and evaluations would cut it"
        refuse("max_action_tokens", args.max_action_tokens, reason)
    trajectories = [lay_out(chat, demonstration) for demonstration in demonstrations]
    trajectories = [t for t in trajectories if len(t.token_ids) <= args.max_context_tokens]
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    parts = f"{len(tokenizer)} tokens in the vocabulary, {len(trajectories)} episodes"
    print(f"{env.name}: {size:.2f} M parameters, {parts}")

    held_out = list(split(env)[1][: args.eval_tasks])
    order, begin = iter(()), time.time()
    for number in tqdm(range(1, args.max_updates + 1), "updates", disable=None):
        chosen = list(islice(order, args.batch_size))
        if len(chosen) < args.batch_size:
            order = iter(torch.randperm(len(trajectories)).tolist())
            chosen = list(islice(order, args.batch_size))
        rate = args.learning_rate * min(1.0, number / 20)
        if args.decay:
            rate *= 1 - (number - 1) / args.max_updates
        policy.optimizer.param_groups[0]["lr"] = rate
        loss = update(policy, [trajectories[i] for i in chosen], args)

        due = number >= args.min_updates and number % args.eval_every == 0
        if due or number == args.max_updates:
            torch.manual_seed(args.seed + number)
            row = evaluate(held_out)
            success, score = row["eval/success"], row["eval/score"]
            seen = f"loss {loss:.3f}  success {success:.3f}  score {score:.3f}"
            tqdm.write(f"{number:5} updates  {time.time() - begin:5.0f} s  {seen}")
            if success >= args.target:
                break

    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    if seeing:
        processor.processor.save_pretrained(args.out)
    row = evaluate([task for task in env.eval_tasks[: args.eval_tasks // 2] for _ in range(2)])
    reached = f"{row['eval/success']:.3f} +- {row['eval/success_error']:.3f}"
    print(f"{args.out}: success {reached} on the evaluation panel")
    if success < args.target:
        sys.exit(f"--target {args.target}: held-out success {success:.3f}; saved all the same")


if __name__ == "__main__":
    main()
