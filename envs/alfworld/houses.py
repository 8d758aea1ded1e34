"""Games in the manner of the released ones, made from the floor plans that the package holds.

A room is a floor plan: its receptacles, where each is reached from, the classes of things in it. A
game draws a task in a room, puts one to three of each class of things at random where ALFRED allows
them, and no wanted thing where it is wanted. Rooms are split: those that are ALFRED's test rooms
are the panel's, and of the others the last four of each kind are for validation.
"""

import random
from dataclasses import dataclass
from functools import cache

from envs.alfworld.package import can_hold, constants, floor_plan, goals
from envs.alfworld.plan import TYPES

FIRST = {"kitchen": 1, "living room": 201, "bedroom": 301, "bathroom": 401}  # 30 rooms of each
SPLITS = {"panel": range(0, 6), "train": range(6, 26), "validation": range(26, 30)}
COUNTS = {"CoffeeMachine": 1, "StoveBurner": 4, "Toaster": 1}  # of receptacles without a place
MOST_COPIES = 3  # of a class of things, as ALFRED has it
SINGLE = ("CoffeeMachine", "StoveBurner", "Toaster", "ToiletPaperHanger")  # there is no room for 2
SINGLE += ("TowelHolder", "HandTowelHolder")
LAMP = "DeskLamp"
LAMP_STANDS = ("Desk", "Dresser", "SideTable", "Shelf", "DiningTable", "CoffeeTable", "TVStand")
TREATED = {TYPES[2]: ("Cleanable", "SinkBasin"), TYPES[3]: ("Heatable", "Microwave")}
TREATED[TYPES[4]] = ("Coolable", "Fridge")
ABLE = {"Cleanable": "cleanable", "Heatable": "heatable", "Coolable": "coolable"}
ABLE["Sliceable"] = "sliceable"


@dataclass(frozen=True)
class Room:
    """receptacles: (id, class, location) of each; places: class -> the classes of receptacles here
    that can hold it; start: where the player begins, at no receptacle."""

    number: int
    receptacles: tuple[tuple[str, str, str], ...]
    places: dict[str, tuple[str, ...]]
    has_lamp: bool
    start: str


@dataclass(frozen=True)
class Task:
    """What is wanted in which room: a class of things, and the class of its receptacle (of the
    lamp, where the thing is to be looked at)."""

    kind: str
    room: int
    thing: str
    place: str


def word(text: str) -> str:
    """An id as PDDL allows it."""
    signs = {"-": "_minus_", "|": "_bar_", "+": "_plus_", ".": "_dot_"}
    return "".join(signs.get(sign, sign) for sign in text)


def location(x: float, z: float, rotation: float, horizon: float) -> str:
    """The id of a location: a grid of 0.25 m, quarter turns, the camera's degrees downwards."""
    return word(f"loc|{x * 4:.0f}|{z * 4:.0f}|{rotation / 90:.0f}|{horizon:.0f}")


def somewhere(rng: random.Random) -> str:
    """|x|y|z of a thing [m]."""
    x, y, z = rng.uniform(-4, 4), rng.uniform(0, 2), rng.uniform(-4, 4)
    return f"|{x:+06.2f}|{y:+06.2f}|{z:+06.2f}"


@cache
def room(number: int) -> Room:
    classes, reached = floor_plan(number)
    table = can_hold()
    rng = random.Random(f"alfworld room {number}")

    receptacles, taken = [], set()
    for name, pose in sorted(reached.items()):
        kind = name.rpartition("|")[2] if name.endswith("Basin") else name.partition("|")[0]
        if kind in table:
            receptacles.append((word(name), kind, location(*pose)))
            taken.add(location(*pose))
    for kind in sorted(set(classes) & set(table) - {kind for _, kind, _ in receptacles}):
        for _ in range(COUNTS.get(kind, 1)):
            name = kind.removesuffix("Basin") + somewhere(rng)
            name += f"|{kind}" if kind.endswith("Basin") else ""
            receptacles.append((word(name), kind, free(rng, taken)))

    kinds = {kind for _, kind, _ in receptacles}
    places = {}
    for thing in sorted(set(classes)):
        fit = tuple(sorted(kind for kind in kinds if thing in table[kind]))
        if fit:
            places[thing] = fit
    stands = kinds.intersection(LAMP_STANDS)
    lamp = LAMP in classes and bool(stands)
    return Room(number, tuple(receptacles), places, lamp, free(rng, taken))


def free(rng: random.Random, taken: set[str]) -> str:
    """A location that is not taken; it is taken then."""
    while True:
        place = location(rng.randint(-16, 16) / 4, rng.randint(-16, 16) / 4, 0, 30)
        if place not in taken:
            taken.add(place)
            return place


