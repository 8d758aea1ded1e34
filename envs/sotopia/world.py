"""SOTOPIA (Zhou et al. 2024, arXiv 2310.11667): conversations with private goals, then judged.

    env = Sotopia()                           # our own scenarios, a scripted partner, rules
    episode = env.reset(env.eval_tasks[0])    # the same task, the same scenario, on any machine
    text = "<think>greet</think><action>Hello!</action>"
    observation, reward, done, info = episode.step(text)

    env = Sotopia("DIR", partner_url="http://localhost:8000/v1", partner_model="NAME",
                  judge_url="http://localhost:8001/v1", judge_model="NAME")

An answer is a thought and what is said aloud; the other hears the action alone. "left the
conversation", these words and no others, ends it. Who is in it, what each side knows, and the rules
of our own scenarios: scenarios.py; endpoints and the judge: judge.py. Task 2 n + s is scenario n
played from side s. The outcome is the goal score over 10, by rule or by judge, or with
outcome="overall" the mean of the judge's seven dimensions, each moved to 0..1.

Many conversations at once. `episode.step` plays one turn and waits for all that follows from it. A
training loop plays its episodes side by side, with two calls on the environment, so that a batch
waits once for its slowest reply:

    episodes = []
    for task in tasks:  # in self-chat both sides of each conversation
        episodes += env.reset(task).conversation.episodes
    while ready := [episode for episode in episodes if episode.ready]:
        results = env.step({episode: answer_of(episode) for episode in ready})
    kept = env.finish(episodes)  # now each has outcome, score, success and dimensions

`env.step` takes one round of answers, gets the partner's replies to all of them together, and
returns the steps that are now complete; None instead of an answer breaks a conversation off (its
context is full). Verdicts are asked for in the background as soon as a conversation ends, while the
others go on; steps report reward 0 then, and the outcome is known after `env.finish`, which also
ends what is still open. `kept[i]` is False where episode i has no outcome (no verdict, no reply, or
it never spoke): drop it from its group. A task whose `reset` raises goes to `env.lose`, which
counts it. The program stops (SystemExit) when more than a fifth of the conversations are lost to
endpoints.

Self-chat, partner="self". The policy speaks both sides. A conversation is two episodes, tasks 2 n
and 2 n + 1, each with its own prompt, steps and outcome, so each side's trajectory has the tokens
of its own answers as actions and hears the other's as observations: no token counts twice, and the
sides form groups of their own. They take turns: `ready` tells whose turn it is, and a step is
complete (is returned) when the other side has answered it. The prompt of side 1 grows by the
opening words of side 0 before its first turn, and is its first observation: take `prompt` when an
episode is ready.
"""

import asyncio
import logging
import random
import re
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from envs.response import action_words
from envs.sotopia.judge import DIMENSIONS, Endpoint, EndpointError, Judge, check_url, overall
from envs.sotopia.scenarios import (
    HARD,
    LEAVE,
    OWN_COUNT,
    OWN_EVAL,
    OWN_VALIDATION,
    Bargain,
    CommonFriend,
    DataError,
    Scenario,
    Transcript,
    background,
    load_published,
    other_name,
    own_scenario,
    question,
    recast,
    scripted,
)
from runtime.ranges import Count, Positive, whole

MOST_TURNS = 20  # of a conversation, both sides together, as in SOTOPIA
MAX_ACTION = 1000  # characters of what is said at once
LOST_SHARE = 0.2  # of the conversations may be lost to endpoints
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
    """What two sides say in turn.

    `lost`: why an endpoint's failure ended it, else ""; `verdict`: the judge's, to come.
    """

    def __init__(self, scenario: Scenario, max_steps: int):
        self.scenario = scenario
        self.max_steps = max_steps
        self.transcript: Transcript = []
        self.episodes = []  # the sides that the policy plays
        self.partner = None  # the scripted one
        self.over = False
        self.counted = False
        self.lost = ""
        self.verdict = None
        self.broken = False  # a rule or the scripted partner raised

    @contextmanager
    def guard(self):
        """Around what rules and the scripted partner compute.

        Where they raise, this conversation is lost, not the run.
        """
        try:
            yield
        except Exception as error:
            key = self.scenario.environment["pk"]
            log.warning("scenario %s: %s: %s", key, type(error).__name__, error)
            self.lost = "environment"
            self.over = self.broken = True

    def add(self, side: int, words: str | None) -> None:
        """One turn.

        Leaving, an agreement or a friend found, and the limit of turns end the conversation.
        """
        self.transcript.append((side, words))
        rule = self.scenario.rule
        settled = rule is not None and rule.settled(self.transcript)
        full = len(self.transcript) >= 2 * self.max_steps
        self.over = self.over or words == LEAVE or settled or full


