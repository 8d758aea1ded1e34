"""Problems of the ALFRED domain: reading one, and asking whether its goal holds.

A problem is Lisp: objects with their types, the facts of the start, a goal. A fact is a tuple of
lower-case words, ("inreceptacle", thing, place), as the planner's translator has it. The domain
itself (alfred.pddl) is not read: game.py follows its rules.
"""

import re
from dataclasses import dataclass
from functools import cached_property

# what an action of the domain can change and a goal may ask; all other facts stay as they are
CHANGING = frozenset(
    "atlocation inreceptacle objectatlocation opened holds holdsany isclean ishot iscool ison "
    "istoggled issliced".split()
)
# all predicates of alfred.pddl: the number of objects that each is about
PREDICATES = dict.fromkeys(
    "openable opened isreceptacleobject isreceptacleobjectfull checked examined holdsany "
    "holdsanyreceptacleobject full isclean cleanable ishot heatable iscool coolable pickupable "
    "moveable toggleable ison istoggled sliceable issliced".split(),
    1,
) | dict.fromkeys(
    "atlocation receptacleatlocation objectatlocation inreceptacle inreceptacleobject "
    "wasinreceptacle receptacletype cancontain objecttype holds".split(),
    2,
)
MOST_CASES = 100_000  # of a goal's quantifiers
MOST_NESTED = 64  # brackets within brackets
WORDS = re.compile(r"[()]|[^\s()]+")
COSTS = re.compile(r"\(\s*=\s*\([^()]*\)\s*[0-9.]+\s*\)")  # distances, hundreds of them


class ProblemError(ValueError):
    """What is wrong with a problem, in one line."""


def read_lisp(text: str) -> list:
    """The expressions of a text, as nested lists of lower-case words; ; starts a comment.

    Costs, (= (distance a b) 7), are left out: nothing depends on them.
    """
    text = COSTS.sub(" ", re.sub(r";[^\n]*", "", text)).lower()
    stack = [[]]
    for word in WORDS.findall(text):
        if word == "(":
            stack.append([])
            if len(stack) > MOST_NESTED:
                raise ProblemError("its brackets are nested too deeply")
        elif word == ")":
            if len(stack) == 1:
                raise ProblemError("a bracket is closed that was not opened")
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(word)
    if len(stack) > 1:
        raise ProblemError("a bracket is not closed")
    return stack[0]


def typed(words: list) -> list[tuple[str, str]]:
    """(name, type) of a typed list `a b - object c - receptacle`; without a type it is object."""
    found, waiting = [], []
    words = iter(words)
    for word in words:
        if not isinstance(word, str):
            raise ProblemError("a list of names holds a bracket")
        if word != "-":
            waiting.append(word)
            continue
        kind = next(words, None)
        if not isinstance(kind, str):
            raise ProblemError("a list of names ends without its type")
        found += [(name, kind) for name in waiting]
        waiting = []
    return found + [(name, "object") for name in waiting]


@dataclass
class Problem:
    """kinds: object -> type; facts: those of the start; goal: the expression as it stands."""

    kinds: dict[str, str]
    facts: frozenset[tuple]
    goal: list

    @cached_property
    def by_predicate(self) -> dict[str, list[tuple]]:
        groups = {}
        for fact in self.facts:
            groups.setdefault(fact[0], []).append(fact)
        return groups

    def of_kind(self, kind: str) -> list[str]:
        """The objects of a type; every object is of the type object."""
        return sorted(name for name, k in self.kinds.items() if kind in (k, "object"))


def read_problem(text: str) -> Problem:
    """A problem from its text. Raises ProblemError where it is none."""
    expressions = read_lisp(text)
    if not expressions or not isinstance(expressions[0], list) or expressions[0][:1] != ["define"]:
        raise ProblemError("it does not start with (define")

    parts = {}
    for part in expressions[0][1:]:
        if isinstance(part, list) and part and isinstance(part[0], str):
            parts.setdefault(part[0], part[1:])
    for name in (":objects", ":init", ":goal"):
        if name not in parts:
            raise ProblemError(f"it has no ({name}")
    if parts.get(":domain") != ["alfred"]:
        raise ProblemError("its domain is not alfred")
    if len(parts[":goal"]) != 1:
        raise ProblemError("its (:goal is not one expression")

    kinds = dict(typed(parts[":objects"]))
    names, facts = set(kinds), set()
    for fact in parts[":init"]:
        if not isinstance(fact, list) or not fact:
            raise ProblemError("its (:init holds something that is no fact")
        if fact[0] == "=":  # a cost in another form
            continue
        if list in map(type, fact):
            raise ProblemError("its (:init holds something that is no fact")
        if not names.issuperset(fact[1:]):
            unknown = next(name for name in fact[1:] if name not in names)
            raise ProblemError(f"{unknown[:60]} is in a fact and is no object")
        if PREDICATES.get(fact[0]) != len(fact) - 1:
            raise ProblemError(f"({' '.join(fact)[:60]}) is no fact of the domain")
        facts.add(tuple(fact))
    return Problem(kinds, frozenset(facts), parts[":goal"][0])


