"""The token layout of a conversation, taken once from the tokenizer's chat template."""

import sys
from functools import partial

from runtime.data import Context, joined


class Chat:
    """Tokens of prompts, observations and answers; a picture stands before the words beside it.

    A template's token in the environment's words does not become control; nothing that was sampled
    is tokenised again. processor: the model's PictureProcessor, where the world shows pictures.
    ValueError where the template has no such layout."""

    def __init__(self, tokenizer, stop_ids: list[int], processor=None):
        self.tokenizer, self.stop_ids, self.processor = tokenizer, stop_ids, processor
        marks = ["<mark one>", "<mark two>", "<mark three>"]
        roles = ["user", "assistant", "user"]
        turns = [{"role": role, "content": mark} for role, mark in zip(roles, marks)]
        layout = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

        if any(layout.count(mark) != 1 for mark in marks):
            raise ValueError("it does not write each message once, as it is")
        head, rest = layout.split(marks[0])
        between, answer = rest.split(marks[1])[1].split(marks[2])
        if not between or not answer:
            raise ValueError("nothing in it tells where an answer begins and ends")
        self.encode = partial(tokenizer.encode, add_special_tokens=False)
        self.head, self.between, self.answer = map(self.encode, (head, between, answer))
        if processor:
            self.before, self.after = self.picture_frame(head, marks[0])

    def picture_frame(self, head: str, mark: str) -> tuple[list[int], list[int]]:
        """What the template has before and after the token that stands for a picture."""
        content = [{"type": "image"}, {"type": "text", "text": mark}]
        turn = {"role": "user", "content": content}
        layout = self.tokenizer.apply_chat_template([turn], tokenize=False)
        ids = self.encode(layout.removeprefix(head).split(mark)[0])
        if ids.count(self.processor.image_token) != 1 or not layout.startswith(head):
            none = "its chat template has no place for a picture"
            sys.exit(f"--model {self.processor.model}: {none}")
        place = ids.index(self.processor.image_token)
        return ids[:place], ids[place + 1 :]

    def message(self, text: str) -> list[int]:
        """A picture, if the text has one (runtime.data.Seen), its words, and what follows until the
        agent answers."""
        picture = getattr(text, "picture", None)
        text = text.encode("utf-8", "replace").decode()  # no tokenizer takes half a surrogate pair
        words = self.encode(text, split_special_tokens=True)
        if picture is None:
            return words + self.answer
        shown = Context(self.processor.tokens(picture), [(0, picture)])
        return joined([self.before, shown, self.after + words + self.answer])

    def prompt(self, text: str) -> list[int]:
        """From the start to where the agent answers."""
        return joined([self.head, self.message(text)])

    def observation(self, text: str, action: list[int]) -> list[int]:
        """From the end of an action, whose stop token is not fed twice, to where the agent answers
        again."""
        stopped = action[-1] == self.between[0]
        return joined([self.between[stopped:], self.message(text)])

    def response(self, action: list[int]) -> str:
        """The text of an action, without its stop token."""
        if self.processor:
            self.processor.refuse_sampled(action)
        return self.tokenizer.decode(action[:-1] if action[-1] in self.stop_ids else action)
