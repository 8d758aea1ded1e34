"""The token layout of a conversation, taken once from the tokenizer's chat template."""


class Chat:
    """Tokens of prompts, observations and answers.

    Words of the environment are encoded as plain text: a template's token that stands in them does
    not become control. Nothing that was sampled is ever tokenised again."""

    def __init__(self, tokenizer, stop_ids: list[int]):
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
        self.head = tokenizer.encode(head, add_special_tokens=False)
        self.between = tokenizer.encode(between, add_special_tokens=False)
        self.answer = tokenizer.encode(answer, add_special_tokens=False)
        self.tokenizer, self.stop_ids = tokenizer, stop_ids

    def prompt(self, text: str) -> list[int]:
        """From the start to where the agent answers."""
        text = text.encode("utf-8", "replace").decode()  # no tokenizer takes half a surrogate pair
        words = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return self.head + words + self.answer

    def observation(self, text: str, action: list[int]) -> list[int]:
        """From the end of an action to where the agent answers again; its stop token is not fed
        twice."""
        stopped = action[-1] == self.between[0]
        return self.between[stopped:] + self.prompt(text)[len(self.head) :]

    def response(self, action: list[int]) -> str:
        """The text of an action, without its stop token."""
        if action[-1] in self.stop_ids:
            action = action[:-1]
        return self.tokenizer.decode(action)
