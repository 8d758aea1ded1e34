"""SOTOPIA's scenarios (Zhou et al. 2024, arXiv 2310.11667): the published files, and our own.

    scenarios, evaluated = load_published("DIR")    # envs.json, agents.json, env_agent_combos.json
    scenario = own_scenario(0)                      # 0 to 63 evaluate, 64 to 1023 train
    background(scenario, side)                      # what the character of a side (0, 1) may know
    overview(scenario)                              # what the judge may know: everything

A scenario is an environment (place, a goal for each side, relationship) with two agents, in
SOTOPIA's own fields. A character never sees the other's goal and secret; of the profile it sees
what the relationship shows; tags in the texts (`<p viewer="agent_0">`, `<p viewer="environment">`)
hide the rest.

Ours come in four kinds, each with a rule that computes both sides' goal scores (0 to 10) from the
transcript alone, and a scripted partner with private values:

    a price       a thing is sold for two-digit dollars      linear, limit (0) to target (10)
    a favour      hours of help, or a loan, are asked for    the same
    a division    three kinds of items, private values       worth of what one gets, of 10 in all
    a friend      two lists of friends share one name        10 when named, less 3 per wrong name

Nothing agreed, nobody found: 0. These rules are verifiable and a stand-in: they see numbers, names
and the word Deal, not manners. In bargaining the partner accepts what gives it the share of its own
scale that it demands now. The demand falls slowly, faster when the other moves, most by the one
argument out of three that speaks to the partner's situation (which the scenario tells both); who
repeats an offer, insults or chats uses up its patience, and it leaves.
"""

import hashlib
import json
import random
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

LEAVE = "left the conversation"  # leaving, in an action of either side: these words and no others
FILES = ("envs.json", "agents.json", "env_agent_combos.json")
EVAL_SHARE = 3  # of the published environments one in EVAL_SHARE evaluates, the hard ones first
# parts of a goal; they are for whoever has the goal
PARTS = ("extra_info", "strategy_hint", "clarification_hint")
TAG = re.compile(r"<(/?)([A-Za-z][\w-]*)([^<>]*)>")
ATTRIBUTES = re.compile(r"(?:\s+[a-z_]+\s*=\s*(?:\"[^\"]*\"|'[^']*'))*\s*")
TAKES = r"\b(i|you) (?:take|get|keep|have)\b"
CLAUSE = re.compile(rf"{TAKES}([^.!?;]*?)(?=[.!?;]|$|{TAKES})")
VIEWER = re.compile(r"\sviewer\s*=\s*[\"']([^\"']*)[\"']")

# the 14 environments of SOTOPIA-hard, as the public evaluation scripts of sotopia-rl list them
HARD = frozenset(
    """01H7VFHNV13MHN97GAH73E3KM8 01H7VFHN5WVC5HKKVBHZBA553R 01H7VFHN9W0WAFZCBT09PKJJNK
    01H7VFHPDZVVCDZR3AARA547CY 01H7VFHPQQQY6H4DNC6NBQ8XTG 01H7VFHN7WJK7VWVRZZTQ6DX9T
    01H7VFHPS5WJW2694R1MNC8JFY 01H7VFHNN7XTR99319DS8KZCQM 01H7VFHQ11NAMZS4A2RDGDB01V
    01H7VFHPSWGDGEYRP63H2DJKV0 01H7VFHNF4G18PC9JHGRC8A1R6 01H7VFHNNYH3W0VRWVY178K2TK
    01H7VFHP8AN5643B0NR0NP00VE 01H7VFHN7A1ZX5KSMT2YN9RXC4""".split()
)

# relationships 4 and 5 (romantic, family) show what 3 shows
STRANGER, NAME, ACQUAINTANCE, FRIEND = range(4)
RELATIONSHIPS = (
    "strangers",
    "known to each other by name",
    "acquaintances",
    "friends",
    "a couple",
    "family",
)


class DataError(ValueError):
    """A published file is missing, damaged or inconsistent; the message names file and row."""


@dataclass(frozen=True)
class Scenario:
    """environment and agents: SOTOPIA's fields.

    rule: what computes the outcome of our own scenarios, else None.
    """

    environment: dict
    agents: tuple[dict, dict]
    rule: "Bargain | Division | CommonFriend | None" = None