class Episode:
    """One side of a conversation.

    `prompt` is the first user message; `step` takes the model's whole response. `ready`: it is this
    side's turn. After the end: `outcome` (0..1, what training sees), `score` (the goal score over
    10), `success` (goal score above 6), `dimensions` (the judge's seven, or None), `lost` (no
    outcome, drop it).
    """

    def __init__(self, env: "Sotopia", conversation: Conversation, task: int, first: bool):
        self.env = env
        self.conversation = conversation
        self.task = task
        self.side = task % 2
        self.first = first
        self.name = other_name(conversation.scenario, self.side)  # what the other is called

        self.steps = 0
        self.done = False
        self.pending = False
        self.valid = False

        self.outcome = 0.0
        self.score = 0.0
        self.success = False
        self.dimensions = None
        self.lost = False

        self.before = self.potential()
        self.start = f"{background(conversation.scenario, self.side)}\n{RULES}"
        conversation.episodes.append(self)

    @property
    def ready(self) -> bool:
        return not self.done and len(self.conversation.transcript) % 2 == (not self.first)

    @property
    def prompt(self) -> str:
        """The first user message.

        It is constant, but for the side that speaks second in self-chat: it has the opening words
        once they are said.
        """
        lines = [self.start]
        opening = [] if self.first else self.conversation.transcript[:1]
        for _, words in opening:
            lines.append(f"{self.name}: {words}" if words else f"{self.name} says nothing.")
        lines.append(turns_left(self.conversation.max_steps))
        return "\n".join(lines)

    def potential(self) -> float:
        """The goal score within reach now, 0 to 10, where a rule knows it, else 0."""
        rule = self.conversation.scenario.rule
        return rule.potential(self.conversation.transcript, self.side) if rule else 0.0

    def speak(self, text: str) -> None:
        """Take this side's turn with a model's whole response.

        Without a valid one it passes in silence.
        """
        if self.done:
            raise RuntimeError("this episode is over: reset the environment")
        if not self.ready:
            raise RuntimeError("the other side speaks")

        words = parse_action(text)
        self.valid = words is not None
        self.pending = True
        self.steps += 1
        with self.conversation.guard():
            self.before = self.potential()
            self.conversation.add(self.side, words)

    def observation(self) -> str:
        """What this side hears in answer to its last turn."""
        if self.conversation.broken:
            return "The conversation is over."
        who, words = self.conversation.transcript[-1]
        lines = [] if self.valid else [INVALID]
        if who != self.side and words == LEAVE:
            lines.append(f"{self.name} {LEAVE}.")
        elif who != self.side and words:
            lines.append(f"{self.name}: {words}")
        elif who != self.side and (self.valid or len(self.env.sides) == 2):
            lines.append(f"{self.name} says nothing.")
        left = self.conversation.max_steps - self.steps
        lines.append("The conversation is over." if self.conversation.over else turns_left(left))
        return "\n".join(lines)

    def result(self) -> tuple[str, float, bool, dict]:
        """The step that is now complete, as `step` returns it."""
        conversation = self.conversation
        self.pending = False
        self.done = conversation.over
        reward = self.outcome if self.done else 0.0
        progress = 0.0
        if not conversation.broken:
            progress = (self.potential() - self.before) / 10

        info = {
            "valid": self.valid,
            "success": self.success,
            "score": self.score,
            "anchor": conversation.transcript[-1] if conversation.transcript else None,
            "game_reward": reward,
            "progress": progress,
            "dimensions": self.dimensions,
            "lost": self.lost,
        }
        return self.observation(), reward, self.done, info

    def step(self, text: str) -> tuple[str, float, bool, dict]:
        """Play a response and wait for the reply, and at the end for the verdict.

        Bad text is silence: time passes. Returns (observation, reward, done, info): reward is the
        outcome, 0..1, on the last step, else 0.0. info holds valid, success, score (goal score over
        10), anchor (who spoke last and what), game_reward (the reward), progress (by how much the
        goal score within reach grew, over 10; our own scenarios only), dimensions and lost. Raises
        RuntimeError after the end of the episode and in self-chat, whatever the text; never for the
        text itself.
        """
        if len(self.env.sides) == 2:
            reason = "self-chat has two sides that wait for each other"
            raise RuntimeError(f"{reason}: play it with env.step")

        result = self.env.step({self: text})[self]
        if self.done and self.conversation.verdict is not None:
            self.env.collect([self.conversation])
            result = self.result()
        return result


