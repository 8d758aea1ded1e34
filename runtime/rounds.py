"""Episodes that are played side by side, and what happens where a world fails."""

import sys
from collections import Counter
from contextlib import contextmanager

from runtime.view.terminal import warn
from runtime.vision.pictures import joined, pictures_of

from tqdm import tqdm

KEPT = ("valid", "game_reward", "progress", "anchor")  # of info; all but valid are optional
faults = Counter()  # worlds that raised, since report.describe last looked


class Player:
    """An episode that is being played.

    episode: the environment's; trajectory: what is kept of it; observation: the words that the
    agent answers next; turns: tokens of the prompt, then of action and observation of each turn. An
    episode with a `picture` shows it beside its words."""

    def __init__(self, episode, trajectory, chat):
        self.episode, self.trajectory, self.chat = episode, trajectory, chat
        self.observation, self.turns, self.done = "", [], False
        self.said = None  # in a conversation: the last answer, while the other side has its turn

    def context(self, history: int) -> list[int]:
        """o_1:t as tokens: the prompt and all turns, or with `history` the last so many."""
        if not self.turns:  # only now: who speaks second in a conversation has heard the opening
            self.observation = self.episode.prompt
            self.turns = [self.chat.prompt(self.observation, self.picture)]
        recent = self.turns[1:][-history:]  # [-0:] is all of them
        return joined([self.turns[0], *recent])

    @property
    def picture(self) -> bytes | None:
        """The PNG of what the episode shows now; None where its world has words alone."""
        return getattr(self.episode, "picture", None)

    def append_tokens(self, context: list[int], action: list[int], history: int) -> None:
        """Append the next step's tokens to the trajectory: what the engine saw and sampled. With
        `history` every step is a sequence of its own."""
        t = self.trajectory
        if self.chat.processor:
            self.chat.processor.refuse_sampled(action)
        if history and t.steps:
            t.starts.append(len(t.token_ids))
        known = len(t.token_ids) - t.starts[-1]
        new = [(place, png) for place, png in pictures_of(context) if place >= known]
        t.pictures += [(t.starts[-1] + place, png) for place, png in new]
        words = context[known:]
        t.token_ids += words + action
        t.step_ids += [-1] * len(words) + [len(t.steps)] * len(action)
        sequence = t.token_ids[t.starts[-1] :]
        assert sequence == context + action, "not the ids that the engine saw and sampled"

    def take_outcome(self) -> None:
        """Give the trajectory the outcome of a conversation, which its episode has in the end."""
        t, episode = self.trajectory, self.episode
        t.outcome, t.score, t.success = episode.outcome, episode.score, episode.success

    def breaks_off(self) -> bool:
        """Whether the episode is truncated, and its world has not been told yet."""
        return self.trajectory.truncated and not self.episode.done

    def hear(self, action: list[int], observation: str) -> None:
        """The environment's answer to an action."""
        answered = self.chat.observation(observation, action, self.picture)
        self.turns.append(joined([action, answered]))
        self.observation = observation


def rounds(players: list[Player], args, label: str):
    """Yield (those whose turn it is, their contexts) until nobody plays; a progress bar counts the
    episodes.

    It is everybody's turn, but in conversations, where an episode that waits is not `ready`. One
    whose context has no room for an answer within --max-context-tokens ends as truncated. Raises
    RuntimeError where nobody could begin, AssertionError where members of a group see different
    prompts, SystemExit where a prompt alone is too long."""
    if not players:
        raise RuntimeError("no episode could be started")
    prompts = {p.trajectory.task: (p.episode.prompt, p.picture) for p in players}
    alike = all(prompts[p.trajectory.task] == (p.episode.prompt, p.picture) for p in players)
    assert alike, "a group's first observations differ"

    with tqdm(total=len(players), desc=label, leave=False, disable=None, unit="episode") as bar:
        playing = players
        while playing:
            ready = [p for p in playing if getattr(p.episode, "ready", True)]
            contexts = {p: p.context(args.history) for p in ready}
            keep_within_context(contexts, args)
            ready = [p for p in ready if not p.done]
            yield ready, [contexts[p] for p in ready]

            playing = [p for p in playing if not p.done]
            bar.update(len(players) - len(playing) - bar.n)
            won = sum(p.trajectory.success for p in players)
            bar.set_postfix(success=f"{won / max(1, bar.n):.2f}")


def keep_within_context(contexts: dict[Player, list[int]], args) -> None:
    """End, as truncated, the episodes whose context has no room for another answer."""
    for p, context in contexts.items():
        if len(context) <= args.max_context_tokens - args.max_action_tokens:
            continue
        if not p.trajectory.steps:
            length = f"a prompt has {len(context)} tokens"
            sys.exit(f"--max-context-tokens {args.max_context_tokens}: {length}")
        p.done = p.trajectory.truncated = True


def known(info: dict, logprobs: list[float]) -> dict:
    """What a Step keeps beside its texts: valid, what else the world tells of it, and the engine's
    log-probabilities."""
    told = {name: info[name] for name in KEPT if name in info}
    return told | {"engine_logprobs": logprobs}


@contextmanager
def leaving_out(task: int):
    """Around env.reset(task): where the world raises, the task is named and the episode left
    out."""
    try:
        yield
    except Exception as error:
        note_fault(task, error)


@contextmanager
def losing(env, task: int):
    """Around env.reset(task) of a world of conversations: where it raises, the world is told, and
    counts the conversation as lost."""
    try:
        yield
    except Exception as error:
        env.lose(task, error)


def faulty_step(player: Player, error: Exception) -> tuple[str, float, bool, dict]:
    """(observation, reward, done, info) of a step in which the world raised: the task is named, and
    the episode ends on an invalid step without reward."""
    note_fault(player.trajectory.task, error)
    return "", 0.0, True, {"valid": False, "success": False, "score": 0.0}


def note_fault(task: int, error: Exception) -> None:
    faults["environment"] += 1
    raised = f"the environment raised {type(error).__name__}: {error}"
    warn(f"task {task}: {raised}")
