"""SOTOPIA (Zhou et al. 2024, arXiv 2310.11667): conversations with private goals, then judged.

    env = Sotopia()                           # our own scenarios, a scripted partner, rules
    episode = env.reset(env.eval_tasks[0])    # the same task, the same scenario, on any machine
    seen = await episode.opening()            # the first user message
    text = "<think>greet</think><action>Hello!</action>"
    observation, reward, done, info = await episode.step(text)

    env = Sotopia("DIR", partner_url="http://localhost:8000/v1", partner_model="NAME",
                  judge_url="http://localhost:8001/v1", judge_model="NAME")

An answer is a thought and what is said aloud. The other side hears the action alone. The words
"left the conversation", and no others, end the conversation. Task 2 n + s is scenario n, played
from side s. The outcome is the goal score over 10, by rule or by judge. With outcome="overall" it
is the mean of the judge's seven dimensions, each moved to 0..1.

An episode is one side of a conversation (conversation.py), and is played by one coroutine:

- `opening()` returns the first user message.
- `step(text)` takes this side's turn and returns when the other side has answered. At the end it
  waits for the verdict, and its reward is the outcome; all other rewards are 0.
- `leave()` ends the conversation as it stands, for an episode whose context is full. It returns
  (reward, success, score). The other side's step is complete then.
- `close()` is for an episode that is given up for any other reason. The conversation has no outcome
  then, and the other side is told.
- ConversationLost is raised by `opening`, `step` and `leave` where this side gets no outcome: an
  endpoint failed, a rule raised, the other side was closed, or the conversation was over before
  this side spoke. Leave such an episode out of its group.

Conversations run side by side, as coroutines of one event loop. A conversation that waits for an
endpoint delays no other. `summary` counts what was lost; it stops the program (SystemExit) where
endpoints lost more than a fifth of the conversations.

Self-chat, partner="self". The policy speaks both sides. A conversation is two episodes, tasks 2 n
and 2 n + 1. Each has its own prompt, steps and outcome: its own answers are its actions, and it
hears the other's as observations. No token counts twice, and the sides form groups of their own.
The k-th `opening()` of 2 n and the k-th of 2 n + 1 meet in a conversation, so both tasks have to be
played at the same time, in one process (`together`), and equally often (`sides_of`). Side 0 speaks
first. `opening()` of side 1 returns when the opening words are said, and contains them; its
`prompt` does not.

Scenarios and what each side knows: scenarios.py. Our own: own.py, rules.py, scripted.py. Endpoints
and the judge: endpoint.py, judge.py.
"""

import logging
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal

from envs.sotopia.conversation import Conversation, Episode
from envs.sotopia.endpoint import Endpoint, check_url
from envs.sotopia.judge import DIMENSIONS, Judge
from envs.sotopia.own import OWN_COUNT, OWN_EVAL, OWN_VALIDATION, own_scenario
from envs.sotopia.scenarios import HARD, DataError, load_published, recast
from envs.sotopia.scripted import scripted

MOST_TURNS = 20  # of a conversation, both sides together, as in SOTOPIA
LOST_SHARE = 0.2  # of the conversations may be lost to endpoints

log = logging.getLogger(__name__)


