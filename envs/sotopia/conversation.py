"""A conversation of two sides, and the episode of one side."""

import asyncio
import logging
import re
from contextlib import contextmanager
from functools import partial

from envs.response import action_words
from envs.sotopia.endpoint import EndpointError
from envs.sotopia.judge import overall
from envs.sotopia.rules import Transcript
from envs.sotopia.scenarios import LEAVE, Scenario, background, other_name

MAX_ACTION = 1000  # characters of what is said at once
SUCCESS = 6.0  # a goal score above it is a success (iStar, arXiv 2509.19199)
PARTNER_TEMPERATURE = 0.7  # of sampling at a partner's endpoint (SOTOPIA's)
PARTNER_TOKENS = 256  # longest reply of a partner's endpoint [tokens]

RULES = f"""Answer with a short thought and what you say, or leave:
<think>...</think><action>what you say</action>
<think>...</think><action>{LEAVE}</action>"""
PARTNER_RULES = f"""\
Stay in character. Write only what you say next, one or two sentences, no name before it.
To end the conversation write exactly: {LEAVE}"""
INVALID = "Invalid answer, you said nothing. Write <think>...</think><action>what you say</action>."

log = logging.getLogger(__name__)


class ConversationLost(Exception):
    """A conversation has no outcome for this side; the message is the reason, in one line."""

    counted = True  # by summary(), so it is not a fault of the world


def parse_action(text: str) -> str | None:
    """What a model's whole response says aloud, on one line.

    None where it is not exactly a thought and an action.
    """
    words = " ".join((action_words(text) or "").split())
    return words if 0 < len(words) <= MAX_ACTION else None