@dataclass
class SotopiaArgs:
    """The flags of this world."""

    sotopia_data: str = ""
    """Directory of the published scenarios; empty: our own, whose outcome a rule knows."""

    partner: Literal["scripted", "self"] = "scripted"
    """The other side is played by a program with private values, or by the policy itself (self)."""

    partner_url: str = ""
    """OpenAI-compatible endpoint that plays the other side; its key is in SOTOPIA_PARTNER_KEY."""

    partner_model: str = ""  # Model that the endpoint at --partner-url is asked for.

    judge_url: str = ""
    """OpenAI-compatible endpoint that judges in place of the rule; its key: SOTOPIA_JUDGE_KEY."""

    judge_model: str = ""  # Model that the endpoint at --judge-url is asked for.

    eval_partner: Literal["", "scripted", "self"] = ""
    """In evaluation the other side is played by this one; empty: as in training."""

    eval_partner_url: str = ""
    """Endpoint that plays the other side in evaluation; its key: EVAL_SOTOPIA_PARTNER_KEY."""

    eval_partner_model: str = ""  # Model that plays the other side in evaluation.

    eval_judge_url: str = ""
    """Endpoint that judges in evaluation; its key: EVAL_SOTOPIA_JUDGE_KEY."""

    eval_judge_model: str = ""  # Model that judges in evaluation.

    outcome: Literal["goal", "overall"] = "goal"
    """Outcome r_o: the goal score over 10, or the mean of the judge's seven dimensions over 10."""

    in_flight: Count = 16  # Most requests under way at an endpoint.

    timeout: Positive = 120.0  # Longest wait for an answer to a request [s].

    tries: whole(1, 100) = 5
    """Tries of a request, with growing pauses, before its conversation is lost."""


