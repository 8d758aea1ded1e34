"""Rules of our own scenarios: they compute both sides' goal scores from the transcript alone.

    a price       a thing is sold for two-digit dollars      linear, limit (0) to target (10)
    a favour      hours of help, or a loan, are asked for    the same
    a division    three kinds of items, private values       worth of what one gets, of 10 in all
    a friend      two lists of friends share one name        10 when named, less 3 per wrong name

Goal scores are 0 to 10; where nothing is agreed or nobody is found they are 0. These rules stand in
for a judge. They can be verified, and they read numbers, names and the word Deal, not manners.
"""

import re
from dataclasses import dataclass
from itertools import product

TAKES = r"\b(i|you) (?:take|get|keep|have)\b"
CLAUSE = re.compile(rf"{TAKES}([^.!?;]*?)(?=[.!?;]|$|{TAKES})")

# (side, what it said), None: it said nothing; in the order of speaking
Transcript = list[tuple[int, str | None]]


def sentences(words: str) -> list[str]:
    """Sentences and half sentences, in lower case, without punctuation around them."""
    pieces = [piece.strip(" \"'") for piece in re.split(r"[.!?;,:]+(?:\s|$)", words)]
    return [piece.lower() for piece in pieces if piece]


def accepts(words: str) -> bool:
    """Whether a sentence of it is the word Deal.

    A deal that is talked about is not one that is made.
    """
    return "deal" in sentences(words)


def standing_offers(rule, transcript: Transcript):
    """({side: its last offer}, what was agreed or None).

    Deal accepts the other's last offer, if no other is named.
    """
    standing = dict(rule.opening)
    for side, words in transcript:
        offer = rule.offer(words, side) if words else None
        theirs = standing.get(1 - side)
        if words and accepts(words) and theirs is not None and offer in (None, theirs):
            return standing, theirs
        if offer is not None:
            standing[side] = offer
    return standing, None


Three = tuple[str, str, str]


