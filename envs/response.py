"""The form of every answer: a thought and one action, and nothing else.

<think>...</think><action>...</action>
"""

import re

TAGS = ("<think>", "</think>", "<action>", "</action>")
RESPONSE = re.compile(r"\s*<think>.*?</think>\s*<action>(.*?)</action>\s*", re.DOTALL)


def action_words(text: str) -> str | None:
    """What a model's whole response has as its action, as it stands between the tags.

    None where the form is wrong.
    """
    if any(text.count(tag) != 1 for tag in TAGS):
        return None
    match = RESPONSE.fullmatch(text)
    return match.group(1) if match else None
