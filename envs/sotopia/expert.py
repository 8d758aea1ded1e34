"""Who knows the rules: a negotiator that warm starts and tests learn from."""

import random

from envs.sotopia.conversation import Episode
from envs.sotopia.own import question
from envs.sotopia.rules import Bargain, CommonFriend
from envs.sotopia.scenarios import LEAVE

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