@cache
def tasks_in(kind: str, number: int) -> tuple[Task, ...]:
    """The tasks of a type that a room allows. A wanted thing can be elsewhere than it is wanted."""
    here = room(number)
    kinds = {receptacle for _, receptacle, _ in here.receptacles}
    if kind == TYPES[1]:
        return tuple(Task(kind, number, thing, LAMP) for thing in here.places if here.has_lamp)

    able, machine = TREATED.get(kind, (None, None))
    if machine and machine not in kinds:
        return ()
    found = []
    for thing, places in here.places.items():
        if able and thing not in constants()["VAL_ACTION_OBJECTS"][able]:
            continue
        for place in places if len(places) > 1 else ():
            if place != machine and not (kind == TYPES[5] and place in SINGLE):
                found.append(Task(kind, number, thing, place))
    return tuple(found)


@cache
def rooms_for(kind: str, split: str) -> tuple[int, ...]:
    numbers = [first + i for first in FIRST.values() for i in SPLITS[split]]
    return tuple(number for number in numbers if tasks_in(kind, number))


def draw(kind: str, split: str, rng: random.Random) -> Task:
    """A task of a type in a room of a split; a wanted thing, then where it is wanted."""
    found = tasks_in(kind, rng.choice(rooms_for(kind, split)))
    thing = rng.choice(sorted({task.thing for task in found}))
    return rng.choice([task for task in found if task.thing == thing])


def make_game(task: Task, rng: random.Random) -> tuple[str, str]:
    """(PDDL problem, goal sentence) of a task, its things placed at random."""
    here = room(task.room)
    by_kind = {}
    for name, kind, where in here.receptacles:
        by_kind.setdefault(kind, []).append((name, where))

    things = []  # (id, class, receptacle, location)
    for kind, places in here.places.items():
        copies = rng.randint(1, MOST_COPIES)
        if kind == task.thing:
            places = [place for place in places if place != task.place]
            copies = max(copies, 2) if task.kind == TYPES[5] else copies
        for _ in range(copies):
            things.append(placed(kind, by_kind[rng.choice(places)], things, rng))
    if here.has_lamp:
        stand = rng.choice(sorted(set(by_kind) & set(LAMP_STANDS)))
        things.append(placed(LAMP, by_kind[stand], things, rng))

    library = goals()[task.kind]
    names = {"obj": task.thing, "recep": task.place, "toggle": task.place}
    sentence = rng.choice(library["templates"])
    sentence = sentence.format(**{key: name.lower() for key, name in names.items()})
    goal = library["pddl"].replace("#", "-").format(**names)
    return problem(here, things, goal), sentence


def placed(kind: str, receptacles: list, things: list, rng: random.Random) -> tuple:
    """A thing of a class in one of the receptacles; no two things have the same id."""
    taken = {name for name, *_ in things}
    while (name := word(kind + somewhere(rng))) in taken:
        pass
    return (name, kind, *rng.choice(receptacles))


def problem(here: Room, things: list, goal: str) -> str:
    """The problem as the released games write it."""
    kinds = sorted({kind for _, kind, _, _ in things})
    stands = sorted({kind for _, kind, _ in here.receptacles})
    locations = sorted({where for _, _, where in here.receptacles} | {here.start})
    objects = ["agent1 - agent"]
    objects += [f"{kind}Type - otype" for kind in kinds]
    objects += [f"{kind}Type - rtype" for kind in stands]
    objects += [f"{name} - object" for name, *_ in things]
    objects += [f"{name} - receptacle" for name, *_ in here.receptacles]
    objects += [f"{where} - location" for where in locations]

    facts = ["(= (total-cost) 0)"]
    for name, kind, where in here.receptacles:
        facts.append(f"(receptacleType {name} {kind}Type)")
        facts.append(f"(receptacleAtLocation {name} {where})")
        if kind in constants()["OPENABLE_CLASS_LIST"]:
            facts.append(f"(openable {name})")
    for name, kind, receptacle, where in things:
        facts.append(f"(objectType {name} {kind}Type)")
        facts.append(f"(inReceptacle {name} {receptacle})")
        facts.append(f"(objectAtLocation {name} {where})")
        facts += [f"({able} {name})" for able in abilities(kind)]
    for stand in stands:
        held = set(can_hold()[stand]).intersection(kinds)
        facts += [f"(canContain {stand}Type {kind}Type)" for kind in sorted(held)]
    facts.append(f"(atLocation agent1 {here.start})")

    parts = ["(define (problem plan) (:domain alfred)", "(:objects", *objects, ")"]
    return "\n".join([*parts, "(:init", *facts, ")", goal])


@cache
def abilities(kind: str) -> tuple[str, ...]:
    """The facts about every thing of a class."""
    if kind == LAMP:
        return ("toggleable",)
    table = constants()["VAL_ACTION_OBJECTS"]
    found = ["pickupable"] + ["isReceptacleObject"] * (kind in constants()["MOVABLE_RECEPTACLES"])
    return (*found, *(fact for able, fact in ABLE.items() if kind in table[able]))