# --- who sees what --------------------------------------------------------------------------------


def visible(text: str, viewer: str) -> str:
    """The part of a tagged text that a viewer may read.

    A viewer is "agent_0", "agent_1", or "environment" (the judge, who reads all of it). A part with
    a viewer attribute is for that viewer alone, and so is everything inside. A tag that is not
    known or not well written hides its contents from the agents, and one that is never closed hides
    the rest: a doubt never shows what is private.
    """
    shown = []
    stack = []  # (tag, whether its contents may be seen)
    place = 0
    for match in [*TAG.finditer(text), None]:
        if all(allowed for _, allowed in stack):
            shown.append(text[place : match.start() if match else len(text)])
        if match is None:
            break

        place = match.end()
        closing, tag, attributes = match.groups()
        if not closing:
            named = VIEWER.search(attributes)
            allowed = named is None or named.group(1) == viewer
            allowed &= tag in ("p", "root", *PARTS) and ATTRIBUTES.fullmatch(attributes) is not None
            stack.append((tag, allowed or viewer == "environment"))
        elif any(tag == name for name, _ in stack):
            while stack.pop()[0] != tag:
                pass
    return " ".join("".join(shown).split())


def profile(agent: dict, shows: int, secret: bool = False) -> str:
    """An agent in a sentence or two, as far as a relationship (0 to 5) shows it.

    Strangers see nothing ("").
    """
    if shows <= STRANGER:
        return ""
    name = full_name(agent)
    if shows >= ACQUAINTANCE:
        facts = [str(agent.get(key) or "") for key in ("age", "occupation", "gender_pronoun")]
        name = ", ".join([name, *filter(None, facts)])

    parts = [name + "."]
    if shows >= ACQUAINTANCE:
        parts.append(agent.get("public_info"))
    if shows >= FRIEND:
        parts.append(agent.get("personality_and_values"))
    if secret and agent.get("secret"):
        parts.append(f"Secret: {agent['secret']}.")
    return " ".join(filter(None, parts))


def full_name(agent: dict) -> str:
    return f"{agent['first_name']} {agent.get('last_name') or ''}".strip()


def other_name(scenario: Scenario, side: int) -> str:
    """What the character of a side calls the other: the first name, or Stranger."""
    known = scenario.environment["relationship"] > STRANGER
    return scenario.agents[1 - side]["first_name"] if known else "Stranger"


def background(scenario: Scenario, side: int) -> str:
    """What the character of a side (0 or 1) knows when the conversation starts."""
    environment = scenario.environment
    viewer = f"agent_{side}"
    known = profile(scenario.agents[1 - side], environment["relationship"])
    goal = visible(environment["agent_goals"][side], viewer)
    lines = [
        f"You are {profile(scenario.agents[side], FRIEND, secret=True)}",
        f"You talk with {known or 'a stranger.'}",
        visible(environment["scenario"], viewer),
        f"Your goal, which {other_name(scenario, side)} does not know: {goal}",
    ]
    return "\n".join(lines)


def overview(scenario: Scenario) -> str:
    """What the judge knows: place, relationship, both profiles with their secrets, both goals."""
    environment = scenario.environment
    lines = [f"Scenario: {visible(environment['scenario'], 'environment')}"]
    lines.append(f"The two are {RELATIONSHIPS[environment['relationship']]}.")
    for side, agent in enumerate(scenario.agents):
        goal = visible(environment["agent_goals"][side], "environment")
        lines.append(f"agent_{side + 1} is {profile(agent, FRIEND, secret=True)}")
        lines.append(f"Goal of agent_{side + 1}: {goal}")
    return "\n".join(lines)


# --- the published files --------------------------------------------------------------------------


TEXTS = set(
    "pk env_id scenario first_name last_name occupation gender_pronoun public_info secret "
    "personality_and_values".split()
)


