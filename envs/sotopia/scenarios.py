"""Scenarios of SOTOPIA (Zhou et al. 2024, arXiv 2310.11667), and who may read what of them.

    scenarios, evaluated = load_published("DIR")    # envs.json, agents.json, env_agent_combos.json
    background(scenario, side)                      # what the character of a side (0, 1) may know
    overview(scenario)                              # what the judge may know: everything

A scenario is an environment (place, a goal for each side, relationship) with two agents, in
SOTOPIA's own fields. A character never sees the other's goal and secret. Of the other's profile it
sees what the relationship shows. Tags in the texts (`<p viewer="agent_0">`,
`<p viewer="environment">`) hide the rest. Our own scenarios are in own.py.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from envs.sotopia.rules import Bargain, CommonFriend, Division

LEAVE = "left the conversation"  # leaving, in an action of either side: these words and no others
FILES = ("envs.json", "agents.json", "env_agent_combos.json")
EVAL_SHARE = 3  # of the published environments one in EVAL_SHARE evaluates, the hard ones first
# parts of a goal; they are for whoever has the goal
PARTS = ("extra_info", "strategy_hint", "clarification_hint")
TAG = re.compile(r"<(/?)([A-Za-z][\w-]*)([^<>]*)>")
ATTRIBUTES = re.compile(r"(?:\s+[a-z_]+\s*=\s*(?:\"[^\"]*\"|'[^']*'))*\s*")
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
    rule: Bargain | Division | CommonFriend | None = None


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
