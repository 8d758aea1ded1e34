"""Shortest ways to the goals of the six task types: the expert, and the distance to the goal.

A goal of the six is read back from its formula (`wish_of`). A way is a list of stops, each a thing
that is done at a receptacle: put down what is held, take the thing, clean it, move it to its place.
The commands between them follow: going there, and opening what is closed.
"""

import re
from dataclasses import dataclass
from itertools import permutations

from envs.alfworld.game import TREATMENTS, Game, Play
from envs.alfworld.pddl import needed

PUT = re.compile(r"put (.+?) (?:in/on|in|on) (.+)")
TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
BY_STATE = {"isclean": TYPES[2], "ishot": TYPES[3], "iscool": TYPES[4]}


@dataclass(frozen=True)
class Wish:
    """What a goal asks for. things, places: objects and receptacles that fit; state: isclean,
    ishot, iscool or None; lamps: what may be turned on."""

    kind: str
    things: tuple[str, ...]
    places: tuple[str, ...] = ()
    state: str | None = None
    lamps: tuple[str, ...] = ()


def wish_of(game: Game) -> Wish | None:
    """The goal of a game as one of the six types; None where it is another."""
    atoms = list(needed(game.goal_formula))
    states = [atom[0] for atom in atoms if atom[0] in BY_STATE]
    typed = {name: [] for name in ("objecttype", "receptacletype")}
    for name, *words in atoms:
        if name in typed and len(words) == 2:
            typed[name].append(words)
    variables = {words[0]: words[1] for words in typed["objecttype"]}
    kinds = set(variables.values())
    places = {words[1] for words in typed["receptacletype"]}
    ables = {atom[0] for atom in atoms} & {"cleanable", "heatable", "coolable"}

    toggled = [atom[1] for atom in atoms if atom[0] == "istoggled" and len(atom) == 2]
    if len(toggled) == 1 and len(variables) == 2 and toggled[0] in variables:
        light = variables.pop(toggled[0])
        lamps = [o for o in things_of(game, light) if ("toggleable", o) in game.facts]
        (kind,) = variables.values()
        return Wish(TYPES[1], tuple(things_of(game, kind)), lamps=tuple(lamps))
    if len(kinds) != 1 or len(places) != 1 or toggled or len(set(states)) > 1:
        return None

    things = [o for o in things_of(game, *kinds) if all((a, o) in game.facts for a in ables)]
    fit = [r for r, types in game.receptacle_types.items() if places & set(types)]
    fit = tuple(r for r in fit if r in game.receptacles)
    if len(variables) == 2 and not states:
        return Wish(TYPES[5], tuple(things), fit)
    if len(variables) == 1 and len(atoms) - len(states) - len(ables) == 3:
        state = states[0] if states else None
        return Wish(BY_STATE.get(state, TYPES[0]), tuple(things), fit, state)
    return None


def things_of(game: Game, kind: str) -> list[str]:
    return [thing for thing in game.things if kind in game.types[thing]]


# --- ways -----------------------------------------------------------------------------------------
#
# A stop is (receptacle, words of the command, whether the receptacle has to be open).


def closed(play: Play, receptacle: str) -> bool:
    fixed = play.game.facts
    return ("openable", receptacle) in fixed and ("opened", receptacle) not in play.facts


def length(play: Play, stops) -> int:
    """The number of commands that the stops take."""
    place, opened, number = play.place, (), len(stops)
    for receptacle, _, reach in stops:
        location = play.game.receptacles[receptacle][0]
        if location != place:
            number += 1
            place = location
        if reach and receptacle not in opened and closed(play, receptacle):
            number += 1
            opened += (receptacle,)
    return number


def commands(play: Play, stops) -> list[str]:
    """The commands of the stops."""
    names, found, opened = play.game.names, [], set()
    place = play.place
    for receptacle, words, reach in stops:
        location = play.game.receptacles[receptacle][0]
        if location != place:
            found.append(f"go to {names[receptacle]}")
            place = location
        if reach and receptacle not in opened and closed(play, receptacle):
            found.append(f"open {names[receptacle]}")
            opened.add(receptacle)
        verb, *things = words
        end = {"take": "from", "move": "to"}.get(verb, "with")
        found.append(
            f"{verb} {names[things[0]]}" + (f" {end} {names[receptacle]}" if verb != "use" else "")
        )
    return found


def sources(play: Play, thing: str) -> list[str]:
    """The receptacles from which a thing can be taken."""
    if ("pickupable", thing) not in play.game.facts:
        return []
    return [receptacle for receptacle in play.game.receptacles if thing in play.inside[receptacle]]


def alike(play: Play, receptacles, near: set) -> list[str]:
    """Of receptacles that cost the same and lie alone, one; those at the locations near, all."""
    found = {}
    for receptacle in receptacles:
        location = play.game.receptacles[receptacle][0]
        key = receptacle if location in near else closed(play, receptacle)
        found.setdefault(key, receptacle)
    return list(found.values())