def read_rows(directory: Path, name: str, keys: tuple) -> list[dict]:
    """The rows of a JSON file (a list, or a dict by pk), each with these keys."""
    try:
        rows = json.loads((directory / name).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{directory}: missing {name}") from None
    except RecursionError:
        raise DataError(f"{directory / name}: nested too deep") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{directory / name}: no JSON ({error})") from None

    rows = list(rows.values()) if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{directory / name}: no rows")
    for number, row in enumerate(rows):
        lacking = [key for key in keys if not isinstance(row, dict) or row.get(key) is None]
        if lacking:
            raise DataError(f"{directory / name}: row {number}: no {lacking[0]}")
        for key in TEXTS & row.keys():
            if not isinstance(row[key], str | None):
                raise DataError(f"{directory / name}: row {number}: {key} is no text")
    return rows


def load_published(directory) -> tuple[list[Scenario], int]:
    """(SOTOPIA's files as scenarios, a combo each; how many of them evaluate, from the first).

    The others train. Whole environments are on one side: the hard ones evaluate, and as many more,
    in the order of a hash, as make a third. Within a side the environments take turns, so that the
    first scenarios are of many. Raises DataError.
    """
    directory = Path(directory)
    environments = read_rows(directory, FILES[0], ("pk", "scenario", "agent_goals", "relationship"))
    people = {row["pk"]: row for row in read_rows(directory, FILES[1], ("pk", "first_name"))}

    for number, row in enumerate(environments):
        where = f"{directory / FILES[0]}: row {number}"
        goals = row["agent_goals"]
        pair = isinstance(goals, list) and len(goals) == 2
        if not pair or not all(isinstance(goal, str) for goal in goals):
            raise DataError(f"{where}: agent_goals are two texts")
        known = type(row["relationship"]) is int
        if not known or row["relationship"] not in range(len(RELATIONSHIPS)):
            raise DataError(f"{where}: relationship is 0 to 5")

    combos = {row["pk"]: [] for row in environments}
    for number, row in enumerate(read_rows(directory, FILES[2], ("env_id", "agent_ids"))):
        try:
            first, second = row["agent_ids"]
            combos[row["env_id"]].append((people[first], people[second]))
        except (KeyError, ValueError, TypeError) as error:
            where = f"{directory / FILES[2]}: row {number}"
            raise DataError(f"{where}: unknown environment or agent ({error})") from None

    order = sorted(environments, key=lambda row: hashlib.sha256(row["pk"].encode()).digest())
    order = [row for row in order if combos[row["pk"]]]
    hard = [row["pk"] for row in order if row["pk"] in HARD]
    others = [row["pk"] for row in order if row["pk"] not in HARD]
    wanted = max(len(order) // EVAL_SHARE, len(hard))
    held_out = {*hard, *others[: wanted - len(hard)]}
    if not 0 < len(held_out) < len(order):
        raise DataError(f"{directory}: {len(order)} environments with combos: nothing to split")

    sides = []
    for evaluates in (True, False):
        ranked = []
        rows = [row for row in order if (row["pk"] in held_out) == evaluates]
        for number, row in enumerate(rows):
            for rank, pair in enumerate(combos[row["pk"]]):
                ranked.append((rank, number, Scenario(row, pair)))
        ranked.sort(key=lambda entry: entry[:2])
        sides.append([scenario for _, _, scenario in ranked])
    return sides[0] + sides[1], len(sides[0])


def recast(scenarios: list[Scenario]) -> list[Scenario]:
    """One scenario of each environment, with its two characters in each other's place.

    The first combo is taken whose swap is not among the scenarios already.
    """
    casts = {(s.environment["pk"], s.agents[0]["pk"], s.agents[1]["pk"]) for s in scenarios}
    found = {}
    for scenario in scenarios:
        key = scenario.environment["pk"]
        first, second = scenario.agents
        if key not in found and (key, second["pk"], first["pk"]) not in casts:
            found[key] = Scenario(scenario.environment, (second, first))
    return list(found.values())


# --- rules: the goal score of our own scenarios, from the transcript alone ------------------------

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


# --- scripted partners ----------------------------------------------------------------------------


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


# --- our own scenarios ----------------------------------------------------------------------------

EVAL_VARIANTS, TRAIN_VARIANTS = 4, 20  # draws of names and private values for each written scenario


def entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.replace("\n", "|").split("|")]


# of each sixteen that train or evaluate, and then four that validate
PRICES = entries(
    """a bike at a flea market|a lamp at a house sale|a desk in an empty office
    a guitar behind a music shop|a tent after a camping trip|a camera at a school fair
    a kettle at a street corner|a carpet in a closing hotel|a chair in a back yard
    a clock at a village fair|a coat in front of a theatre|a radio on a car park
    a table in a student flat|a mirror at a town hall sale|a violin after a concert
    a sledge at the end of winter
    a sofa on a staircase|a printer after an exhibition|a trumpet in a church hall
    a pram at a playground"""
)

DIVISIONS = entries(
    """clear a shared flat: hat ball book|empty an old attic: cup lamp plant
    share a prize at a fair: coin card toy|pack up after a picnic: apple melon pear
    close their small cafe: spoon plate stool|break up a band: drum flute horn
    sort a lost parcel: shirt scarf ring|end a garden project: rose shovel pot
    leave a summer camp: torch rope map|inherit from an aunt: vase chair clock
    clean out a classroom: pen chart globe|win a quiz together: ticket mug poster
    return from a voyage: shell stone fan|give up a workshop: hammer nail saw
    open a treasure chest: pearl crown sword|finish a baking day: cake tart bun
    empty a garage: wheel pump ladder|end a sewing course: button ribbon needle
    leave a beach house: towel bucket kite|sort out a stable: saddle bell rug"""
)

PLACES = entries(
    """at a wedding|on a night train|in a waiting room|at a chess club|on a ferry|at a book fair
    in a ski hut|at a bus stop|at a birthday party|in a dance class|at a garden show
    in a museum cafe|on a city tour|at a job fair|in a hotel bar|at a school reunion
    at a car wash|on a mountain hike|in a launderette|at a marathon"""
)

FAVOURS = entries(
    """hours: moves to a new flat|$: wants to repair an old car|hours: has to paint a fence
    $: lost a purse on a trip|hours: plans a street party|$: needs a winter coat
    hours: has an exam in maths|$: wants to fix a broken roof|hours: has to dig a pond
    $: has to pay a doctor|hours: wants to build a shed|$: wants to visit a sick aunt
    hours: has to sort old letters|$: needs a new stove|hours: cleans a flooded cellar
    $: has to buy books for school
    hours: moves a piano|$: wants to print a calendar|hours: has to clean a boat
    $: broke a window"""
)

# what moves somebody: (what the scenario tells, the other's argument)
SELLER = (
    ("{} moves out soon.", "I pick it up today."),
    ("{} needs money fast.", "I pay in cash."),
    ("{} is fond of it.", "I take good care of it."),
)
BUYER = (
    ("{} has no car.", "I bring it to you."),
    ("{} is careful.", "You can test it first."),
    ("{} has many questions.", "I show you how it works."),
)
HELPER = (
    ("{} likes good food.", "I cook for you."),
    ("{} has much work.", "I help you with your work."),
    ("{} gets bored easily.", "We have music."),
)
LENDER = (
    ("{} is short of time.", "I do your shopping."),
    ("{} fears a loss.", "I pay back in a week."),
    ("{} loves order.", "I put it in writing."),
)
ASKER = (
    ("{} is tired.", "You should rest too."),
    ("{} knows many people.", "Others can help too."),
    ("{} worries a lot.", "It goes well in any case."),
)
SHARER = (
    ("{} likes to be fair.", "Let us be fair."),
    ("{} is in a hurry.", "Let us finish soon."),
    ("{} wants to stay friends.", "Do it for our friendship."),
)

CHARACTERS = "Ava Ben Cleo Dan Ella Finn Gina Hugo Iris Jon Kim Leo".split()
FRIENDS = (
    "Abel Bea Carl Dora Emil Fay Gus Hana Ivo Jana Karl Lena Max Nora Otto Pia Rolf Sara Tom Uma"
).split()
HOBBIES = "chess music tennis cooking painting fishing".split()
TOWNS = "Rome Oslo Lima Cairo Delhi Paris".split()
COUNTS = ((3, 2, 1), (1, 2, 3), (2, 2, 2), (2, 1, 3), (1, 3, 2), (2, 3, 1))

KINDS = 4  # scenario number k is of kind k % 4
WRITTEN = 64  # of them every fourth of a kind evaluates, the others train
EVAL_WRITTEN = [number for number in range(WRITTEN) if number // KINDS % 4 == 3]
TRAIN_WRITTEN = [number for number in range(WRITTEN) if number // KINDS % 4 != 3]
VALIDATION_WRITTEN = range(WRITTEN, KINDS * len(PRICES))  # the last four of each kind
OWN_EVAL = len(EVAL_WRITTEN) * EVAL_VARIANTS  # 64
OWN_COUNT = OWN_EVAL + len(TRAIN_WRITTEN) * TRAIN_VARIANTS  # 1024
OWN_VALIDATION = len(VALIDATION_WRITTEN) * EVAL_VARIANTS  # 64 more


@lru_cache(maxsize=4096)
def own_scenario(number: int) -> Scenario:
    """One of our own scenarios: 0 to 63 evaluate, 64 to 1023 train, 1024 to 1087 validate.

    A written scenario does one of these and no other.
    """
    count = OWN_COUNT + OWN_VALIDATION
    if not 0 <= number < count:
        raise IndexError(f"there are the scenarios 0 to {count - 1}, not {number}")

    if number < OWN_EVAL:
        numbers, place = EVAL_WRITTEN, number
    elif number < OWN_COUNT:
        numbers, place = TRAIN_WRITTEN, number - OWN_EVAL
    else:
        numbers, place = VALIDATION_WRITTEN, number - OWN_COUNT
    variant, index = divmod(place, len(numbers))
    written = numbers[index]

    draw = random.Random(f"sotopia {written} {number < OWN_EVAL} {variant}")
    kind = (price, division, friend, favour)[written % KINDS]
    codename = f"{kind.__name__}_{written // KINDS}"
    names = draw.sample(CHARACTERS, 2)
    scene, goals, rule = kind(written // KINDS, names, draw)
    environment = {
        "pk": f"own-{codename}-{variant}",
        "codename": codename,
        "source": "own",
        "scenario": scene,
        "agent_goals": goals,
        "relationship": NAME,
    }
    agents = tuple({"pk": f"own-{name}", "first_name": name} for name in names)
    return Scenario(environment, agents, rule)


def pick(draw, first: tuple, second: tuple, names: list[str]):
    """Each side's situation.

    Returns (what the scenario tells, the arguments of each side, what moves each side).
    """
    own = draw.choice(first), draw.choice(second)
    told = " ".join(situation.format(name) for (situation, _), name in zip(own, names))
    arguments = tuple(argument for _, argument in second), tuple(argument for _, argument in first)
    return told, arguments, tuple(argument for _, argument in own)


def scale(draw, low: int, high: int, slack: int):
    """(limits, targets) of a side that wants a number low and one that wants it high.

    Each has its own.
    """
    low = low + draw.randint(0, slack)
    high = high - draw.randint(0, slack)
    return (high, low + draw.randint(0, slack)), (low, high - draw.randint(0, slack))


def price(index: int, names: list[str], draw):
    """Side 0 buys, side 1 sells."""
    low = draw.randint(20, 45)
    high = low + draw.randint(30, 50)
    limits, targets = scale(draw, low, high, 3)
    listed = min(99, high + draw.randint(0, 3))
    told, arguments, moved_by = pick(draw, BUYER, SELLER, names)
    phrases = ("I pay {}.", "I ask {}.")
    rule = Bargain("$", limits, targets, phrases, arguments, moved_by, ((1, listed),))
    buy = f"Buy it for ${targets[0]} or less; ${limits[0]} or more is no use to you."
    sell = f"Sell it for ${targets[1]} or more; ${limits[1]} or less is no use to you."
    goals = [f"{buy} {how_to(rule, 0, targets[0])}", f"{sell} {how_to(rule, 1, targets[1])}"]
    return f"{names[1]} sells {PRICES[index]} and asks ${listed}. {told}", goals, rule


def favour(index: int, names: list[str], draw):
    """Side 0 asks for hours or dollars, side 1 gives."""
    unit, reason = FAVOURS[index].split(": ")
    if unit == "hours":
        low = draw.randint(1, 2)
        high = low + draw.randint(9, 12)
        slack, giver, phrases, wish = 1, HELPER, ("I need {}.", "I help {}."), "help"
    else:
        low = draw.randint(10, 30)
        high = low + draw.randint(30, 50)
        slack, giver, phrases, wish = 3, LENDER, ("I need {}.", "I lend {}."), "a loan"

    limits, targets = (tuple(reversed(pair)) for pair in scale(draw, low, high, slack))
    told, arguments, moved_by = pick(draw, ASKER, giver, names)
    rule = Bargain(unit, limits, targets, phrases, arguments, moved_by)

    target, limit = rule.show(targets[0]), rule.show(limits[0])
    get = f"Get {target} or more; {limit} or less is no use to you."
    target, limit = rule.show(targets[1]), rule.show(limits[1])
    agree = f"Agree on {target} or less; {limit} or more is too much for you."
    goals = [f"{get} {how_to(rule, 0, targets[0])}", f"{agree} {how_to(rule, 1, targets[1])}"]
    return f"{names[0]} {reason} and asks {names[1]} for {wish}. {told}", goals, rule


def division(index: int, names: list[str], draw):
    """Items with private values.

    They are so drawn that each side could have 8 of 10 and leave the other 4.
    """
    situation, kinds = DIVISIONS[index].split(": ")
    kinds = tuple(kinds.split())
    counts = draw.choice(COUNTS)
    worths = []
    for values in product(range(1, 8), repeat=3):
        if sum(n * value for n, value in zip(counts, values)) == 10:
            worths.append(values)
    told, arguments, moved_by = pick(draw, SHARER, SHARER, names)

    while True:
        values = draw.choice(worths), draw.choice(worths)
        rule = Division(kinds, counts, values, arguments, moved_by)
        pairs = [(rule.value(offer, 0), rule.value(offer, 1)) for offer in rule.offers()]
        if any(a >= 8 and b >= 4 for a, b in pairs) and any(b >= 8 and a >= 4 for a, b in pairs):
            break

    goals = []
    for side, values in enumerate(rule.values):
        worth = ", ".join(f"{kind} {value}" for kind, value in zip(kinds, values))
        first = tuple(counts[i] * (i == side) for i in range(3))
        example = rule.of(first, side)
        goals.append(f"Get the most points: {worth}. {how_to(rule, side, example)}")
    scene = f"{names[0]} and {names[1]} {situation} and divide {rule.show(counts)}. {told}"
    return scene, goals, rule


def how_to(rule, side: int, offer) -> str:
    """How a side makes an offer that the rule understands, and its arguments."""
    arguments = " ".join(rule.arguments[side])
    return f"Offer like this: {rule.say(offer, side)} Accept with: Deal. You may say: {arguments}"


def friend(index: int, names: list[str], draw):
    """Two lists of six friends, a hobby of two and a town of three in every combination.

    (Or a hobby of three and a town of two.) The common friend's hobby and town are the only ones
    that the lists share, so every answer is worth something.
    """
    people = draw.sample(FRIENDS, 11)
    hobbies = draw.sample(HOBBIES, 5)
    towns = draw.sample(TOWNS, 5)
    shared = people.pop()

    lists = []
    for side in range(2):
        many, few = draw.sample((hobbies, towns), 2)
        many = [many[0], *(many[1:3] if side else many[3:5])]
        few = [few[0], few[1] if side else few[3]]
        friends = []
        for pair in product(*((many, few) if many[0] in HOBBIES else (few, many))):
            name = shared if pair == (hobbies[0], towns[0]) else people.pop()
            friends.append((name, *pair))
        lists.append(tuple(draw.sample(friends, 6)))

    rule = CommonFriend(tuple(lists))
    goals = []
    for friends in lists:
        known = "; ".join(f"{name}: {hobby}, {town}" for name, hobby, town in friends)
        name, hobby, town = friends[0]
        goals.append(
            "Find the friend whom you both know; each wrong name costs you. "
            f"Your friends: {known}. "
            f"Ask like this: {question(1, hobby)} {question(2, town)} Is it {name}?"
        )
    scene = f"{names[0]} and {names[1]} meet {PLACES[index]} and have one friend in common."
    return scene, goals, rule


def question(kind: int, trait: str) -> str:
    """A question about a hobby (kind 1) or a town (kind 2)."""
    return f"Does a friend of yours like {trait}?" if kind == 1 else f"Does one live in {trait}?"