@dataclass(frozen=True)
class Bargain:
    """One number is bargained over: a price, a loan, hours of help. An offer is that number."""

    unit: str  # "$" or "hours"
    limits: tuple[int, int]  # of each side: where the goal score reaches 0
    targets: tuple[int, int]  # of each side: where it reaches 10
    phrases: tuple[str, str]  # how each side says an offer, {} for the number
    arguments: tuple[Three, Three]  # the three that each side may bring
    moved_by: tuple[str, str]  # each side is moved by one of the other's
    opening: tuple = ()  # ((side, offer), ...) that stand from the start

    def show(self, number: int) -> str:
        return f"${number}" if self.unit == "$" else f"{number} hour{'s' * (number != 1)}"

    def say(self, number: int, side: int) -> str:
        return self.phrases[side].format(self.show(number))

    def offer(self, words: str, side: int) -> int | None:
        """The last amount that is named: "$45", "45 dollars" or "3 hours". A part of a number is
        none: "2.5 hours", "$1,000"."""
        amount = r"(?<![\w.,])(\d{1,6})() hours?\b"
        if self.unit == "$":
            amount = r"\$ ?(\d{1,6})\b(?![.,]\d)|(?<![\w.,])(\d{1,6}) dollars"
        found = re.findall(amount, words)
        return int("".join(found[-1])) if found else None

    def utility(self, number: int, side: int) -> float:
        """What an offer is worth to a side: 0 at its limit, 1 at its target, and on beyond both."""
        return (self.limits[side] - number) / (self.limits[side] - self.targets[side])

    def counter(self, demand: float, side: int) -> int:
        """The offer that gives a side just what it demands, rounded its own way."""
        exact = self.limits[side] - demand * (self.limits[side] - self.targets[side])
        up = self.targets[side] > self.limits[side]
        return int(-(-exact // 1)) if up else int(exact // 1)

    def value(self, number: int, side: int) -> float:
        """The goal score of an agreement, 0 to 10."""
        return 10 * min(1.0, max(0.0, self.utility(number, side)))

    def score(self, transcript: Transcript, side: int) -> float:
        agreed = standing_offers(self, transcript)[1]
        return 0.0 if agreed is None else self.value(agreed, side)

    def settled(self, transcript: Transcript) -> bool:
        return standing_offers(self, transcript)[1] is not None

    def potential(self, transcript: Transcript, side: int) -> float:
        """The goal score if the side accepted now, 0 to 10."""
        standing, agreed = standing_offers(self, transcript)
        number = standing.get(1 - side) if agreed is None else agreed
        return 0.0 if number is None else self.value(number, side)


@dataclass(frozen=True)
class Division:
    """Items of three kinds are divided. An offer is how many of each kind side 0 would get."""

    kinds: Three  # singular; the plural has an s
    counts: tuple[int, int, int]
    # of one item, to each side; all together 10
    values: tuple[tuple[int, int, int], tuple[int, int, int]]
    arguments: tuple[Three, Three]
    moved_by: tuple[str, str]
    opening: tuple = ()

    def show(self, amounts: tuple) -> str:
        named = [f"{n} {kind}{'s' * (n != 1)}" for n, kind in zip(amounts, self.kinds) if n]
        return " and ".join(named) or "nothing"

    def say(self, offer: tuple, side: int) -> str:
        return f"I take {self.show(self.of(offer, side))}."

    def of(self, offer: tuple, side: int) -> tuple:
        """What a side gets by an offer."""
        return offer if side == 0 else tuple(c - n for c, n in zip(self.counts, offer))

    def offer(self, words: str, side: int) -> tuple | None:
        """The last clause "I take 2 hats and 1 book" or "You take ...".

        The other gets the rest. None: more than all.
        """
        offer = None
        for taker, wish, _ in CLAUSE.findall(words.lower()):
            amounts = [0, 0, 0]
            for n, kind in re.findall(r"(\d{1,4}) ([a-z]+)", wish):
                index = [i for i, name in enumerate(self.kinds) if kind in (name, name + "s")]
                amounts = [a + int(n) * (i in index) for i, a in enumerate(amounts)]
            named = any(amounts) or "nothing" in wish
            if named and all(a <= c for a, c in zip(amounts, self.counts)):
                offer = self.of(tuple(amounts), side if taker == "i" else 1 - side)
        return offer

    def offers(self):
        return product(*(range(count + 1) for count in self.counts))

    def utility(self, offer: tuple, side: int) -> float:
        return self.value(offer, side) / 10

    def counter(self, demand: float, side: int) -> tuple:
        """The offer that costs the other the fewest items, of those that give a side its demand."""

        def cost(offer):
            return self.utility(offer, side), sum(self.of(offer, side)), offer

        enough = [offer for offer in self.offers() if self.utility(offer, side) >= demand - 1e-9]
        return min(enough, key=cost)

    def value(self, offer: tuple, side: int) -> float:
        """The goal score of an agreement, 0 to 10."""
        return float(sum(n * value for n, value in zip(self.of(offer, side), self.values[side])))

    score, settled, potential = Bargain.score, Bargain.settled, Bargain.potential


@dataclass(frozen=True)
class CommonFriend:
    """Each side knows friends by name, hobby and town; one of them knows both sides."""

    lists: tuple[tuple, tuple]  # of each side: ((name, hobby, town), ...)

    COST = 3  # points for each wrong name: reading out the list is no way to find out

    @property
    def common(self) -> str:
        first, second = ({name for name, _, _ in friends} for friends in self.lists)
        return (first & second).pop()

    def names(self, words: str) -> list[str]:
        """The friends that are named, of either list."""
        spoken = set(re.findall(r"[A-Za-z]+", words))
        return sorted({friend[0] for friends in self.lists for friend in friends} & spoken)

    def settled(self, transcript: Transcript) -> bool:
        return any(self.common in self.names(words) for _, words in transcript if words)

    def score(self, transcript: Transcript, side: int) -> float:
        return self.best(transcript, side) if self.settled(transcript) else 0.0

    def best(self, transcript: Transcript, side: int) -> float:
        """The score that the wrong names of a side leave it."""
        return max(0.0, 10.0 - self.COST * len(self.wrong(transcript, side)))

    def wrong(self, transcript: Transcript, side: int) -> set[str]:
        """The friends that a side has named, but for the common one."""
        said = [words for who, words in transcript if words and who == side]
        return {name for words in said for name in self.names(words)} - {self.common}

    def candidates(self, transcript: Transcript, side: int) -> list[tuple]:
        """The friends of a side whom its questions leave.

        True answers to them would rule out nobody else.
        """
        said = [words for who, words in transcript if words and who == side]
        named = self.wrong(transcript, side)
        left = [friend for friend in self.lists[side] if friend[0] not in named]
        for traits in map(self.asked, said):
            known = any(traits <= {*friend} for friend in self.lists[1 - side])
            left = [friend for friend in left if (traits <= {*friend}) == known]
        return left

    def asked(self, words: str) -> set[str]:
        """The hobbies and towns that are mentioned."""
        traits = {trait for friends in self.lists for friend in friends for trait in friend[1:]}
        spoken = set(re.findall(r"[a-z]+", words.lower()))
        return {trait for trait in traits if trait.lower() in spoken}

    def potential(self, transcript: Transcript, side: int) -> float:
        """The score where it is settled, else that of naming one of the candidates by chance."""
        chance = 1.0
        if not self.settled(transcript):
            chance = 1 / max(1, len(self.candidates(transcript, side)))
        return chance * self.best(transcript, side)
