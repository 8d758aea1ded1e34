"""Chat templates of published models: a conversation that Chat builds piece by piece has the ids of
the whole template, whatever the texts look like."""

import asyncio
import json
import random
import re
import shutil
from datetime import datetime, timedelta
from functools import cache
from types import SimpleNamespace

from envs.response import action_words
from runtime.chat import Chat
from runtime.data import joined
from runtime.ending import current
from runtime.engines import SamplingParams
from runtime.models import ModelError, read_chat

import pytest
from conftest import TINY, load, run_main, settings
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CORPUS = "You see a wall, a box and a wall. I think I push the box: left, right or up.\n\n" * 3
CORPUS += "wall\n\nwall\n\n\n  wall\n" * 3
CORPUS += "user assistant system model INST think action Today Date Cutting Knowledge <think>\n"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
QWEN += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
FIRST = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)


@pytest.fixture(autouse=True)
def no_run():
    """Whose flags would go to the template."""
    current.clear()


# ------------ tokenizers: byte-level BPE, and BPE as SentencePiece has it ------------


def byte_level(control: list[str], plain: list[str] = (), rstrip: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    level = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    return with_added(tokenizer, control, plain, rstrip)


def sentencepiece(kind: str, control: list[str], plain: list[str] = (), rstrip=False) -> Tokenizer:
    """kind: "prepend", the dummy prefix of Llama-2 before every stretch between control tokens;
    "first", that of newer files, at the start of a text; "none": Gemma has no such prefix."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(vocab_size=500, special_tokens=["<unk>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    table = json.loads(tokenizer.to_str())
    table["added_tokens"] = []
    for pair in (["▁", "▁"], ["▁▁", "▁▁"]):
        table["model"]["vocab"]["".join(pair)] = len(table["model"]["vocab"])
        table["model"]["merges"].append(pair)
    tokenizer = Tokenizer.from_str(json.dumps(table))

    replace = normalizers.Replace(" ", "▁")
    prefixed = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    tokenizer.normalizer = {"prepend": prefixed, "first": None, "none": replace}[kind]
    if kind == "first":
        tokenizer.pre_tokenizer = FIRST
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    strip = [] if kind == "none" else [decoders.Strip(" ", 1, 0)]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return with_added(tokenizer, control, plain, rstrip)


def with_added(tokenizer, control, plain, rstrip):
    own = dict(normalized=False, rstrip=rstrip)
    tokenizer.add_special_tokens([AddedToken(c, special=True, **own) for c in control])
    tokenizer.add_tokens([AddedToken(p, special=False, normalized=False) for p in plain])
    return tokenizer


# ------------ templates, as the models' cards have them ------------

ROLES = (
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\n"
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n{% endif %}"
) + CHATML
QWEN3 = """
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% else %}{% set loop_messages = messages %}{% endif %}"
    "{% for message in loop_messages %}" + ROLES + "{% if message.role == 'user' %}"
    "{{ bos_token + '[INST] ' + message.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}" + ROLES + "{% set role = message.role %}"
    "{% if role == 'assistant' %}{% set role = 'model' %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL2 = (
    "{{ bos_token }}{% for message in messages %}" + ROLES + "{% if message.role == 'user' %}"
    "{{ '[INST] ' + message.content + ' [/INST]' }}{% else %}{{ message.content + eos_token }}"
    "{% endif %}{% endfor %}"
)
MISTRAL3 = (
    "{{ bos_token }}{% for message in messages %}" + ROLES + "{% if message.role == 'user' %}"
    "{{ '[INST] ' + message.content + '[/INST]' }}"
    "{% else %}{{ ' ' + message.content | trim + eos_token }}{% endif %}{% endfor %}"
)
R1 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '<｜User｜>' + message.content }}{% else %}{% set content = message.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HEADERS = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
TURNS = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
SENTENCE = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
ROLES_OF_R1 = ["<｜User｜>", "<｜Assistant｜>"]
THOUGHT = ["<think>", "</think>"]
INST, PHI = ["[INST]", "[/INST]"], ["<s>", "<|end|>", "<|user|>", "<|assistant|>"]
SP = ["<s>", "</s>"]
# template, tokenizer, (bos, eos), an answer as the template writes it
KINDS = {
    "ChatML": (CHATML, lambda: byte_level(IM), (None, "<|im_end|>"), "{}"),
    "Qwen2.5": (QWEN25, lambda: byte_level(IM), (None, "<|im_end|>"), "{}"),
    "Qwen3": (QWEN3, lambda: byte_level(IM, THOUGHT), (None, "<|im_end|>"), "{}"),
    "Llama-2": (LLAMA2, lambda: sentencepiece("prepend", SP), SP, " {} "),
    "Llama-2, newer file": (LLAMA2, lambda: sentencepiece("first", SP), SP, " {} "),
    "Llama-3": (LLAMA3, lambda: byte_level(HEADERS), HEADERS[:2], "{}"),
    "Gemma": (
        *(GEMMA, lambda: sentencepiece("none", TURNS, ["\n", "\n\n", "\n\n\n"])),
        *(("<bos>", "<end_of_turn>"), "{}"),
    ),
    "Mistral 0.2": (MISTRAL2, lambda: sentencepiece("prepend", SP), SP, "{}"),
    "Mistral 0.3": (MISTRAL3, lambda: sentencepiece("first", SP + INST), SP, " {}"),
    "R1": (R1, lambda: byte_level(SENTENCE, [*THOUGHT, *ROLES_OF_R1]), SENTENCE, "{}"),
    "Phi-3": (PHI3, lambda: sentencepiece("prepend", PHI, rstrip=True), PHI[:2], "{}"),
    "without control": (PLAIN, lambda: byte_level(IM), (None, IM[0]), " {}"),
}


def dressed(backend: Tokenizer, template: str, ends) -> PreTrainedTokenizerFast:
    bos, eos = ends
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, bos_token=bos, eos_token=eos
    )


