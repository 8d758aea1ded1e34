"""The token layout of a conversation, taken once from the tokenizer's chat template."""

import copy
import re
import sys
from functools import partial
from os.path import commonprefix

from runtime.data import Context, joined, pictures_of

from tokenizers import AddedToken

MARK = "\ufdd0"  # a token of a copy of the tokenizer alone: what follows it does not begin a text


class Chat:
    """Tokens of prompts, observations and answers; a picture stands before the words beside it.
    They are those of the whole template's text; nothing in the environment's words becomes control.
    What was sampled is not tokenised again, so past thoughts stay, unless drops_thoughts: then
    contexts have what Qwen3's template has of them. processor: the model's PictureProcessor.
    options: the template's own variables. ValueError: it has no such layout."""

    drops_thoughts, most = False, 10**9  # a run's flags

    def __init__(self, tokenizer, stop_ids: list[int], processor=None, options: dict | None = None):
        self.tokenizer, self.stop_ids, self.processor = tokenizer, stop_ids, processor
        self.apply = partial(tokenizer.apply_chat_template, tokenize=False, **options or {})
        marks = (more := [f"<Mark {n}>\n\n\n '&\"  {n}" for n in range(201)])[:3]
        layout, texts = self.layout(marks), (f"{' ' * 9999}{marks[0]}\n", "")
        padded, empty = (self.layout([text, *marks[1:]]) for text in texts)
        as_is, nothing = (layout.replace(marks[0], text) for text in texts)
        self.trims, once = layout == padded, all(layout.count(mark) == 1 for mark in marks)
        if not once or padded not in (layout, as_is) or empty != nothing:
            raise ValueError("it does not write each message once, as it is, also an empty one")
        head, header, between, answer = re.split("|".join(map(re.escape, marks)), layout)
        turns = "".join(map("".join, zip([head, *[header, between] * 100], more)))
        past, now = (re.sub(r"</?think>|\s", "", text) for text in (header, answer))
        if turns + answer != self.layout(more) or commonprefix([past, now]) not in (past, now):
            raise ValueError("it writes later turns otherwise than the first ones")
        begins, common = self.layout(marks, False) != layout, commonprefix([header, answer])
        if not between or not answer or not (begins or now.startswith(past)):
            raise ValueError("nothing in it tells where an answer begins and ends")
        opened = re.search(r"<\w+>\s*$|$", answer)[0]  # <think> that a past answer does not get
        self.opened = "" if header.rstrip().endswith(opened.rstrip()) else opened

        self.copy, frames = copy.deepcopy(tokenizer), head + header + between
        added = [t for t in self.copy.added_tokens_decoder.values() if t.content in frames]
        control = [t for t in added if re.search(r"\w", t.content)]  # Gemma has one of line breaks
        for token in control:  # R1's are not special, and would be found in words
            token.special = True
        self.copy.add_tokens(control, special_tokens=True)
        strips = any(token.rstrip for token in control)
        self.copy.add_tokens(AddedToken(MARK, rstrip=strips, normalized=False, special=False))

        token = "|".join(re.escape(token.content) for token in control) or "(?!)"
        upto = re.compile(f"(.*(?:{token}))?(.*)", re.S)
        self.frame = len(header), len(between)  # of a past answer, in the template's text
        place = len(upto.fullmatch(common)[1] or common)  # from here on a past answer is tokenised
        self.lead, self.opening = header[place:], answer[place:]
        self.follows = MARK if upto.fullmatch(common)[1] else common
        head, self.head_words = upto.fullmatch(head).groups("")
        between, self.between_words = upto.fullmatch(between).groups("")
        self.trail = re.match(f"(.*?)(?:{token})|", between, re.S)[1] or ""
        self.answer_words, answer = re.fullmatch(f"(.*?)((?:{token}).*)?", answer, re.S).groups("")
        self.head, self.between = self.encode(head), self.encode(between, after="x")
        self.answer = self.encode(answer)
        if processor:
            self.before, self.after = self.picture_frame()

    def layout(self, contents: list, answer: bool = True) -> str:
        """What the template writes of user, assistant, user, ... and where an answer begins."""
        roles = ["user", "assistant"] * len(contents)
        turns = [{"role": role, "content": content} for role, content in zip(roles, contents)]
        return self.apply(turns, add_generation_prompt=answer)

    def encode(self, text: str, after: str = "", words: bool = False) -> list[int]:
        """The ids of a text that follows another one; in words control tokens are plain text."""
        ids = partial(self.copy.encode, add_special_tokens=False, split_special_tokens=words)
        return ids(after + text)[len(ids(after)) :]

    def picture_frame(self) -> tuple[list[int], list[int]]:
        """What the template has before and after the token that stands for a picture."""
        pictured = self.layout([[{"type": "image"}, {"type": "text", "text": "<mark>"}]])
        head = self.layout(["<mark>"]).split("<mark>")[0]
        ids = self.encode(pictured.removeprefix(head).split("<mark>")[0])
        if ids.count(self.processor.image_token) != 1 or not pictured.startswith(head):
            sys.exit(f"--model {self.processor.model}: its chat template has no place for pictures")
        place = ids.index(self.processor.image_token)
        return ids[:place], ids[place + 1 :]

    def message(self, before: str, text: str, after: str) -> list[int]:
        """Words of the template, a text with its picture if it has one, and up to the answer."""
        picture = getattr(text, "picture", None)
        text = text.encode("utf-8", "replace").decode()  # no tokenizer takes half a surrogate pair
        text = (text.strip() if self.trims else text).replace(MARK, "\ufffd")
        start = text[: 8 * self.most]
        if text != start and len(self.encode(start, words=True)) > self.most:
            text = start  # no context has room for it: the rest need not be tokenised
        text += self.answer_words
        if picture is None:
            return self.encode(before + text, after, words=True) + self.answer
        shown = Context(self.processor.tokens(picture), [(0, picture)])
        words = self.encode(text, MARK, words=True)
        before = self.encode(before, after, words=True) + self.before
        return joined([before, shown, self.after + words + self.answer])

    def prompt(self, text: str) -> list[int]:
        """From the start to where the agent answers."""
        return joined([self.head, self.message(self.head_words, text, MARK if self.head else "")])

    def observation(self, text: str, action: list[int]) -> list[int]:
        """From the end of an action, whose stop token is not fed twice, to where the agent answers
        again; or, joined to it, in the place of the action and of what opened it."""
        stopped = action[-1] in self.stop_ids and action[-1] in self.between
        rest = self.between[self.between.index(action[-1]) + 1 if stopped else 0 :]
        message = self.message(self.between_words, text, MARK if self.between else "x")
        answer = self.response(action) if self.drops_thoughts else ""
        if not self.drops_thoughts or "</think>" not in self.opening + answer:
            return joined([rest, message])
        if "</think>" in (words := self.past(answer)):  # not dropped: as Qwen3's template does it
            words = self.past(answer.split("</think>")[-1].lstrip("\n"))
        ids = partial(self.encode, after=self.follows, words=True)
        rest = ids(self.lead + words + self.trail)
        rest += self.between[len(self.encode(self.trail, after="x")) :]
        turn = joined([rest, message])
        return Context(turn, pictures_of(turn), len(action) + len(ids(self.opening)))

    def past(self, answer: str) -> str:
        """What the template has of an answer where a user message follows."""
        turn = self.layout([MARK, answer.replace(MARK, "\ufffd"), MARK]).split(MARK)[1]
        return turn[self.frame[0] : len(turn) - self.frame[1]]

    def response(self, action: list[int]) -> str:
        """The text of an action, without its stop token, with the tag that the prompt opened."""
        ids = action[:-1] if action[-1] in self.stop_ids else action
        return self.opened + self.tokenizer.decode(ids)
