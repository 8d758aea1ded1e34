"""What a model writes is bad input too: 60,000 answers through each parser, and 12,000 through the
rollout's layout. And so is what a world returns: runs of random worlds."""

import asyncio
import json
import random
import signal
import sys
from functools import cache
from pathlib import Path

import envs.sokoban
import envs.sotopia
import envs.webshop
from runtime.chat import Chat
from runtime.engines import SamplingParams
from runtime.rollout import Stage, rollout
from runtime.saving.files import append
from runtime.view.report import describe, episode_lines
from runtime.vision.pictures import PictureProcessor, never_sampled

import pytest
import torch
from conftest import READY, default_model, environment, load
from transformers import AutoConfig, AutoTokenizer

sys.path.append(str(Path(__file__).parent / "bad_input"))
from tiny_world import run_in

COUNT = 60_000
WORLDS = {
    "sokoban": "Sokoban",
    "visual_sokoban": "VisualSokoban",
    "webshop": "WebShop",
    "sotopia": "Sotopia",
}
SCRIPTS = [next(s for s in READY if environment(s) == world) for world in sorted(WORLDS)]
TEMPLATE = "<|im_start|> <|im_end|> <|endoftext|> <|im_start|>system <s> </s> [INST] <|eot_id|>"
TEMPLATE = TEMPLATE.split()
TAGS = "<think> </think> <action> </action> <THINK> <think <think/> < > </ <action><action>"
TAGS = [*TAGS.split(), "&lt;action&gt;"]
WORDS = "up|down|left|right|push|click[buy now]|search[red shirt]|click[b0]|search[ ]|hello|Deal."
WORDS += "|12|-0|nan|left the conversation|I take 3 apples.|search[<a>]|click[< prev]|search[[["
WORDS = [*WORDS.split("|"), "\n", "\t", "  ", "\r\n"]
CONTROL = [chr(i) for i in range(32)]
CONTROL += ["\x7f", "\x85", "\u2028", "\u200b", "\u202e", "\ufeff", "\x00"]


def piece(rng: random.Random) -> str:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randint(1, 12)).decode("latin-1")
    if kind == 1:
        ranges = ((0, 0x300), (0, 0xD800), (0xE000, 0x110000))
        return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randint(1, 6)))
    return rng.choice((CONTROL, TEMPLATE, TAGS, WORDS)[kind - 2])


def nasty(rng: random.Random) -> str:
    """A model's whole response: pieces alone, or where an answer has its thought or its action."""
    junk = "".join(piece(rng) for _ in range(rng.randint(0, 8)))
    form, word = rng.randrange(5), rng.choice(WORDS)
    if form == 0:
        return junk
    if form == 1:
        return f"<think>{junk}</think><action>{word}</action>"
    if form == 2:
        return f"<think>{word}</think> <action>{junk}</action>{rng.choice(CONTROL + [''])}"
    if form == 3:
        return f"<think><think>{junk}</think><action>up</action></think><action>{word}</action>"
    return f"<action>{junk}</action><think>{word}</think>"


REPEATED = ["<think>", "<", " ", "a", "\n", "</action>", "<think></think>", "[", "click[", "𝕏"]
REPEATED += ["\x00", "<|im_end|>"]


