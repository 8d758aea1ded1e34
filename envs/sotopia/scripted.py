"""Scripted partners for our own scenarios, with private values.

In bargaining the partner accepts an offer that gives it the share of its own scale that it demands
now. The demand falls slowly. It falls faster when the other moves, and most by the one argument of
three that speaks to the partner's situation (the scenario tells both of it). Who repeats an offer,
insults or chats uses up the partner's patience, and it leaves.
"""

from envs.sotopia.rules import CommonFriend
from envs.sotopia.scenarios import LEAVE, Scenario


class Bargainer:
    """A partner for Bargain and Division.

    Shares are of its own scale: 1 at its target, 0 at its limit.
    """

    DEMAND = 0.8  # share that it demands at first
    FLOOR = 0.4  # it never demands less, unless moved by an argument
    MOVED = 0.34  # by the right argument demand and floor fall so much, once
    SLOWLY = 0.06  # the demand falls so much for an offer better than those before it ...
    FASTER = 0.4  # ... and for so much of what the offer improved by,
    MOST = 0.12  # but in one turn no more than this
    PATIENCE = 3  # turns without any movement after which it leaves
    INSULT = -0.3  # an offer worth less to it is one

    def __init__(self, rule, side: int):
        self.rule = rule
        self.side = side
        self.demand = self.DEMAND
        self.floor = self.FLOOR
        self.patience = self.PATIENCE
        self.heard = set()  # arguments
        self.best = None  # the best share that was offered

    def reply(self, words: str) -> str:
        """What it says to what was said; LEAVE when its patience is over."""
        rule = self.rule
        remark = ""
        moved = False
        offer = rule.offer(words, 1 - self.side)

        # of several arguments it hears the first
        arguments = rule.arguments[1 - self.side]
        places = {a: words.lower().find(a.lower().rstrip(".")) for a in arguments}
        brought = min((a for a in places if places[a] >= 0), key=places.get, default=None)
        new = brought is not None and brought not in self.heard
        self.heard.add(brought)
        if new and brought == rule.moved_by[self.side]:
            self.demand -= self.MOVED
            self.floor -= self.MOVED
            moved = True
            remark = "Good point. "
        elif new:
            remark = "That does not help me. "

        if offer is not None:
            share = rule.utility(offer, self.side)
            gain = share - (self.best if self.best is not None else share)
            if share < self.INSULT:
                remark = "That is far off. "
            elif self.best is None or gain > 0:
                self.demand -= min(self.MOST, self.SLOWLY + self.FASTER * gain)
                self.best = share
                moved = True
            elif not moved:
                remark = "You do not move. "

        self.demand = max(self.demand, self.floor)
        self.patience -= not moved
        if offer is not None and rule.utility(offer, self.side) >= self.demand - 1e-9:
            return "Deal."
        if self.patience <= 0:
            return LEAVE
        return f"{remark}{rule.say(rule.counter(self.demand, self.side), self.side)}"


class Guest:
    """A partner for CommonFriend.

    It answers truly whether it knows somebody, and names nobody by itself.
    """

    def __init__(self, rule: CommonFriend, side: int):
        self.rule = rule
        self.side = side

    def reply(self, words: str) -> str:
        rule = self.rule
        names = rule.names(words)
        asked = rule.asked(words)
        if rule.common in names:
            return f"Yes, I know {rule.common}."
        if names:
            return f"No, I do not know {names[-1]}."
        if asked:
            known = any(asked <= {*friend} for friend in rule.lists[self.side])
            return "Yes, I know someone." if known else "No, nobody."
        return "Ask me about a hobby or a town."


def scripted(scenario: Scenario, side: int) -> Bargainer | Guest:
    """The scripted partner that plays a side of one of our own scenarios."""
    kind = Guest if isinstance(scenario.rule, CommonFriend) else Bargainer
    return kind(scenario.rule, side)