@cache
def pair(kind: str):
    """(the kind's tokenizer, one whose control tokens nobody can write, with the same ids)."""
    template, make, ends, _ = KINDS[kind]
    backend = make()
    ours, names = dressed(backend, template, ends), {}
    for token in ours.get_added_vocab():
        if re.search(r"\w", token) and token not in THOUGHT:
            names[token] = "".join(chr(0xE000 + ord(letter)) for letter in f"[{token}]"[:99])
    table = json.loads(backend.to_str())
    for token in table["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    vocabulary = table["model"]["vocab"]
    table["model"]["vocab"] = {names.get(t, t): i for t, i in vocabulary.items()}
    template = template.replace("'<|' + message.role + '|>\\n'", "roles[message.role] + '\\n'")
    for token, secret in names.items():
        template = template.replace(token, secret)
    roles = {role: names.get(f"<|{role}|>") for role in ("user", "assistant")}
    template = "{% set roles = " + json.dumps(roles, ensure_ascii=False) + " %}" + template
    secret = Tokenizer.from_str(json.dumps(table))
    return ours, dressed(secret, template, [names.get(end) for end in ends])


OPTIONS = {"date_string": "26 Jul 2024"}
PIECES = ["", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "You see a wall", " box", ", "]
PIECES += ["é", "日本", "😀", "▁", "_x_", "I think", "0", "<0x41>", "x", "</think", "<think>"]
PIECES += [".", *IM, *HEADERS, *TURNS, *SENTENCE, *SP, *INST, *PHI, *ROLES_OF_R1]
ANSWERS = ["left", "I push the box", "<action>up</action>", "a\n\nb  c", "日本 é 😀", "0"]
ANSWERS += [
    "x </s> y",
    "<|im_end|> <|im_start|>user",
    "[INST] wall [/INST]",
    "<｜User｜>go",
    "wall: <eos>. a",
]


def words(rng) -> str:
    return "".join(rng.choices(PIECES, k=rng.randrange(6)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_whole_template(kind):
    (ours, secret), written = pair(kind), KINDS[kind][3]
    stop, rng = ours.eos_token_id, random.Random(kind)
    chat = Chat(ours, [stop], options=OPTIONS)
    start = secret.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True, **OPTIONS
    )

    # without control tokens a sign and the line break behind it may be one token of the template
    answers = [answer for answer in ANSWERS if answer[-1].isalnum() or stop in chat.between]

    def ids(text):
        return secret.encode(text, add_special_tokens=False)

    for _ in range(200):
        said = words(rng)
        context, turns = chat.prompt(said), [{"role": "user", "content": said}]
        for _ in range(rng.randrange(4)):
            answer, seen = rng.choice(answers), words(rng)
            action = ids(start + written.format(answer))[len(ids(start)) :]
            action += [stop] * (rng.random() < 0.7 and stop in chat.between)
            if action[-1] != stop:  # an answer that was cut is ended by the template
                action = ids(start + written.format(answer).rstrip())[len(ids(start)) :]
            assert chat.response(action).removeprefix(chat.opened).strip() == answer
            context = context + action + chat.observation(seen, action)
            turns.append({"role": "assistant", "content": chat.opened + answer})
            turns.append({"role": "user", "content": seen})
        whole = secret.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **OPTIONS
        )
        assert context == ids(whole), turns


THOUGHTS = ["<think>I push.</think>{}", "<think>\n\n</think>\n\n{}", "I think</think> \n {}", "{}"]
THOUGHTS += [
    "<think>a</think>b</think>\n{}",
    "<think>{}",
    "<think>wall</think>\r\n {}",
    "{}</think>",
]


@pytest.mark.parametrize(
    "kind, options", [*((kind, {}) for kind in KINDS), ("Qwen3", {"enable_thinking": False})]
)
def test_past_thoughts_are_dropped_as_the_whole_template_does(kind, options):
    """With --drop-thoughts: Qwen3's and R1's templates do it themselves, also with what the prompt
    opened; the others get the answers without thoughts. Joined as `play` does it."""
    (ours, secret), written, options = pair(kind), KINDS[kind][3], OPTIONS | options
    stop, rng = ours.eos_token_id, random.Random(kind)
    chat, dropped = Chat(ours, [stop], options=options), 0
    chat.drops_thoughts = True
    asked = dict(tokenize=False, add_generation_prompt=True, **options)
    start = secret.apply_chat_template([{"role": "user", "content": "x"}], **asked)
    answers = [answer for answer in ANSWERS if answer[-1].isalnum() or stop in chat.between]

    def ids(text):
        return secret.encode(text, add_special_tokens=False)

    for _ in range(60):
        said = words(rng)
        contents, turns = [said], [chat.prompt(said)]
        for _ in range(rng.randrange(4)):
            answer, seen = rng.choice(THOUGHTS).format(rng.choice(answers)), words(rng)
            if not (answer[-1].isalnum() or stop in chat.between):
                continue
            action = ids(start + written.format(answer))[len(ids(start)) :]
            action += [stop] * (rng.random() < 0.7 and stop in chat.between)
            if action[-1] != stop:
                action = ids(start + written.format(answer).rstrip())[len(ids(start)) :]
            turns.append(joined([action, chat.observation(seen, action)]))
            thinks = "</think>" in answer
            content = chat.response(action) if thinks else chat.opened + answer
            if kind not in ("Qwen3", "R1"):
                content = content.split("</think>")[-1].lstrip("\n")
            contents += [content, seen]
            dropped += thinks
        roles = ["user", "assistant"] * len(contents)
        conversation = [{"role": role, "content": text} for role, text in zip(roles, contents)]
        whole = ids(secret.apply_chat_template(conversation, **asked))
        assert joined(turns) == whole, contents
        for history in (1, 2):  # past turns that a step sees
            window = conversation[:1] + conversation[max(1, len(conversation) - 2 * history) :]
            whole = ids(secret.apply_chat_template(window, **asked))
            assert joined([turns[0], *turns[1:][-history:]]) == whole
    assert dropped > 30


@pytest.mark.parametrize("history", (0, 1))
def test_a_step_is_trained_on_the_context_that_it_was_sampled_from(history):
    """With --drop-thoughts a new sequence begins after a thought; without one it goes on."""
    ours, _ = pair("Qwen3")
    chat, contexts, actions = Chat(ours, [ours.eos_token_id]), [], []
    chat.drops_thoughts = True
    said = ["<think>\nleft?\n</think>\n\nleft", "up", "right", "<think>\na\n</think>\n\nup", "up"]

    class Engine:
        async def sample(self, context, sampling):
            contexts.append([*context])
            answer = ours.encode(said[len(actions)], add_special_tokens=False)
            actions.append([*answer, ours.eos_token_id])
            return actions[-1], [-1.0] * len(actions[-1])

    def step(text):
        info = {"valid": True, "success": False, "score": 0.0}
        return f"wall {len(actions)}", 0.0, len(actions) == len(said), info

    env = SimpleNamespace(reset=lambda task: SimpleNamespace(prompt="Go.", step=step))
    args = settings(max_steps=9, history=history, max_action_tokens=99, max_context_tokens=9999)
    play = load("rloo_sokoban").play
    t = asyncio.run(play(env, Engine(), chat, 7, SamplingParams(), args))
    assert [step.action for step in t.steps] == said
    assert "left?" not in ours.decode(contexts[1]) and "left" in ours.decode(contexts[1])
    for start, end in zip(t.starts, [*t.starts[1:], len(t.token_ids)]):
        ids, owners = t.token_ids[start:end], t.step_ids[start:end]
        for number in {*owners} - {-1}:
            place = owners.index(number)
            assert ids[:place] == contexts[number]
            assert ids[place : place + len(actions[number])] == actions[number]
    assert len(t.starts) == (5 if history else 3)


def test_a_sampled_stop_token_stands_once_wherever_the_template_has_it():
    """Llama-2's template writes a blank before it, which no model has to sample."""
    ours, _ = pair("Llama-2")
    chat, stop = Chat(ours, [ours.eos_token_id]), ours.eos_token_id
    action = [*ours.encode("left", add_special_tokens=False), stop]
    after = chat.observation("a wall", action)
    assert stop not in after and after[0] == ours.bos_token_id
    assert chat.observation("a wall", action[:-1]).count(stop) == 1


@pytest.mark.parametrize("kind", ("Qwen2.5", "Llama-2", "R1"))
def test_no_text_gives_an_id_that_the_model_does_not_have(kind):
    """Nor one of control: half a surrogate pair, and what is no character."""
    ours, _ = pair(kind)
    chat = Chat(ours, [ours.eos_token_id])
    for text in ("a\ufdd0b", "\ufdd0", "\ud800<｜User｜>\udfff", "\x00\ufffe\U0010ffff"):
        context = chat.prompt(text)
        assert max(context) < len(ours)
        control = [token for token in context if token in ours.get_added_vocab().values()]
        assert control == [t for t in chat.prompt("a") if t in ours.get_added_vocab().values()]


def test_what_the_prompt_opened_belongs_to_the_answer():
    """R1's prompt ends with <think>: the world reads the whole answer. Past thoughts stay in the
    context, as they were sampled."""
    ours, _ = pair("R1")
    chat = Chat(ours, [ours.eos_token_id])
    action = ours.encode("I push it.</think>\n<action>left</action>", add_special_tokens=False)
    assert chat.response([*action, ours.eos_token_id]) == chat.response(action)
    assert chat.response(action) == "<think>\nI push it.</think>\n<action>left</action>"
    assert action_words(chat.response(action)) == "left"
    context = ours.decode(chat.prompt("Go.") + action + chat.observation("A wall.", action))
    begins, ends = SENTENCE
    asked = f"{begins}<｜User｜>Go.<｜Assistant｜><think>\n{ours.decode(action)}{ends}"
    assert context == f"{asked}<｜User｜>A wall.<｜Assistant｜><think>\n"


def test_the_templates_own_variables_are_given_to_it():
    """A thought that the prompt opened and closed is no part of the answer."""
    ours, _ = pair("Qwen3")
    for options, end in (({}, ""), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")):
        chat = Chat(ours, [ours.eos_token_id], options=options)
        expected = f"<|im_start|>assistant\n{end}"
        assert ours.decode(chat.prompt("Go.")).endswith(f"Go.<|im_end|>\n{expected}")
        after = ours.decode(chat.observation("A wall.", [ours.eos_token_id]))
        assert after == f"\n<|im_start|>user\nA wall.<|im_end|>\n{expected}"
        assert chat.response(ours.encode("left", add_special_tokens=False)) == "left"


def test_the_date_is_that_of_the_runs_begin_and_stays(tmp_path):
    """A run that is taken up on a later day has the prompts that it had; what the command line
    gives to the template is there too, and what the template does not read is refused."""
    model = shutil.copytree(TINY, tmp_path / "model")
    dated = "{{ strftime_now('%d %b %Y') }}{% if shout %}!{% endif %}" + CHATML
    (model / "chat_template.jinja").write_text(dated)
    flags = "--engine hf --tasks-per-iteration 2 --group-size 2 --max-steps 1".split()
    flags += "--eval-tasks 1 --eval-samples 1 --model model --run-name run --iterations".split()
    shout = ["--chat-template-kwargs", '{"shout": true}']
    run_main("rloo_sokoban", *flags, 1, *shout, cwd=tmp_path)
    head = current[0].tokenizer.decode(current[0].chat.prompt("Go."))
    days = [datetime.now() - timedelta(days) for days in (0, 1)]  # it may be midnight
    assert head.partition("<")[0] in [f"{day:%d %b %Y}!" for day in days]

    record = tmp_path / "runs/run/run.json"
    starts = json.loads(record.read_text())["starts"]
    starts[0]["time"] = "2024-07-26T00:30:00+1400"  # the day of the place where it began
    record.write_text(json.dumps({"starts": starts}))
    again = [*flags[:-3], "--resume", "runs/run", "--iterations", 2]
    other = run_main("rloo_sokoban", *again, cwd=tmp_path, check=False)
    assert "--chat-template-kwargs , was" in other.stderr
    run_main("rloo_sokoban", *again, *shout, cwd=tmp_path)
    later = current[0].tokenizer.decode(current[0].chat.prompt("Go."))
    assert later == "26 Jul 2024!<" + head.partition("<")[2]

    words = ("message", "role", "strftime_now", "loop", "endif")  # which it does not read
    for name in ("shuot", "shou", "messages", "add_generation_prompt", *words):
        given = json.dumps({"shout": True, name: True})
        current[0].args.run_args.chat_template_kwargs = given
        with pytest.raises(SystemExit) as stop:
            read_chat(current[0].tokenizer, [], "model", run=current[0])
        said = f"--chat-template-kwargs {given}: --model's chat template takes no {name}"
        assert stop.value.code == said
    current[0].args.run_args.chat_template_kwargs = '{"shout": "false"}'  # a text is true
    with pytest.raises(SystemExit, match="true and false stand without quotes"):
        read_chat(current[0].tokenizer, [], "model", run=current[0])
    current[0].tokenizer.chat_template = "{% for %}" + CHATML
    with pytest.raises(ModelError, match="cannot be used .TemplateSyntaxError: Expected an expr"):
        read_chat(current[0].tokenizer, [], "model", run=current[0])


@pytest.mark.parametrize("value", ("{", "[1]", "3", "{'a': 1}", "[" * 4000))
def test_what_is_no_json_object_is_refused_in_one_line(value):
    done = run_main("rloo_sokoban", "--chat-template-kwargs", value, cwd=".", check=False)
    assert done.stderr.startswith(f"--chat-template-kwargs {value[:300]}")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "has to be a JSON object" in done.stderr


def test_a_template_that_refuses_the_messages_is_told_in_one_line():
    needs = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    ours = dressed(byte_level(IM), needs + CHATML, (None, "<|im_end|>"))
    with pytest.raises(ModelError, match="no system.*user and assistant in turn.*system message$"):
        read_chat(ours, [ours.eos_token_id], "m")


@pytest.mark.parametrize(
    "before, after",
    (
        *(
            ("{% for", f"{{% set messages = messages[-{n}:] %}}{{% for") for n in (3, 5, 51)
        ),  # a window
        ("message.role + '", "message.role + ' ' ~ loop.index + '"),  # rounds with numbers
        ("{% if add", "{% if messages|length > 3 %}<|im_start|>Be brief.{% endif %}{% if add"),
        ("message.content + '", "message.content + (' /think' if loop.last else '') + '"),
        (
            "{{ '<|im_start|>' + m",
            "{{ bos_token + '<|im_start|>' + m",
        ),  # not where an answer begins
    ),
)
def test_a_template_that_writes_later_turns_otherwise_is_refused(before, after):
    """What was said would have other ids in the next turn."""
    ours = dressed(byte_level(IM), CHATML.replace(before, after), ("<|endoftext|>", "<|im_end|>"))
    with pytest.raises(ModelError, match="it writes later turns otherwise than.*; edit a copy"):
        read_chat(ours, [ours.eos_token_id], "m")


def test_a_template_whose_past_answers_have_closed_their_thoughts_is_taken():
    """DeepSeek-V3.1's: what the prompt opened is <think>, and past answers begin with </think>."""
    template = R1.replace("'<｜Assistant｜>' + content", "'<｜Assistant｜></think>' + content")
    ours = dressed(byte_level(SENTENCE, [*THOUGHT, *ROLES_OF_R1]), template, SENTENCE)
    chat = Chat(ours, [ours.eos_token_id])
    action = ours.encode("a</think>left", add_special_tokens=False) + [ours.eos_token_id]
    assert chat.response(action) == "<think>\na</think>left"
    context = ours.decode(chat.prompt("Go.") + action + chat.observation("A wall.", action))
    assert context.endswith(
        f"<think>\na</think>left{SENTENCE[1]}<｜User｜>A wall.<｜Assistant｜><think>\n"
    )


@pytest.mark.parametrize(
    "before, after, told",
    (
        ("message.content", "(message.content | tojson)", "write each message once, as it is"),
        ("message.content", "(message.content | e)", "write each message once, as it is"),
        ("message.content", "message.content.replace('\\n', ' ')", "write each message once, as"),
        ("message.content", "message.content.split() | join(' ')", "write each message once, as"),
        ("message.content", "message.content.rstrip()", "write each message once, as it is"),
        ("message.content", "message.content.lstrip()", "write each message once, as it is"),
        ("message.content", "message.content.strip('\\n')", "write each message once, as it is"),
        ("message.content", "(message.content | lower)", "write each message once, as it is"),
        ("message.content", "(message.content or 'none')", "as it is, also an empty one"),
        ("message.content", "(message.content | trim or 'none')", "as it is, also an empty one"),
        ("messages %}", "messages if message.content %}", "as it is, also an empty one"),
        ("message.content", "message.content[:4000]", "write each message once, as it is"),
        ("{% for", "{% for i in range(10**9) %}{% endfor %}{% for", "Range too big"),
        ("{% if add", "{% if none", "nothing in it tells where an answer begins"),
        ("message.role + ", "message.role ~ loop.index + ", "it writes later turns otherwise"),
        ("{% for", "{{ range(10**5) | random }}{% for", "write each message once, as it is"),
        ("message.content", "message.contents", "has no attribute 'contents'"),
        ("{% for", "{% include '/etc/passwd' %}{% for", "its chat template cannot be used"),
        ("{% for", "{{ cycler.__init__.__globals__ }}{% for", "SecurityError"),
    ),
)
def test_a_template_whose_ids_would_be_others_is_refused(before, after, told):
    ours = dressed(byte_level(IM), CHATML.replace(before, after), (None, "<|im_end|>"))
    with pytest.raises(ModelError, match=re.escape(told)):
        read_chat(ours, [ours.eos_token_id], "m")


def test_a_text_for_which_no_context_has_room_is_not_tokenised_whole():
    """What has room is, whatever its length."""
    ours, _ = pair("Qwen2.5")
    chat, whole = Chat(ours, [ours.eos_token_id]), Chat(ours, [ours.eos_token_id])
    chat.most = 64
    assert 64 < len(chat.prompt("é" * 5_000_000)) < 2000
    for text in (" wall" * 40, " wall" * 99, "You see a wall" * 60):
        ids = whole.prompt(text)
        assert chat.prompt(text) == ids or len(chat.prompt(text)) > 64 < len(ids)


def test_a_run_trains_on_what_it_sampled_without_past_thoughts(tmp_path):
    """The tiny model thinks in every answer, so each step is a sequence of its own."""
    flags = (
        "--engine hf --tasks-per-iteration 2 --group-size 2 --max-steps 4 --iterations 1".split()
    )
    flags += "--eval-tasks 1 --eval-samples 1 --temperature 0.5 --run-name".split()
    run_main("rloo_sokoban", *flags, "all", cwd=tmp_path)
    run_main("rloo_sokoban", *flags, "none", "--drop-thoughts", cwd=tmp_path)
    both = [tmp_path / "runs" / name / "metrics.jsonl" for name in ("all", "none")]
    kept, dropped = (json.loads(path.read_text().splitlines()[-1]) for path in both)
    assert kept["policy/engine_gap"] < 1e-5 and dropped["policy/engine_gap"] < 1e-5
    ratios = [row["tokens/trained"] / row["tokens/rollout"] for row in (kept, dropped)]
    assert ratios[1] > 1.3 * ratios[0]  # the contexts are read again


def test_an_end_that_the_template_never_writes_is_told(capsys):
    """A base model's tokenizer under an instruct model's template: no answer would end."""
    for eos, told in (("<|endoftext|>", True), ("<|im_end|>", False)):
        ours = dressed(byte_level(IM), CHATML, (None, eos))
        read_chat(ours, [ours.eos_token_id], "base/model")
        said = capsys.readouterr().out
        assert bool(said) is told
        if told:
            assert re.search(r"base/model.*<\|endoftext\|>.*template.*<\|im_end\|>", said)
            assert len(said.splitlines()) == 1