def long_ones():
    """A megabyte each: what a regular expression might choke on."""
    for unit in REPEATED:
        text = unit * (1_000_000 // len(unit))
        yield text
        yield f"<think>{text}</think><action>up</action>"
        yield f"<think>a</think><action>{text}</action>"


@pytest.mark.parametrize(
    "world", [envs.sokoban, envs.webshop, envs.sotopia], ids=lambda w: w.__name__
)
def test_parsers_take_everything(world):
    rng, taken = random.Random(0), 0
    for number in range(COUNT):
        text = nasty(rng)
        if number % 1000 == 0:
            text += "\ud800"  # no tokenizer writes it; a partner's endpoint may
        action = world.parse_action(text)
        assert action is None or isinstance(action, str)
        taken += action is not None
    assert COUNT / 100 < taken < COUNT / 2  # both ways were taken
    for text in long_ones():
        world.parse_action(text)


class Engine:
    """Samples nasty answers: encoded as the model's vocabulary has them, or ids drawn at random,
    control ids too."""

    def __init__(self, tokenizer, longest: int, stop: int):
        self.tokenizer, self.longest, self.stop = tokenizer, longest, stop
        self.rng, self.count = random.Random(1), 0
        self.never = []  # tokens of pictures, which engines do not sample

    async def serve(self):
        await asyncio.Event().wait()

    async def sample(self, context, sampling):
        self.count += 1
        await asyncio.sleep(0)
        ids = [0 if token in self.never else token for token in self.nasty_ids()]
        return ids, [-1.0] * len(ids)

    def nasty_ids(self) -> list[int]:
        rng, encode = self.rng, self.tokenizer.encode
        if rng.random() < 0.7:
            spelt = rng.random() >= 0.5  # else a template token in a text is one control id
            ids = encode(nasty(rng), add_special_tokens=False, split_special_tokens=spelt)
        else:
            ids = [rng.randrange(len(self.tokenizer)) for _ in range(rng.randint(1, 12))]
        ids = ids[: ids.index(self.stop)] if self.stop in ids else ids
        ids = (ids[: self.longest - 1] + [self.stop] * rng.randrange(2))[: self.longest]
        return ids or [self.stop]


@cache
def world_of(script, partner):
    """(module, arguments, environment) of the script with its defaults; in SOTOPIA against this
    partner."""
    module = load(script)
    args = module.Args()
    if environment(script) == "sotopia":
        args.world.partner = partner
    return module, args, getattr(module, WORLDS[environment(script)]).from_args(args)


def assert_layout(t, chat, control: set[int]) -> None:
    """The words of an episode in one sequence have the template's own control tokens, and no
    other."""
    pairs = [*zip(t.token_ids, t.step_ids)]
    found = sum(i in control for i, step in pairs if step < 0)
    own = sum(i in control for i in chat.head + chat.answer)
    between = sum(i in control for i in chat.between + chat.answer)
    (stop,) = chat.stop_ids
    stopped = sum(i == stop for i, step in pairs if step >= 0)  # the template's is not fed again
    last = pairs[-1][0] == stop and pairs[-1][1] >= 0  # nothing follows it
    expected = own + (len(t.steps) - 1) * between - (stopped - last)
    if t.pictures:
        _, png = t.pictures[0]
        frame = len(chat.before + chat.processor.tokens(png) + chat.after)
        expected += len(t.pictures) * frame
    assert found == expected, "a template token came from a text"


@pytest.mark.parametrize("history", (0, 2))
@pytest.mark.parametrize("script", SCRIPTS)
def test_rollout_takes_everything(script, history, tmp_path):
    """No exception, no environment that raised, no control token but the template's own and the
    sampled ones, and what is recorded is JSON."""
    # with "self" each side hears what the other wrote
    module, args, env = world_of(script, "scripted" if history else "self")
    args.history = history
    tokenizer = AutoTokenizer.from_pretrained(default_model(script))
    stop = tokenizer.eos_token_id
    processor = None
    if getattr(env, "shows_pictures", False):
        path = default_model(script)
        config = AutoConfig.from_pretrained(path)
        processor = PictureProcessor(path, config, "tiny")
    chat = Chat(tokenizer, [stop], processor)
    engine = Engine(tokenizer, args.max_action_tokens, stop)
    engine.never = never_sampled(config) if chat.processor else []
    control = set(tokenizer.all_special_ids)
    if chat.processor:
        control |= {*chat.before, *chat.after, chat.processor.image_token}
    control |= {tokenizer.convert_tokens_to_ids(token) for token in TEMPLATE[:2]}
    stage, rng = Stage(engine, chat, args), random.Random(2)
    valid, file = 0, tmp_path / "episodes.jsonl"
    while engine.count < 1500:
        tasks = sorted(rng.choices(env.train_tasks, k=64))
        if environment(script) == "sotopia":
            tasks = env.sides_of(tasks)
        trajectories = rollout(stage, module.play, env, tasks, SamplingParams())
        assert stage.faults == 0
        for t in trajectories:
            assert len(t.token_ids) == len(t.step_ids)
            assert {*t.step_ids} == {-1, *range(len(t.steps))}
            valid += sum(step.valid for step in t.steps)
            if not history:  # in a window earlier actions are words
                assert_layout(t, chat, control)
        column = torch.zeros(sum(len(t.steps) for t in trajectories))
        append(file, episode_lines({"iteration": 0}, trajectories, {"advantage": column}))
        describe(trajectories, "train", env)
    assert 0 < valid < engine.count  # both ways were taken
    lines = file.read_bytes().split(b"\n")
    assert len(lines) > 64 and lines.pop() == b""
    for line in lines:
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


# ------------ random worlds ------------


def each_of(texts: str) -> list[str]:
    return [text.strip() for text in texts.split(" | ")]


WRONG = each_of("""None | b'on' | [] | {} | math.nan | -math.inf | 1e300 | 10**400 | np.zeros(3)
    | torch.ones(2, 2) | object() | (1, 2) | lambda: 0 | np.datetime64('2020') | 3j | float
    | torch.tensor([]) | {1: []} | SimpleNamespace(item=lambda: 1 / 0) | np.float32('nan')
    | torch.tensor(math.inf) | 'x'""")
RIGHT = {  # values that a field may have
    "observation": """'on' | '' | np.str_('on') | 'a\\ud800b' | 'word ' * 99 | f'step {self.steps}'
        | '\\x00\\u202e<|im_end|>\\x1b[2J' | ''.join(map(chr, range(1, 999)))""",
    "reward": """0.25 | np.float32(0.1) | torch.tensor(0.2) | True | -1 | np.array([0.5]) | 1e9
        | self.first % 2 | np.int8(self.first % 3) | torch.tensor([[self.first % 2]])
        | random.random() | 1e-300""",
    "done": """done | int(done) | np.bool_(done) | torch.tensor(done) | self.steps > 1 | False
        | True""",
    "info['valid']": "True | False | 1 | np.bool_(False) | torch.tensor(1) | self.steps % 2",
    "info['success']": "done | int(done) | np.float64(1) | torch.tensor([True]) | False",
    "info['score']": "0 | 1 | np.float16(0.3) | torch.tensor(0.7) | random.random() | -5",
    "info['game_reward']": "0 | np.int64(7) | torch.tensor(0.5) | -2.5",
    "info['progress']": "0 | 0.5 | np.float32(-1) | torch.tensor(self.steps) | True",
    "info['anchor']": "self.steps | 'a' | (1, 'b') | frozenset('ab') | np.int64(3) | text",
}
RIGHT = {name: each_of(texts) for name, texts in RIGHT.items()}
ERRORS = each_of("""OSError('it broke') | KeyError(7) | SystemExit | SystemExit(0) | StopIteration
    | RecursionError | asyncio.CancelledError | MemoryError('its own') | TimeoutError
    | StopAsyncIteration | ValueError('two\\nlines \\x1b[2J') | AssertionError
    | ExceptionGroup('two', [OSError()]) | UnicodeError('\\ud800')""")
PROMPTS = ["'go'", "f'task {task}'", "np.str_('go')", "'word ' * 20", "'\\ud800'", "''"]
STATES = ["0", "'a'", "(1, 'b')", "np.int64(3)", "frozenset('ab')"]
NUMBERS = ["7", "np.float32(0.5)", "torch.tensor(3)", "True", "1e-300"]
TASKS = ["range(61, 199, 7)", "[70, 80, 90, 95]", "tuple(range(99, 60, -1))", "range(60, 300)"]
SMALL_RUN = "--tasks-per-iteration 3 --group-size 3 --eval-tasks 6".split()
PLAYED = ["rloo_sokoban", "istar_webshop", "gigpo_sokoban", "rloo_sotopia"]
WAITING = """async def opening(self):
    return self.prompt
async def leave(self):
    return np.float32(0.5), True, 0.5"""


def random_world(rng: random.Random) -> dict[str, str]:
    """Lines of the program in bad_input/tiny_world.py: mostly right values, some wrong ones and
    exceptions at some steps of some episodes."""

    def some() -> str:
        of, step = rng.choice([1, 3, 9, 9, 9]), rng.randint(1, 3)
        return f"self.first % {of} == {rng.randrange(of)} and self.steps == {step}"

    def value(right: list[str]) -> str:
        return rng.choice(WRONG if rng.random() < 0.005 else right)

    step = [f"done = self.steps >= {rng.randint(1, 5)}"]
    names = [name for name in RIGHT if "anchor" in name or rng.random() < 0.8]
    step += [f"{name} = {value(RIGHT[name])}" for name in names]
    if rng.random() < 0.15:
        step.append(f"if {some()}: {rng.choice([*RIGHT])} = {rng.choice(WRONG)}")
    if rng.random() < 0.4:
        step.append(f"if {some()}: raise {rng.choice(ERRORS)}")
    if rng.random() < 0.05:
        step.append(f"if {some()}: return {rng.choice(WRONG)}")
    if rng.random() < 0.2:
        step.append("import time; time.sleep(random.random() / 200)")
    begin = [f"self.prompt = {value(PROMPTS)}", f"self.anchor = {value(STATES)}"]
    if rng.random() < 0.1:
        begin.append(f"if self.first % 9 == {rng.randrange(9)}: raise {rng.choice(ERRORS)}")
    world = ["def sides_of(self, tasks): return tasks"]
    if rng.random() < 0.3:
        world.append(f"def summary(self): return {{'own': {value(NUMBERS)}}}")
    if rng.random() < 0.2:
        world.append(f"train_tasks = {value(TASKS)}")
    lines = {"world": world, "begin": begin, "step": step}
    lines["more"] = WAITING.splitlines()
    if rng.random() < 0.3:
        lines["more"] += ["def close(self):", f"    if {some()}: raise {rng.choice(ERRORS)}"]
    return {place: "\n".join(of) for place, of in lines.items()}


FEW, MANY = 40, 200
SEEDS = [*range(FEW), *(pytest.param(n, marks=pytest.mark.slow) for n in range(FEW, MANY))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_world_ends_well_or_in_a_line(seed, tmp_path):
    """No traceback, no hang, and tables in which numbers are numbers."""
    rng = random.Random(f"world {seed}")
    lines, script = random_world(rng), rng.choice(PLAYED)
    if rng.random() < (0.6 if script == "rloo_sotopia" else 0.1):
        later = ["async def later(observation, reward, done, info):"]
        later += [f"    {line}" for line in lines["step"].splitlines()]
        later += ["    await asyncio.sleep(random.random() / 200)"]
        later += ["    return observation, reward, done, info"]
        lines["step"] = "\n".join([*later, "return later(observation, reward, done, info)"])
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(60)
    try:
        done = run_in(tmp_path, *SMALL_RUN, script=script, **lines)
    finally:
        signal.alarm(0)
    said = done.stdout + done.stderr
    assert "Traceback" not in said and "never awaited" not in said
    assert (done.returncode == 0) == (not done.stderr.strip()), done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3 and "\x1b" not in said
    for file in tmp_path.glob("runs/*/*.jsonl"):
        for row in (json.loads(line, parse_constant=pytest.fail) for line in file.open()):
            told = [value for name, value in row.items() if "/" in name]
            told += [row.get("outcome"), row.get("score"), row.get("success")]
            texts = ("observation", "action")
            for step in row.get("steps", ()):
                told += [value for name, value in step.items() if name not in texts]
            assert all(isinstance(value, int | float | None) for value in told), row
