"""ALFWorld's text engine (Shridhar et al., arXiv 2010.03768) in plain Python.

    game = Game(pddl_problem, "put some keychain on sofa")
    play = game.start()                       # an episode: .text, .admissible, .won
    play.command("go to coffeetable 1")       # -> "You arrive at coffeetable 1. On the ..."

It follows the rules of alfred.pddl and says what alfred.twl2 says (both of alfworld 0.4.2), as
TextWorld 1.7.0 plays them; recorded answers of that engine are a test. What surprises is meant:
objects can be examined only while they are held, "use" always turns on, heating, cleaning and
cooling need no open door, a knife reaches into closed receptacles, and nobody goes to a second
receptacle of the place where they are.
"""

from collections import Counter
from functools import cached_property

from envs.alfworld.pddl import CHANGING, ProblemError, ground, holds, read_problem

WELCOME = "-= Welcome to TextWorld, ALFRED! =-"
NOTHING = "Nothing happens."
HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""
ANYWHERE = {"help": ("help",), "inventory": ("inventory",), "look": ("look",)}
# receptacle type -> (verb, what the object has to be, what it becomes, what it ceases to be)
TREATMENTS = {
    "sinkbasintype": ("clean", "cleanable", "isclean", None),
    "microwavetype": ("heat", "heatable", "ishot", "iscool"),
    "fridgetype": ("cool", "coolable", "iscool", "ishot"),
}
KNIVES = {"knifetype", "butterknifetype"}


def names_of(ids) -> dict[str, str]:
    """id -> name, as the original's Demangler counts: the last id of a class is its number 1.

    An id is apple_bar__minus_00_dot_12_bar_..., its class what comes before the first bar.
    """
    classes = {}
    for name in sorted(ids):
        head, bar, _ = name.partition("_bar_")
        classes[name] = head + "basin" * ("basin" in name) if bar else None
    left = Counter(classes.values())
    names = {}
    for name, kind in classes.items():
        names[name] = f"{kind} {left[kind]}" if kind else f"{name} "
        left[kind] -= 1
    return names


def listed(words: list[str]) -> str:
    """a b 1, a c 1, and a d 2: as the grammar lists."""
    words = [f"a {word}" for word in words]
    return separated(words) if words else "nothing"


def separated(words: list[str]) -> str:
    return ", and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


class Game:
    """A problem and its task (the goal sentence). Raises ProblemError where the problem is none."""

    def __init__(self, pddl_problem: str, task: str):
        problem = read_problem(pddl_problem)
        self.task = task
        self.kinds = problem.kinds
        self.start_facts = frozenset(f for f in problem.facts if f[0] in CHANGING)
        self.facts = problem.facts - self.start_facts  # that nothing changes
        self.goal_formula = problem.goal
        self.goal = ground(problem.goal, problem, {}, {})
        self.names = names_of({word for fact in problem.facts for word in fact[1:]})

        # lists have the grammar's order: by type, then by id
        order = {"object": 0, "agent": 1, "location": 2, "otype": 3, "receptacle": 4, "rtype": 5}
        rank = {name: (order.get(kind, 6), name) for name, kind in problem.kinds.items()}
        pairs = {name: {} for name in ("objecttype", "receptacletype", "receptacleatlocation")}
        for name, *rest in sorted(problem.facts):
            if name in pairs and len(rest) == 2:
                pairs[name].setdefault(rest[0], []).append(rest[1])
        self.types, self.receptacle_types, places = pairs.values()
        self.receptacles = {r: p for r, p in places.items() if problem.kinds[r] == "receptacle"}
        self.rank = rank.__getitem__
        self.things = sorted(self.types, key=self.rank)

        agents = [fact[1:] for fact in problem.facts if fact[0] == "atlocation" and len(fact) == 3]
        if len(agents) != 1:
            raise ProblemError(f"it has {len(agents)} facts (atLocation agent location), not one")
        self.agent, self.place = agents[0]

        self.at = {}  # location -> its receptacles
        self.ways = {}  # "go to apple 1" -> (receptacle, location)
        for receptacle, locations in self.receptacles.items():
            for location in locations:
                self.at.setdefault(location, []).append(receptacle)
                way = f"go to {self.names[receptacle]}"
                self.ways.setdefault(way, (receptacle, location))
        self.sorted_ways = sorted(self.ways)

    @cached_property
    def inside(self) -> dict[str, list[str]]:
        """receptacle -> what is in or on it at the start, in the order of lists."""
        inside = {receptacle: [] for receptacle in self.receptacles}
        for name, *rest in self.start_facts:
            if name == "inreceptacle" and rest[1] in inside:
                inside[rest[1]].append(rest[0])
        return {r: sorted(things, key=self.rank) for r, things in inside.items()}

    @cached_property
    def can_hold(self) -> dict[str, set[str]]:
        """receptacle -> the types that can be put there."""
        fit = {}
        for name, *types in self.facts:
            if name == "cancontain":
                fit.setdefault(types[0], set()).add(types[1])
        return {
            receptacle: set().union(
                *(fit.get(kind, ()) for kind in self.receptacle_types.get(receptacle, ()))
            )
            for receptacle in self.receptacles
        }

    @cached_property
    def contents(self) -> dict[str, list[str]]:
        """thing -> what is in it: things in pots and bowls, which no action changes."""
        contents = {}
        for name, *rest in self.facts:
            if name == "inreceptacleobject":
                contents.setdefault(rest[1], []).append(rest[0])
        return {thing: sorted(things, key=self.rank) for thing, things in contents.items()}

    @cached_property
    def sliceable(self) -> list[str]:
        return sorted(fact[1] for fact in self.facts if fact[0] == "sliceable")

    def start(self) -> "Play":
        return Play(self)