def partner_words(text: str, name: str) -> str | None:
    """What a partner's endpoint says, on one line.

    Reasoning, also such as was cut short, tags, and a name or quotes around it are taken off.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    text = re.sub(r"</?(?:think|action)>", " ", text).strip()
    text = text.removeprefix(f"{name}:").strip()
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = text[1:-1]
    return " ".join(text.split())[:MAX_ACTION].strip() or None


def partner_messages(scenario: Scenario, side: int, transcript: Transcript) -> list[dict]:
    """The conversation as a partner's endpoint sees it from its side.

    Its own words are the assistant's.
    """
    messages = [{"role": "system", "content": f"{background(scenario, side)}\n{PARTNER_RULES}"}]
    for who, words in transcript:  # a template's token in somebody's speech stays plain text
        plain = words.replace("<|", "< |") if words else "(says nothing)"
        messages.append({"role": "assistant" if who == side else "user", "content": plain})
    return messages


def turns_left(number: int) -> str:
    return f"{number} turn{'s' * (number != 1)} left."


class Conversation:
    """What two sides say in turn, and what comes of it.

    partner: the scripted one, or None. `lost`: why there is no outcome, else "". `verdict`: the
    task that asks the judge, or None.
    """

    def __init__(self, env, scenario: Scenario, partner=None):
        self.env = env
        self.scenario = scenario
        self.partner = partner
        self.max_steps = env.max_steps
        self.transcript: Transcript = []
        self.episodes = []  # of the sides that the policy plays
        self.over = False
        self.lost = ""
        self.verdict = None
        self.changed = asyncio.Event()  # somebody spoke, or it is over

    @contextmanager
    def guard(self):
        """Around all that a side does.

        Where a rule or the scripted partner raises, the conversation is lost for both sides, and
        ConversationLost is raised. Where the side is cancelled, the conversation ends.
        """
        try:
            yield
        except ConversationLost:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            reason = f"scenario {self.scenario.environment['pk']}: {reason}"
            log.warning(reason)
            self.end("environment")
            self.lost = "environment"  # also where it was over already
            raise ConversationLost(reason) from error
        except BaseException:
            self.end("abandoned")
            raise

    def add(self, side: int, words: str | None) -> None:
        """One turn.

        Leaving, an agreement or a friend found, and the limit of turns end the conversation.
        """
        self.transcript.append((side, words))
        self.changed.set()
        rule = self.scenario.rule
        settled = rule is not None and rule.settled(self.transcript)
        full = len(self.transcript) >= 2 * self.max_steps
        if words == LEAVE or settled or full:
            self.end()

    async def turn(self, place: int) -> None:
        """Wait for the turn of who speaks first (place 0) or second (1), or for the end."""
        while len(self.transcript) % 2 != place and not self.over:
            self.changed.clear()
            await self.changed.wait()

    async def reply(self) -> None:
        """The other side's answer to the last turn.

        The scripted partner answers silence by silence.
        """
        side, words = self.transcript[-1]
        other = 1 - side
        if self.env.self_chat:
            await self.turn(side)
        elif self.partner:
            self.add(other, self.partner.reply(words) if words else None)
        else:
            name = self.scenario.agents[other]["first_name"]
            try:
                words = await self.env.partner.ask(
                    partner_messages(self.scenario, other, self.transcript),
                    parse=partial(partner_words, name=name),
                    temperature=PARTNER_TEMPERATURE,
                    max_tokens=PARTNER_TOKENS,
                )
            except EndpointError as error:
                self.end(f"partner: {error.reason}")
            else:
                self.add(other, words)

    def end(self, lost: str = "") -> None:
        """End it as it stands: score it by its rule, or ask the judge.

        Where nobody said a word there is nothing to judge, and the outcome is 0. lost: why there is
        no outcome.
        """
        if self.over:
            return
        self.over = True
        self.lost = lost
        self.changed.set()

        if lost:
            return
        if self.env.judge is None:
            for episode in self.episodes:
                episode.grade(self.scenario.rule.score(self.transcript, episode.side))
        elif any(words and words != LEAVE for _, words in self.transcript):
            self.verdict = asyncio.get_running_loop().create_task(self.judge())

    async def judge(self) -> None:
        """Ask the judge once, for all sides that the policy plays."""
        sides = [0, 1] if self.env.self_chat else [episode.side for episode in self.episodes]
        try:
            scores = await self.env.judge.judge(self.scenario, self.transcript, sides)
        except EndpointError as error:
            self.lost = self.lost or f"judge: {error.reason}"
        else:
            for episode in self.episodes:
                episode.grade(scores[episode.side]["goal"], scores[episode.side])

    @property
    def scored(self) -> bool:
        """It is over and has an outcome."""
        pending = self.verdict is not None and (not self.verdict.done() or self.verdict.cancelled())
        return self.over and not self.lost and not pending


class Episode:
    """One side of a conversation.

    `prompt`: the first user message, without the opening words of a side that speaks before. After
    the end: `outcome` (0..1, what training sees), `score` (the goal score over 10), `success` (goal
    score above 6) and `dimensions` (the judge's seven, or None).
    """

    def __init__(self, env, scenario: Scenario, task: int):
        self.env = env
        self.conversation = None
        self.task = task
        self.side = task % 2
        self.place = self.side if env.self_chat else 0  # 0: it speaks first
        self.name = other_name(scenario, self.side)  # what the other is called

        self.steps = 0
        self.done = False
        self.valid = False

        self.outcome = 0.0
        self.score = 0.0
        self.success = False
        self.dimensions = None

        self.start = f"{background(scenario, self.side)}\n{RULES}"
        self.prompt = f"{self.start}\n{turns_left(env.max_steps)}"

    def begin(self) -> Conversation:
        """Enter a conversation: in self-chat at the opening, not when the episode is made."""
        if self.conversation is None:
            self.conversation = self.env.conversation_for(self.task)
            self.conversation.episodes.append(self)
        return self.conversation

    async def opening(self) -> str:
        """The first user message.

        Who speaks second in self-chat waits for the opening words, which stand in it. Raises
        ConversationLost where the other side left, or was lost, before this one spoke.
        """
        conversation = self.begin()
        with conversation.guard():
            await conversation.turn(self.place)
            if conversation.over:
                await self.settle()
        if self.place == 0:
            return self.prompt
        (_, words), *_ = conversation.transcript
        opening = f"{self.name}: {words}" if words else f"{self.name} says nothing."
        return "\n".join([self.start, opening, turns_left(conversation.max_steps)])

    async def step(self, text: str) -> tuple[str, float, bool, dict]:
        """Take this side's turn with a model's whole response.

        Waits for the other side's answer, and at the end for the verdict. Bad text is silence: time
        passes. Returns (observation, reward, done, info). reward is the outcome, 0..1, on the last
        step, else 0.0. info holds valid, success, score (goal score over 10), game_reward (the
        reward), progress (by how much the goal score within reach grew, over 10; our own scenarios
        only) and anchor (who spoke last and what). Raises ConversationLost where there will be no
        outcome, and RuntimeError after the end of the episode, before its opening and out of turn.
        """
        conversation = self.playing()
        if conversation.over:
            self.done = True
            raise ConversationLost(conversation.lost or "it ended before this side's turn")
        if len(conversation.transcript) % 2 != self.place:
            raise RuntimeError("the other side speaks")

        words = parse_action(text)
        self.valid = words is not None
        self.steps += 1
        with conversation.guard():
            before = self.potential()
            conversation.add(self.side, words)
            if not conversation.over:
                await conversation.reply()
            progress = (self.potential() - before) / 10
            if conversation.over:
                await self.settle()

        reward = self.outcome if self.done else 0.0
        info = {
            "valid": self.valid,
            "success": self.success,
            "score": self.score,
            "game_reward": reward,
            "progress": progress,
            "anchor": conversation.transcript[-1],
        }
        return self.observation(), reward, self.done, info

    async def leave(self) -> tuple[float, bool, float]:
        """End the conversation as it stands, where there is no room for another answer.

        Returns (reward, success, score): the outcome is the reward. The other side's step is
        complete then. Raises ConversationLost, and RuntimeError after the end of the episode.
        """
        conversation = self.playing()
        with conversation.guard():
            conversation.end()
            await self.settle()
        return self.outcome, self.success, self.score

    def close(self) -> None:
        """This episode is not played on: without an outcome so far, the conversation is lost."""
        self.done = True
        self.begin().end("abandoned")

    def playing(self) -> Conversation:
        """The conversation. Raises RuntimeError before it has begun and after the end."""
        if self.done:
            raise RuntimeError("this episode is over: reset the environment")
        if self.conversation is None:
            raise RuntimeError("this episode has not begun: await its opening")
        return self.conversation

    async def settle(self) -> None:
        """Wait for the outcome of a conversation that is over. Raises ConversationLost."""
        conversation = self.conversation
        self.done = True
        if conversation.verdict is not None:
            await asyncio.wait([conversation.verdict])  # both sides wait: neither cancels it
            conversation.verdict.result()
        if conversation.lost:
            raise ConversationLost(conversation.lost)
        if not self.steps:
            raise ConversationLost("it ended before this side spoke")

    def potential(self) -> float:
        """The goal score within reach now, 0 to 10, where a rule knows it, else 0."""
        rule = self.conversation.scenario.rule
        return rule.potential(self.conversation.transcript, self.side) if rule else 0.0

    def grade(self, goal: float, dimensions: dict | None = None) -> None:
        """Take the goal score, 0 to 10, and the judge's seven dimensions, if it was asked."""
        self.dimensions = dimensions
        self.score = goal / 10
        self.success = goal > SUCCESS
        self.outcome = overall(dimensions) / 10 if self.env.outcome == "overall" else goal / 10

    def observation(self) -> str:
        """What this side hears in answer to its last turn."""
        who, words = self.conversation.transcript[-1]
        lines = [] if self.valid else [INVALID]
        if who != self.side and words == LEAVE:
            lines.append(f"{self.name} {LEAVE}.")
        elif who != self.side and words:
            lines.append(f"{self.name}: {words}")
        elif who != self.side and (self.valid or self.env.self_chat):
            lines.append(f"{self.name} says nothing.")
        left = self.conversation.max_steps - self.steps
        lines.append("The conversation is over." if self.done else turns_left(left))
        return "\n".join(lines)