def hold(play: Play, thing: str, held: str | None, near: set):
    """The lists of stops after which the thing is held; `held` is what is held before."""
    if thing == held:
        yield []
        return
    for source in sources(play, thing):
        take = (source, ("take", thing), True)
        if held is None:
            yield [take]
            continue
        location = play.game.receptacles[source][0]
        types = play.game.types.get(held, ())
        fit = [r for r in play.game.receptacles if play.game.can_hold[r].intersection(types)]
        for drop in alike(play, fit, {play.place, location}):
            yield [(drop, ("move", held), True), take]


def ways(play: Play, wish: Wish):
    """Lists of stops that reach the goal; a shortest is among them."""
    game = play.game
    held = play.held[0] if play.held else None
    near = {game.receptacles[r][0] for thing in wish.things for r in sources(play, thing)}
    near.add(play.place)

    if wish.kind == TYPES[1]:
        lit = [lamp for lamp in wish.lamps if ("istoggled", lamp) in play.facts]
        for lamp in wish.lamps:
            for receptacle in [r for r in game.receptacles if lamp in play.inside[r]]:
                for thing in wish.things:
                    for stops in hold(play, thing, held, near):
                        yield [*stops, (receptacle, ("use", lamp), False)], lamp in lit
        return

    if wish.kind == TYPES[5]:
        yield from ways_of_two(play, wish, held, near)
        return

    for thing in wish.things:
        treated = wish.state is None or (wish.state, thing) in play.facts
        treatments = [[]] if treated else list(treatment(play, wish.state, thing))
        reached = near | {game.receptacles[s[0][0]][0] for s in treatments if s}
        fit = [r for r in wish.places if game.can_hold[r].intersection(game.types[thing])]
        for start in hold(play, thing, held, near):
            for middle in treatments:
                for place in alike(play, fit, reached):
                    yield [*start, *middle, (place, ("move", thing), True)], False


def treatment(play: Play, state: str, thing: str):
    """The stops that clean, heat or cool a thing."""
    for receptacle, types in play.game.receptacle_types.items():
        for kind in types:
            verb, able, becomes, _ = TREATMENTS.get(kind, (None, None, None, None))
            able = becomes == state and (able, thing) in play.game.facts
            if able and receptacle in play.game.receptacles:
                yield [(receptacle, (verb, thing), False)]


def ways_of_two(play: Play, wish: Wish, held: str | None, near: set):
    """Two things of a kind into the same receptacle."""
    game = play.game
    full = [r for r in wish.places if set(play.inside[r]) & set(wish.things)]
    empty = [r for r in wish.places if r not in full]
    for place in [*full, *alike(play, empty, near)]:
        there = [thing for thing in wish.things if thing in play.inside[place]]
        others = [
            thing
            for thing in wish.things
            if thing not in there and game.can_hold[place].intersection(game.types[thing])
        ]
        for chosen in permutations(others, max(0, 2 - len(there))):
            routes, inside = [[]], held
            for thing in chosen:
                put = (place, ("move", thing), True)
                routes = [
                    [*route, *stops, put]
                    for route in routes
                    for stops in hold(play, thing, inside, near)
                ]
                inside = None
            for route in routes:
                yield route, False


def shortest(play: Play, wish: Wish) -> tuple[int, list] | None:
    """(commands, stops) of a shortest way; None where there is none."""
    if play.won:
        return 0, []
    best = None
    for stops, lit in ways(play, wish):
        number = length(play, stops)
        if lit:  # the lamp is on: being there is enough
            number -= 1
        if best is None or number < best[0]:
            best = (number, stops, lit)
    return best and best[:2]


def way(play: Play, wish: Wish) -> list[str] | None:
    """The commands of a shortest way to the goal; None where there is none."""
    found = shortest(play, wish)
    return found and commands(play, found[1])[: found[0]]


# --- a game with what is known about it -----------------------------------------------------------


@dataclass(frozen=True)
class House:
    """A game and what is known about it. distance: the fewest commands to its goal."""

    game: Game
    kind: str
    wish: Wish | None
    walkthrough: tuple[str, ...]
    distance: int | None


def house(problem: str, sentence: str, walkthrough=()) -> House:
    game = Game(problem, sentence)
    wish = wish_of(game)
    play = game.start()
    best = shortest(play, wish) if wish else None
    if best and not walkthrough:
        walkthrough = commands(play, best[1])[: best[0]]
    kind = wish.kind if wish else "other"
    return House(game, kind, wish, tuple(walkthrough), best and best[0])


def understood(words: str) -> str:
    """A command as the engine has it: older releases say "put X in/on Y" for "move X to Y"."""
    match = PUT.fullmatch(words)
    return f"move {match.group(1)} to {match.group(2)}" if match else words
