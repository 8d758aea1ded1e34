"""Our own scenarios: 0 to 63 evaluate, 64 to 1023 train, 1024 to 1087 validate.

    scenario = own_scenario(0)

They come in the four kinds of rules.py. Texts, names and private values are drawn from the number
alone, so a scenario is the same on every machine.
"""

import random
from functools import lru_cache
from itertools import product

from envs.sotopia.rules import Bargain, CommonFriend, Division
from envs.sotopia.scenarios import NAME, Scenario

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