class Play:
    """An episode of the bare engine. It goes on after it is won, as the engine does.

    text: what was said last; won: whether the goal holds; admissible: the commands that can be
    given now, sorted.
    """

    __slots__ = "game facts inside place held taken text won local".split()

    def __init__(self, game: Game):
        self.game = game
        self.facts = set(game.start_facts)  # the other facts hold all the time
        self.inside = {receptacle: list(things) for receptacle, things in game.inside.items()}
        self.place = game.place
        self.held = sorted(
            (fact[2] for fact in game.start_facts if fact[0] == "holds" and fact[1] == game.agent),
            key=game.rank,
        )
        self.taken = set()  # (thing, receptacle) that were parted and not brought together again
        room = self.look() if self.place in game.at else self.overview(game.receptacles)
        self.text = f"{WELCOME}\n\n{room}\n\nYour task is to: {game.task}."
        self.settle()

    @property
    def admissible(self) -> list[str]:
        ways = self.game.ways
        there = [way for way in self.game.sorted_ways if ways[way][1] != self.place]
        return sorted([*self.local, *there])

    def command(self, words: str) -> str:
        """Give a command, and return what is said. Words that match none change nothing."""
        words = words.strip()
        action = self.local.get(words)
        if action is None and words in self.game.ways:
            receptacle, location = self.game.ways[words]
            if location != self.place:
                action = ("goto", receptacle, location)
        if action is None:
            self.text = NOTHING
            return NOTHING

        name, *arguments = action
        self.text = getattr(self, name)(*arguments)
        if name not in ("help", "inventory", "look", "examine", "see"):
            self.settle()
        return self.text

    def settle(self):
        """What follows from the facts, after a change: whether it is won, the commands."""
        self.won = holds(self.game.goal, self.facts)
        self.local = dict(self.commands())

    def commands(self):
        """(words, action) of all that can be done here, without going elsewhere."""
        game, facts, names = self.game, self.facts, self.game.names
        yield from ANYWHERE.items()
        hands_free = ("holdsany", game.agent) not in facts

        for receptacle in game.at.get(self.place, ()):
            place = names[receptacle]
            yield f"examine {place}", ("see", receptacle)
            opened = ("opened", receptacle) in facts
            if ("openable", receptacle) in game.facts:
                verb = "close" if opened else "open"
                yield f"{verb} {place}", (verb, receptacle)
            within_reach = opened or ("openable", receptacle) not in game.facts

            for thing in self.inside[receptacle]:
                if within_reach and hands_free and ("pickupable", thing) in game.facts:
                    yield f"take {names[thing]} from {place}", ("take", thing, receptacle)
                if ("toggleable", thing) in game.facts:
                    yield f"use {names[thing]}", ("use", thing)
            for thing in self.held:
                types = game.types.get(thing, ())
                if within_reach and not game.can_hold[receptacle].isdisjoint(types):
                    yield f"move {names[thing]} to {place}", ("move", thing, receptacle)
                for kind in game.receptacle_types.get(receptacle, ()):
                    verb, able, *_ = TREATMENTS.get(kind, (None, None))
                    if verb and (able, thing) in game.facts:
                        words = f"{verb} {names[thing]} with {place}"
                        yield words, ("treat", thing, receptacle, kind)

        for thing in self.held:
            yield f"examine {names[thing]}", ("examine", thing)
            if KNIVES.intersection(game.types.get(thing, ())):
                for other in game.sliceable:
                    if ("objectatlocation", other, self.place) in facts:
                        yield f"slice {names[other]} with {names[thing]}", ("slice", other, thing)

    # what is said

    def see(self, receptacle: str) -> str:
        name = self.game.names[receptacle]
        things = listed([self.game.names[thing] for thing in self.inside[receptacle]])
        if ("openable", receptacle) not in self.game.facts:
            return f"On the {name}, you see {things}."
        if ("opened", receptacle) in self.facts:
            return f"The {name} is open. In it, you see {things}."
        return f"The {name} is closed."

    def look(self) -> str:
        """What is here; "next to it" are things that were moved between receptacles here."""
        here = self.game.at.get(self.place)
        if not here:
            return self.overview([])
        names = self.game.names
        moved = [
            names[thing]
            for thing in sorted({thing for thing, _ in self.taken}, key=self.game.rank)
            if ("objectatlocation", thing, self.place) in self.facts
            for receptacle in here
            if (thing, receptacle) in self.taken
        ]
        facing = separated([names[receptacle] for receptacle in here])
        return f"You are facing the {facing}. Next to it, you see {listed(moved)}."

    def overview(self, receptacles) -> str:
        seen = listed([self.game.names[receptacle] for receptacle in receptacles])
        return f"You are in the middle of a room. Looking quickly around you, you see {seen}."

    def help(self) -> str:
        return HELP

    def inventory(self) -> str:
        if ("holdsany", self.game.agent) not in self.facts:
            return "You are not carrying anything."
        return f"You are carrying: {listed([self.game.names[thing] for thing in self.held])}."

    def examine(self, thing: str) -> str:
        name = self.game.names[thing]
        if ("isreceptacleobject", thing) in self.game.facts:
            inner = [self.game.names[other] for other in self.game.contents.get(thing, ())]
            return f"This is a normal {name}. In it, you see {listed(inner)}."

        clean, hot, cool, sliced = (
            (state, thing) in self.facts for state in ("isclean", "ishot", "iscool", "issliced")
        )
        if clean or hot or cool:
            warmth = "hot" * hot or "cool" * cool
            if warmth == "cool" and not clean and not sliced:
                warmth = "cold"
            state = " and ".join(filter(None, [warmth, "clean" * clean]))
            return f"This is a {state} {'sliced ' * sliced}{name}."
        if ("toggleable", thing) in self.game.facts and ("istoggled", thing) in self.facts:
            return f"This {name} is on."
        if ("sliceable", thing) in self.game.facts and sliced:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."

    # what is done; every method says what happened

    def goto(self, receptacle: str, location: str) -> str:
        self.facts.discard(("atlocation", self.game.agent, self.place))
        self.facts.add(("atlocation", self.game.agent, location))
        self.place = location
        return f"You arrive at {self.game.names[receptacle]}. {self.see(receptacle)}"

    def open(self, receptacle: str) -> str:
        self.facts.add(("opened", receptacle))
        return f"You open the {self.game.names[receptacle]}. {self.see(receptacle)}"

    def close(self, receptacle: str) -> str:
        self.facts.discard(("opened", receptacle))
        return f"You close the {self.game.names[receptacle]}."

    def take(self, thing: str, receptacle: str) -> str:
        agent, names = self.game.agent, self.game.names
        self.facts -= {
            ("inreceptacle", thing, receptacle),
            ("objectatlocation", thing, self.place),
        }
        self.facts |= {("holds", agent, thing), ("holdsany", agent)}
        self.inside[receptacle].remove(thing)
        self.held = sorted({*self.held, thing}, key=self.game.rank)
        self.taken.add((thing, receptacle))
        return f"You pick up the {names[thing]} from the {names[receptacle]}."

    def move(self, thing: str, receptacle: str) -> str:
        agent, names = self.game.agent, self.game.names
        self.facts -= {("holds", agent, thing), ("holdsany", agent)}
        self.facts |= {
            ("inreceptacle", thing, receptacle),
            ("objectatlocation", thing, self.place),
        }
        self.held.remove(thing)
        self.inside[receptacle] = sorted({*self.inside[receptacle], thing}, key=self.game.rank)
        self.taken.discard((thing, receptacle))
        return f"You move the {names[thing]} to the {names[receptacle]}."

    def treat(self, thing: str, receptacle: str, kind: str) -> str:
        """Clean, heat or cool a thing."""
        verb, _, becomes, ceases = TREATMENTS[kind]
        self.facts.discard((ceases, thing))
        self.facts.add((becomes, thing))
        return f"You {verb} the {self.game.names[thing]} using the {self.game.names[receptacle]}."

    def use(self, thing: str) -> str:
        self.facts ^= {("ison", thing)}
        self.facts.add(("istoggled", thing))
        return f"You turn on the {self.game.names[thing]}."

    def slice(self, thing: str, knife: str) -> str:
        self.facts.add(("issliced", thing))
        return f"You sliced the {self.game.names[thing]} with the {self.game.names[knife]}."