# --- the goal -------------------------------------------------------------------------------------
#
# Grounded, a goal is True, False, a frozenset of facts that have to hold together, or a tuple of
# "and", "or" or "not" and such goals.


def ground(formula, problem: Problem, binding: dict, patterns: dict):
    """A formula whose variables have the values of `binding`, grounded.

    Facts that no action changes are looked up now. patterns: a memory for `candidates`,
    and the number of cases.
    """
    if not isinstance(formula, list) or not formula or not isinstance(formula[0], str):
        raise ProblemError("its goal holds something that is no formula")

    name, *parts = formula
    if name in ("and", "or"):
        return joined(name, [ground(part, problem, binding, patterns) for part in parts])
    if name == "not" and len(parts) == 1:
        return negated(ground(parts[0], problem, binding, patterns))
    if name == "imply" and len(parts) == 2:
        first, second = (ground(part, problem, binding, patterns) for part in parts)
        return joined("or", [negated(first), second])
    if name in ("exists", "forall") and len(parts) == 2 and isinstance(parts[0], list):
        return quantified(name, typed(parts[0]), parts[1], problem, binding, patterns)

    if not all(isinstance(part, str) for part in parts):
        raise ProblemError(f"its goal has ({name[:20]} with something that is no name")
    values = tuple(binding.get(part, part) for part in parts)
    unknown = [value for value in values if value not in problem.kinds]
    if unknown:
        raise ProblemError(f"{unknown[0][:60]} is in the goal and is no object")
    if name == "=":
        return len(set(values)) == 1
    fact = (name, *values)
    return frozenset([fact]) if name in CHANGING else fact in problem.facts


def quantified(name, variables, body, problem, binding, patterns):
    """(exists (variables) body) or (forall ...): one alternative for each assignment."""
    if not variables:
        return ground(body, problem, binding, patterns)

    (variable, kind), rest = variables[0], variables[1:]
    values = problem.of_kind(kind)
    if name == "exists":
        values = candidates(variable, values, body, problem, binding, patterns)
    patterns["cases"] = patterns.get("cases", 0) + len(values)
    if patterns["cases"] > MOST_CASES:
        raise ProblemError(f"its goal has more than {MOST_CASES:,} cases")
    parts = []
    for value in values:
        inner = {**binding, variable: value}
        parts.append(quantified(name, rest, body, problem, inner, patterns))
    return joined("or" if name == "exists" else "and", parts)


def candidates(variable, values, body, problem, binding, patterns):
    """Those of the values for which no unchanging fact that the body needs is missing."""
    for atom in needed(body):
        name, *words = atom
        if name in CHANGING or name == "=" or variable not in words:
            continue
        pattern = tuple(None if w == variable else binding.get(w, w) for w in words)
        if any(word and word.startswith("?") for word in pattern):
            continue  # another variable that has no value yet
        key = (name, *pattern)
        if key not in patterns:
            facts = [fact[1:] for fact in problem.by_predicate.get(name, ())]
            patterns[key] = {
                fact[pattern.index(None)]
                for fact in facts
                if len(fact) == len(pattern) and all(p in (None, f) for p, f in zip(pattern, fact))
            }
        values = [value for value in values if value in patterns[key]]
    return values


def needed(formula):
    """The atoms that a formula cannot do without."""
    if not isinstance(formula, list) or not formula or not isinstance(formula[0], str):
        return
    if formula[0] == "and":
        for part in formula[1:]:
            yield from needed(part)
    elif formula[0] == "exists":
        yield from needed(formula[-1])
    elif all(isinstance(part, str) for part in formula):
        yield formula


def joined(name: str, parts: list):
    """The parts of "and" or "or", without those that are known."""
    whole = name == "and"  # of no parts
    if (not whole) in parts:
        return not whole
    parts = [part for part in parts if part is not whole]
    if not parts:
        return whole
    if whole:
        facts = frozenset().union(*(part for part in parts if isinstance(part, frozenset)))
        parts = [part for part in parts if not isinstance(part, frozenset)]
        parts += [facts] if facts else []
    return parts[0] if len(parts) == 1 else (name, *parts)


def negated(part):
    return (not part) if isinstance(part, bool) else ("not", part)


def holds(goal, facts: set) -> bool:
    """Whether a grounded goal holds where these facts do."""
    if isinstance(goal, frozenset):
        return goal <= facts
    if isinstance(goal, bool):
        return goal
    name, *parts = goal
    if name == "not":
        return not holds(parts[0], facts)
    return (all if name == "and" else any)(holds(part, facts) for part in parts)