class Sotopia:
    """Conversations by task number; task 2 n + s is scenario n from side s.

    data: None is our own scenarios, a directory holds the published files. partner: "scripted" (our
    own scenarios), or "self"; a partner_url overrides "scripted". A judge_url replaces the rules of
    our own scenarios; published ones need it. outcome: "goal" or "overall" (judge). max_steps: the
    most answers of one side, half of the conversation's turns. in_flight, timeout [s], tries, pause
    [s]: of requests, at each endpoint. The keys are taken from the environment variables of these
    names. Raises ValueError for arguments that do not go together and DataError (a ValueError) for
    data that cannot be used.

    Evaluation and training share no environment. `validation_tasks` of our own scenarios share none
    with either. Every published environment trains or evaluates, so there they are training's, with
    the two characters in each other's place.

    `eval_env` is what evaluates: the environment itself, unless `from_args` makes another.
    """

    def __init__(
        self,
        data=None,
        partner="scripted",
        partner_url="",
        partner_model="",
        judge_url="",
        judge_model="",
        outcome="goal",
        max_steps=6,
        in_flight=16,
        timeout=120.0,
        tries=5,
        pause=1.0,
        judge_reasons=False,
        partner_key="SOTOPIA_PARTNER_KEY",
        judge_key="SOTOPIA_JUDGE_KEY",
    ):
        half = MOST_TURNS // 2
        if not 1 <= max_steps <= half:
            reason = f"a side speaks 1 to {half} times, half of the turns"
            raise ValueError(f"--max-steps {max_steps}: {reason}")
        if partner not in ("scripted", "self") or outcome not in ("goal", "overall"):
            flags = f"--partner {partner} --outcome {outcome}"
            raise ValueError(f"{flags}: scripted or self; goal or overall")
        if partner == "self" and partner_url:
            reason = "the policy speaks both sides, so there is no --partner-url"
            raise ValueError(f"--partner self: {reason}")
        if data and not judge_url:
            reason = "no rule knows the outcome of these scenarios, give --judge-url"
            raise ValueError(f"--sotopia-data: {reason}")
        if data and partner == "scripted" and not partner_url:
            reason = "the scripted partner knows our own scenarios alone, give --partner-url"
            raise ValueError(f"--sotopia-data: {reason}")
        if outcome == "overall" and not judge_url:
            reason = "the seven dimensions need a judge, give --judge-url"
            raise ValueError(f"--outcome overall: {reason}")
        limits = dict(in_flight=in_flight, timeout=timeout, tries=tries, pause=pause)
        for name, value in limits.items():
            if value < (1 if name in ("in_flight", "tries") else 0):
                raise ValueError(f"--{name.replace('_', '-')} {value}: too small")

        self.partner = self.judge = self.loop = None
        if partner_url:
            check_url("partner", partner_url, partner_model)
            self.partner = Endpoint(partner_url, partner_model, partner_key, **limits)
        if judge_url:
            check_url("judge", judge_url, judge_model)
            judge = Endpoint(judge_url, judge_model, judge_key, **limits)
            self.judge = Judge(judge, judge_reasons)

        self.data = data
        self.outcome = outcome
        self.max_steps = max_steps
        self.sides = (0, 1) if partner == "self" else (0,)
        self.eval_env = self

        # scenarios in order: those that evaluate, that train, that validate
        if data:
            scenarios, evaluated = load_published(data)
            count = len(scenarios)
            scenarios += recast(scenarios[evaluated:])
            self.scenario = scenarios.__getitem__
            last = len(scenarios)
        else:
            self.scenario = own_scenario
            count, evaluated, last = OWN_COUNT, OWN_EVAL, OWN_COUNT + OWN_VALIDATION
        each = len(self.sides)  # in self-chat both sides of a scenario come with the task of side 0
        self.eval_tasks = range(0, 2 * evaluated, each)
        self.train_tasks = range(2 * evaluated, 2 * count, each)
        self.validation_tasks = range(2 * count, 2 * last, each)

        # since the last summary, and what it measures
        self.finished = []
        self.reported = {}
        self.measures = ["goal", "goal_hard"]
        if self.judge:
            self.measures += [f"judge/{name}" for name in DIMENSIONS]

        with_ = {"self": "itself", "scripted": "a scripted partner"}[partner]
        with_ = partner_model if partner_url else with_
        by = judge_model if judge_url else "rule"
        judged = f"{outcome} by {by}, {max_steps} answers a side"
        self.name = f"sotopia ({data or 'own scenarios'}): {count} scenarios with {with_}, {judged}"

    @classmethod
    def from_args(cls, args) -> "Sotopia":
        """The environment of a script's flags.

        Its `eval_env` is the same, or has the partner and the judge of --eval-partner-* and
        --eval-judge-*, whose keys are EVAL_SOTOPIA_PARTNER_KEY and EVAL_SOTOPIA_JUDGE_KEY. Where it
        is self-chat, half of --eval-tasks are its conversations: each is an episode for both sides.
        Exits with a line that names the flag where flags do not go together.
        """
        world = args.world
        same = dict(data=world.sotopia_data or None, outcome=world.outcome)
        same |= dict(max_steps=args.max_steps, in_flight=world.in_flight)
        same |= dict(timeout=world.timeout, tries=world.tries)
        names = "partner partner_url partner_model judge_url judge_model".split()
        flags = {name: getattr(world, name) for name in names}

        changed = dict(flags)  # in evaluation
        if world.eval_partner or world.eval_partner_url or world.eval_partner_model:
            url = world.eval_partner_url or (world.partner_url if world.eval_partner_model else "")
            changed["partner"] = world.eval_partner or "scripted"
            changed["partner_url"] = url
            changed["partner_model"] = world.eval_partner_model
        if world.eval_judge_url or world.eval_judge_model:
            changed["judge_url"] = world.eval_judge_url or world.judge_url
            changed["judge_model"] = world.eval_judge_model or world.judge_model

        keys = {}
        for role in ("partner", "judge"):
            other = changed[f"{role}_url"] != flags[f"{role}_url"]
            keys[f"{role}_key"] = f"{'EVAL_' if other else ''}SOTOPIA_{role.upper()}_KEY"

        try:
            env = cls(**same, **flags)
        except DataError as error:
            sys.exit(f"--sotopia-data {world.sotopia_data}: {error}")
        except ValueError as error:
            sys.exit(str(error))
        try:
            if changed != flags:
                env.eval_env = cls(**same, **changed, **keys)
        except ValueError as error:
            sys.exit(re.sub(r"--(partner|judge)", r"--eval-\1", str(error)))

        number = args.run_args.eval_tasks
        if len(env.eval_env.sides) == 2 and number > 1:
            args.run_args.eval_tasks = number // 2
            print(f"--eval-tasks {number}: the two sides of {number // 2} conversations")
        return env

    def hard(self, task: int) -> bool:
        """Whether a task belongs to SOTOPIA-hard; none of our own does."""
        return self.scenario(task // 2).environment["pk"] in HARD

    def reset(self, task: int) -> Episode:
        """The episode of a task.

        In self-chat it is the side that opens. `episode.conversation.episodes` has both.
        """
        known = self.eval_tasks, self.train_tasks, self.validation_tasks
        if not any(task in tasks for tasks in known):
            last = self.validation_tasks.stop - 1
            raise IndexError(f"{self.name} has the tasks 0 to {last}, not {task}")

        conversation = Conversation(self.scenario(task // 2), self.max_steps)
        for place in self.sides:
            Episode(self, conversation, task + place, first=place == 0)
        if not self.partner and len(self.sides) == 1:
            conversation.partner = scripted(conversation.scenario, 1 - task % 2)
        return conversation.episodes[0]

    def lose(self, task: int, error: Exception) -> None:
        """Warn of a task that cannot begin because `reset` raised, and count it as lost."""
        log.warning("task %d cannot begin: %s: %s", task, type(error).__name__, error)
        self.reported["lost"] = self.reported.get("lost", 0) + 1

    def step(self, said: dict[Episode, str | None]) -> dict[Episode, tuple[str, float, bool, dict]]:
        """One round: {ready episode: response} in, {episode: its complete step} out.

        A step is (observation, reward, done, info). All partners answer together. None for a
        response ends the conversation as it stands; that is no step. Where there is a judge the
        reward is 0.0 here, and `finish` has the outcome.
        """
        for episode, text in said.items():
            if text is None:
                episode.conversation.over = True
            else:
                episode.speak(text)

        conversations = list(dict.fromkeys(episode.conversation for episode in said))
        if len(self.sides) == 1:
            self.answer([c for c in conversations if not c.over])
        for conversation in conversations:
            self.close(conversation)

        results = {}
        sides = [episode for c in conversations for episode in c.episodes]
        for episode in sides:
            if episode.pending and (episode.conversation.over or episode.ready):
                results[episode] = episode.result()
        for episode in sides:  # also one that never got to speak
            episode.done = episode.conversation.over
        return results

    def answer(self, conversations: list[Conversation]) -> None:
        """The partner's turn in each of these, all at once.

        The scripted one answers silence by silence.
        """
        asked = []
        for c in conversations:
            agent, words = c.transcript[-1]
            if self.partner is None:
                with c.guard():
                    c.add(1 - agent, c.partner.reply(words) if words else None)
            else:
                asked.append((c, 1 - agent))

        requests = [
            self.partner.ask(
                partner_messages(c.scenario, side, c.transcript),
                parse=partial(partner_words, name=c.scenario.agents[side]["first_name"]),
                temperature=PARTNER_TEMPERATURE,
                max_tokens=PARTNER_TOKENS,
            )
            for c, side in asked
        ]
        replies = self.submit(self.all_of(requests)).result() if requests else []
        for (c, side), reply in zip(asked, replies):
            if isinstance(reply, EndpointError):
                c.lost = f"partner: {reply.reason}"
                c.over = True
            else:
                c.add(side, reply)

    @staticmethod
    async def all_of(requests: list) -> list:
        """Their answers in order, an EndpointError in the place of one that failed."""
        answers = await asyncio.gather(*requests, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EndpointError):
                raise answer
        return answers

    def submit(self, coroutine):
        """Run a coroutine in the thread of the endpoints' event loop: a future."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            run = self.loop.run_forever
            threading.Thread(target=run, daemon=True, name="sotopia endpoints").start()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self, conversation: Conversation) -> None:
        """Where a conversation has ended, score it by its rule, or send it to the judge.

        Where nobody said a word the outcome is 0.
        """
        c = conversation
        if not c.over or c.counted:
            return

        c.counted = True
        spoke = any(words and words != LEAVE for _, words in c.transcript)
        for episode in c.episodes:
            if c.scenario.rule and not self.judge and not c.lost:
                with c.guard():
                    self.grade(episode, c.scenario.rule.score(c.transcript, episode.side))
        for episode in c.episodes:
            episode.lost = bool(c.lost) or not episode.steps

        if self.judge and spoke and not c.lost:
            sides = [episode.side for episode in c.episodes]
            c.verdict = self.submit(self.judge.judge(c.scenario, list(c.transcript), sides))

    def grade(self, episode: Episode, goal: float, dimensions: dict | None = None) -> None:
        episode.dimensions = dimensions
        episode.score = goal / 10
        episode.success = goal > SUCCESS
        episode.outcome = overall(dimensions) / 10 if self.outcome == "overall" else goal / 10

    def collect(self, conversations: list[Conversation]) -> None:
        """Wait for the verdicts on these, and grade their episodes."""
        for c in conversations:
            if c.verdict is None or c.lost:
                continue
            try:
                scores = c.verdict.result()
            except EndpointError as error:
                c.lost = f"judge: {error.reason}"
            for episode in c.episodes:
                if c.lost:
                    episode.lost = True
                else:
                    self.grade(episode, scores[episode.side]["goal"], scores[episode.side])

    def finish(self, episodes: list[Episode]) -> list[bool]:
        """End what is open, wait for all verdicts, and tell which episodes have an outcome.

        The others are to be dropped. Raises SystemExit, with the reasons, when more than a fifth of
        the conversations are lost to endpoints.
        """
        conversations = list(dict.fromkeys(episode.conversation for episode in episodes))
        for c in conversations:
            c.over = True
            self.close(c)
            for episode in c.episodes:
                episode.done = True
        self.collect(conversations)
        for e in episodes:
            if not e.lost:
                self.finished.append((e.score, self.hard(e.task), e.dimensions))

        lost = [c for c in conversations if c.lost]
        self.reported["lost"] = self.reported.get("lost", 0) + len(lost)
        reasons = Counter(c.lost for c in lost).most_common()
        reasons = ", ".join(f"{reason} x {n}" for reason, n in reasons)
        if lost:
            log.warning("%d of %d conversations lost (%s)", len(lost), len(conversations), reasons)
        failed = sum(not c.broken for c in lost)  # a world that raises does not stop the run
        if failed > LOST_SHARE * len(conversations):
            share = f"{failed} of {len(conversations)} conversations"
            sys.exit(f"stopped: {share} lost to endpoints ({reasons})")
        return [not episode.lost for episode in episodes]

    def summary(self) -> dict[str, float]:
        """What to log of the episodes finished since the last call, of all processes.

        That is goal (0 to 10), goal_hard where any is hard, the judge's seven dimensions,
        conversations lost, and for each endpoint asked, answered, retries and the reasons of failed
        tries, as "judge/429".
        """
        from runtime.distributed import (
            processes,  # brings torch, which the conversations do not need
        )

        finished = processes.gather(self.finished)
        groups = {"goal": [score * 10 for score, _, _ in finished]}
        groups["goal_hard"] = [score * 10 for score, hard, _ in finished if hard]
        for name in DIMENSIONS if self.judge else ():
            groups[f"judge/{name}"] = [scores[name] for _, _, scores in finished if scores]
        row = {key: sum(values) / len(values) for key, values in groups.items() if values}
        row["lost"] = sum(processes.gather([self.reported.get("lost", 0)]))

        endpoints = {"partner": self.partner, "judge": self.judge and self.judge.endpoint}
        for role, endpoint in endpoints.items():
            counts = endpoint.counts if endpoint else Counter()
            total = sum(processes.gather([counts]), Counter())
            row |= {f"{role}/{key}": number for key, number in sorted(total.items())}
            counts.clear()

        self.finished = []
        self.reported = {}
        return row


# --- the expert -----------------------------------------------------------------------------------

CONCEDES = 0.6  # of its own ten points, from one offer to the next


def expert(episode: Episode, noise: float = 0.0, rng: random.Random | None = None):
    """Yield the responses of a good negotiator, to be stepped one by one.

    They end with the episode. Our own scenarios only. It knows the rule: it brings the argument
    that moves the partner, opens at its target, concedes slowly and takes the last offer before
    time is up; it asks what rules out most friends. `noise` is the probability of a random move
    instead (an argument, an offer of any size, a question, a name, agreement, leaving), drawn from
    `rng`.
    """
    rng = rng or random.Random(0)
    rule = episode.conversation.scenario.rule
    if rule is None:
        raise ValueError("the expert knows our own scenarios alone")

    best_move = search_move if isinstance(rule, CommonFriend) else bargain_move
    while not episode.done:
        if rng.random() < noise:
            thought, words = random_move(episode, rng)
        else:
            thought, words = best_move(episode)
        yield f"<think>{thought}</think><action>{words}</action>"


def bargain_move(episode: Episode) -> tuple[str, str]:
    """(thought, words) of the expert in a bargain or a division."""
    conversation = episode.conversation
    rule = conversation.scenario.rule
    side = episode.side

    said = [words for who, words in conversation.transcript if who == side and words]
    offers = [offer for offer in (rule.offer(words, side) for words in said) if offer is not None]
    left = conversation.max_steps - episode.steps
    now = episode.potential()
    wish = 10 - CONCEDES * len(offers)
    if now > 0 and (left == 1 or now >= wish):
        return "last chance" if left == 1 else "good enough", "Deal."

    offer = next_offer(rule, side, wish, offers)
    argument = rule.moved_by[1 - side]
    if any(argument in words for words in said):
        return "move a little", rule.say(offer, side)
    return f"this moves {episode.name}", f"{argument} {rule.say(offer, side)}"


def next_offer(rule, side: int, wish: float, offers: list):
    """An offer worth `wish` to a side.

    Or so much less that it gives the other more than any offer before.
    """
    if isinstance(rule, Bargain):
        while (offer := rule.counter(wish / 10, side)) in offers:
            wish -= 0.2
        return offer

    best = max((rule.utility(offer, 1 - side) for offer in offers), default=0.1)
    better = [offer for offer in rule.offers() if rule.utility(offer, 1 - side) > best]
    better = better or offers[-1:]
    return max(better, key=lambda offer: (rule.value(offer, side), rule.value(offer, 1 - side)))


def search_move(episode: Episode) -> tuple[str, str]:
    """(thought, words) of the expert in search of a common friend.

    It halves the candidates and names the last.
    """
    conversation = episode.conversation
    rule = conversation.scenario.rule
    side = episode.side

    said = [words for who, words in conversation.transcript if who == side and words]
    candidates = rule.candidates(conversation.transcript, side)
    asked = {trait for words in said for trait in rule.asked(words)}
    traits = []
    for place in (1, 2):
        traits += [(place, trait) for trait in dict.fromkeys(f[place] for f in candidates)]

    sizes = {t: sum(t[1] in f for f in candidates) for t in traits if t[1] not in asked}
    splits = {t: size for t, size in sizes.items() if size < len(candidates)}
    if len(candidates) == 1 or not splits or conversation.max_steps - episode.steps <= 1:
        thought = "it must be this one" if len(candidates) == 1 else "take a guess"
        return thought, f"Is it {candidates[0][0]}?"

    kind, trait = min(splits, key=lambda t: abs(2 * splits[t] - len(candidates)))
    return f"{len(candidates)} are left", question(kind, trait)


def random_move(episode: Episode, rng: random.Random) -> tuple[str, str]:
    """(thought, words) of some move that the rules know."""
    side = episode.side
    rule = episode.conversation.scenario.rule
    if rng.random() < 0.02:
        return "enough", LEAVE

    if isinstance(rule, CommonFriend):
        name, *traits = rng.choice(rule.lists[side])
        kind = rng.randrange(3)
        return "try this", f"Is it {name}?" if kind == 0 else question(kind, traits[kind - 1])
    if rng.random() < 0.15:
        return "good enough", "Deal."

    argument = rng.choice(rule.arguments[side])
    if isinstance(rule, Bargain):
        offer = rng.randint(*sorted((rule.targets[side], rule.limits[side])))
    else:
        offer = rng.choice(list(rule.offers()))
    words = rng.choice((argument, rule.say(offer, side), f"{argument} {rule.say(offer, side)}"))
    return "try this", words