@dataclass
class SotopiaArgs:
    """The flags of this world."""

    sotopia_data: str = ""
    """Directory of the published scenarios; empty: our own, whose outcome a rule computes."""

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

    in_flight: int = 64  # Maximum number of concurrent requests at an endpoint.

    timeout: float = 120.0  # Longest wait for an answer to a request [s].

    tries: int = 5
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
        in_flight=64,
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

        self.partner = self.judge = None
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
        self.self_chat = partner == "self"
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
        each = 2 if self.self_chat else 1  # in self-chat the task of side 0 stands for both
        self.eval_tasks = range(0, 2 * evaluated, each)
        self.train_tasks = range(2 * evaluated, 2 * count, each)
        self.validation_tasks = range(2 * count, 2 * last, each)

        self.lacking: dict[int, list] = defaultdict(
            list
        )  # conversations by the task of the side that they lack
        self.conversations: list[Conversation] = []  # since the last summary, as they began
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
        if env.eval_env.self_chat and number > 1:
            args.run_args.eval_tasks = number // 2
            print(f"--eval-tasks {number}: the two sides of {number // 2} conversations")
        return env

    def hard(self, task: int) -> bool:
        """Whether a task belongs to SOTOPIA-hard; none of our own does."""
        return self.scenario(task // 2).environment["pk"] in HARD

    def sides_of(self, tasks: list[int]) -> list[int]:
        """The tasks of a rollout: in self-chat both sides of each, equal tasks as neighbours."""
        if not self.self_chat:
            return list(tasks)
        return sorted(side for task in tasks for side in (task, task ^ 1))

    def together(self, task: int) -> int:
        """What episodes share that have to be played in one process."""
        return task // 2 if self.self_chat else task

    def reset(self, task: int) -> Episode:
        """A fresh episode of a task. Raises IndexError for a task that is none."""
        stop = self.validation_tasks.stop
        if task not in range(stop):
            raise IndexError(f"{self.name} has the tasks 0 to {stop - 1}, not {task}")
        episode = Episode(self, self.scenario(task // 2), task)
        if not self.self_chat:
            episode.begin()
        return episode

    def conversation_for(self, task: int) -> Conversation:
        """What an episode of this task enters: a new conversation, or in self-chat the oldest of
        its scenario that lacks this side, if there is one."""
        if self.lacking[task]:
            return self.lacking[task].pop(0)

        scenario = self.scenario(task // 2)
        with_program = not (self.self_chat or self.partner)
        partner = scripted(scenario, 1 - task % 2) if with_program else None
        conversation = Conversation(self, scenario, partner)
        self.conversations.append(conversation)
        if self.self_chat:
            self.lacking[task ^ 1].append(conversation)
        return conversation

    def summary(self) -> dict[str, float]:
        """What to log of the conversations that ended since the last call, of all processes.

        That is goal (0 to 10), goal_hard where any is hard, the judge's seven dimensions,
        conversations lost, and for each endpoint asked, answered, retries and the reasons of failed
        tries, as "judge/429". Conversations whose other side never came end as lost. Raises
        SystemExit, with the reasons, where endpoints lost more than a fifth of the conversations.
        """
        from runtime.distributed import processes  # late: it brings torch

        for conversation in sum(self.lacking.values(), []):
            conversation.end("abandoned")
        self.lacking.clear()
        ended = [conversation for conversation in self.conversations if conversation.over]
        self.conversations = []

        finished = []
        for conversation in ended:
            for e in conversation.episodes if conversation.scored else ():
                if e.steps:
                    finished.append((e.score, self.hard(e.task), e.dimensions))
        finished = processes.gather(finished)
        groups = {"goal": [score * 10 for score, _, _ in finished]}
        groups["goal_hard"] = [score * 10 for score, hard, _ in finished if hard]
        for name in DIMENSIONS if self.judge else ():
            groups[f"judge/{name}"] = [scores[name] for _, _, scores in finished if scores]
        row = {key: sum(values) / len(values) for key, values in groups.items() if values}

        lost = Counter(conversation.lost for conversation in ended if conversation.lost)
        lost = sum(processes.gather([lost]), Counter())
        row["lost"] = lost.total()

        endpoints = {"partner": self.partner, "judge": self.judge and self.judge.endpoint}
        for role, endpoint in endpoints.items():
            counts = endpoint.counts if endpoint else Counter()
            total = sum(processes.gather([counts]), Counter())
            row |= {f"{role}/{key}": number for key, number in sorted(total.items())}
            counts.clear()

        conversations = sum(processes.gather([len(ended)]))
        reasons = ", ".join(f"{reason} x {n}" for reason, n in lost.most_common())
        if lost and processes.rank() == 0:
            log.warning("%d of %d conversations lost (%s)", row["lost"], conversations, reasons)
        failed = sum(n for reason, n in lost.items() if reason.startswith(("partner:", "judge:")))
        if failed > LOST_SHARE * conversations:
            share = f"{failed} of {conversations} conversations"
            sys.exit(f"stopped: {share} lost to endpoints ({reasons})")
        return row
