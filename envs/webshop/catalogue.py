"""Catalogues and goals of WebShop (Yao et al. 2022, arXiv 2207.01206).

They come from the three published data files, or from a shop of our own.
"""

import json
import math
import random
import re
from collections import Counter
from functools import cached_property
from itertools import product as cartesian
from pathlib import Path

from envs.webshop.search import SearchIndex, cache_directory

PRICE_LIMITS = [10.0 * i for i in range(1, 100)]
NO_LIMIT = 1000000
DROPPED_KEYS = (
    "product_information brand brand_url list_price availability_quantity availability_status "
    "total_reviews total_answered_questions seller_id seller_name fulfilled_by_amazon "
    "fast_track_message aplus_present small_description_old"
).split()
REQUIRED_KEYS = (
    "name full_description small_description customization_options images category query "
    "product_category"
)
# The published file names, each time products, attributes and people's instructions: 1,000
# products, and the whole shop.
SMALL_FILES = ("items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins.json")
LARGE_FILES = ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json")
MOST_GOALS = 500_000  # half a gigabyte
MOST_OPTIONS = 100  # combinations of a product that validates
HUB_DATA = "YWZBrandon/webshop-data"


class DataError(ValueError):
    """A data file is missing, damaged or holds a row that cannot be used.

    The message names file and row.
    """


class Catalog:
    """Products in order, their prices, and the search over them.

    One catalogue serves every episode.
    """

    def __init__(self, products, prices, skipped=(), cache=None):
        self.products = products
        self.prices = prices
        self.by_asin = {p["asin"]: p for p in products}
        self.skipped = Counter(skipped)  # rows left out, by reason
        self._cache = cache

    @cached_property
    def index(self):
        return SearchIndex([(p["asin"], contents(p)) for p in self.products], self._cache)

    def search(self, query: str, k: int = 50) -> list[str]:
        """The asins of the at most k best products, best first."""
        return self.index.search(query, k)


def contents(product: dict) -> str:
    """What is indexed of a product, in lower case.

    That is its title, its description, the first bullet point and all options.
    """
    choices = product["options"].items()
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in choices)
    bullet = product["BulletPoints"][0] if product["BulletPoints"] else ""
    return " ".join([product["Title"], product["Description"], bullet, options]).lower()


def load_catalog(
    directory: str | Path | None, num_products: int | None = None, seed: int = 0
) -> Catalog:
    """Catalogue from a directory with the three published files; where that is None, our own.

    num_products keeps the first rows of the product file. seed draws the price of a product that
    has a range (and makes our own catalogue). Raises DataError, which names file and row;
    `catalog.skipped` counts rows left out, by reason.
    """
    if directory is None:
        sources = ["generated products", "generated attributes", "generated instructions"]
        tables = generate_shop(seed)
    else:
        directory = Path(directory)
        names = SMALL_FILES
        small = all((directory / n).is_file() for n in SMALL_FILES)
        large = all((directory / n).is_file() for n in LARGE_FILES)
        if large and (not small or (num_products or 0) > 1000):
            names = LARGE_FILES

        missing = [n for n in names if not (directory / n).is_file()]
        if missing:
            wanted = f"a catalogue is the three files {names}"
            raise DataError(f"{directory}: missing {', '.join(missing)}; {wanted}")

        sources = [directory / n for n in names]
        tables = [_read_json(path, kind) for path, kind in zip(sources, (list, dict, dict))]
    return _build_catalog(sources, tables, num_products, seed)


def _read_json(path, kind):
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text)
        if "\\ud" in text.lower():  # halves of surrogate pairs become question marks
            whole = json.dumps(table, ensure_ascii=False).encode("utf-8", "replace")
            table = json.loads(whole)
    except RecursionError:
        raise DataError(f"{path}: nested too deep") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise DataError(f"{path}: damaged or cut short: {place}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: damaged: byte {error.start} is no UTF-8") from None
    if not isinstance(table, kind):
        expected = "array" if kind is list else "object"
        raise DataError(f"{path}: a JSON {expected} is expected at the top")
    return table


def _build_catalog(sources, tables, num_products, seed):
    rows, attributes, human = tables
    products, skipped = [], Counter()
    seen = set()

    for number, row in enumerate(rows[:num_products]):
        where = f"{sources[0]}: row {number}"
        if not isinstance(row, dict) or not isinstance(row.get("asin"), str) or not row["asin"]:
            raise DataError(f"{where}: a product without an asin")
        asin = row["asin"]
        if asin == "nan" or len(asin) > 10:
            skipped["asin nan or too long"] += 1
        elif asin in seen:
            skipped["asin seen before"] += 1
        else:
            seen.add(asin)
            where = f"{where} ({asin})"
            products.append(_product(row, _entry(attributes, asin, sources[1]), where))
            if asin in human:
                entries = _instructions(human[asin], f"{sources[2]}: row {asin}")
                products[-1]["instructions"] = entries

    if not products:
        raise DataError(f"{sources[0]}: no product")
    skipped["instruction without its product"] = sum(
        len(v) if isinstance(v, list) else 1 for a, v in human.items() if a not in seen
    )

    # in catalogue order and before anything else is drawn: one seed, one price list
    prices, draw = {}, random.Random(seed)
    for p in products:
        low_high = p["pricing"]
        prices[p["asin"]] = low_high[0] if len(low_high) == 1 else draw.uniform(*low_high)

    return Catalog(products, prices, +skipped, cache_directory())


def _product(row, entry, where):
    """One product under the original's keys.

    row is that of the product file, entry that of the attribute file.
    """
    absent = [k for k in REQUIRED_KEYS.split() if k not in row]
    if absent:
        raise DataError(f"{where}: no {', '.join(absent)}")

    product = {k: v for k, v in row.items() if k not in DROPPED_KEYS}
    product["Title"] = row["name"]
    product["Description"] = row["full_description"]
    product["Reviews"] = []
    product["Rating"] = "N.A."
    bullets = row["small_description"]
    product["BulletPoints"] = bullets if isinstance(bullets, list) else [bullets]
    try:
        product["pricing"], product["Price"] = _pricing(row.get("pricing"))
    except (ValueError, IndexError, TypeError, AttributeError):
        shown = ascii(row.get("pricing"))[:60]
        raise DataError(f"{where}: unreadable pricing {shown}, as $9.99 or $5 to $9") from None

    options, images = {}, {}
    try:
        for name, choices in (row["customization_options"] or {}).items():
            if choices is None:
                continue
            values = [c["value"].strip().replace("/", " | ").lower() for c in choices]
            images.update(zip(values, (c.get("image") for c in choices)))
            options[name.lower()] = values
        product["query"] = row["query"].lower().strip()
        product["MainImage"] = row["images"][0]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        keys = "customization_options, query or images"
        raise DataError(f"{where}: unreadable {keys}: {error!r}") from None

    texts = [product[k] for k in ("Title", "Description", "category", "product_category")]
    texts += [*product["BulletPoints"], product["query"]]
    if not all(isinstance(t, str) for t in texts):
        raise DataError(f"{where}: a name, description, bullet point or category is no text")

    product["options"] = options
    product["option_to_image"] = images
    product["Attributes"] = entry.get("attributes", ["DUMMY_ATTR"])
    product["instruction_text"] = entry.get("instruction")
    product["instruction_attributes"] = entry.get("instruction_attributes")
    return product


def _pricing(text):
    """([lowest, highest] or [price], the tag shown), in dollars.

    At most two figures count, and where there is none it is $100.
    """
    if not text:
        return [100.0], "$100.0"
    figures = [float(re.sub(r"[^\d.]", "", part)) for part in text.split("$")[1:]]
    if not all(figure < 1e9 for figure in figures[:2]):
        raise ValueError("beyond all prices")
    if len(figures) == 1:
        return figures, f"${figures[0]}"
    return figures[:2], f"${figures[0]} to ${figures[1]}"


def _entry(attributes, asin, source):
    """The attribute file's entry of a product; empty where there is none."""
    entry = attributes.get(asin, {})
    fine = isinstance(entry, dict)
    for key in ("attributes", "instruction_attributes"):
        texts = (entry.get(key) or []) if fine else None
        fine = isinstance(texts, list) and all(isinstance(a, str) for a in texts)
    if fine and "attributes" in entry and entry["attributes"] is None:
        fine = False
    if not fine or not isinstance(entry.get("instruction"), str | None):
        raise DataError(f"{source}: row {asin}: attributes are no list of texts")
    return entry


def _instructions(entries, where):
    if not isinstance(entries, list):
        raise DataError(f"{where}: a list of instructions is expected")
    for number, entry in enumerate(entries):
        fine = isinstance(entry, dict) and isinstance(entry.get("instruction"), str)
        for key in ("instruction_attributes", "instruction_options"):
            texts = entry.get(key) if fine else None
            fine = isinstance(texts, list) and all(isinstance(t, str) for t in texts)
        if not fine:
            raise DataError(f"{where}, instruction {number}: damaged")
    return entries


def make_goals(catalog: Catalog, human: bool, seed: int) -> list[dict]:
    """Goals in the original's order: people's instructions, or synthetic ones.

    A product has one synthetic goal for each combination of its options. Price limits are drawn
    first, from `seed` alone (the original draws them from an unseeded generator), then the list is
    shuffled with the original's fixed seed. Goals without attributes are left out, counted in
    `catalog.skipped`.
    """
    draw = random.Random(seed)
    goals = []
    uses = Counter()
    without = 0
    for p in catalog.products:
        if human:
            for entry in p.get("instructions", ()):
                if not entry["instruction_attributes"]:
                    without += 1
                    continue
                upper, text = _price_limit(catalog.prices[p["asin"]], draw)
                instruction = entry["instruction"].strip(".") + text
                options = entry["instruction_options"]
                goals.append(_goal(p, instruction, entry["instruction_attributes"], upper, options))
        elif p.get("instruction_text") is not None:
            attributes = p["instruction_attributes"]
            if not attributes:
                raise DataError(f"product {p['asin']}: a synthetic instruction without attributes")
            upper, text = _price_limit(catalog.prices[p["asin"]], draw)
            names = sorted(p["options"])
            number = _combinations(p)
            if len(goals) + number > MOST_GOALS:
                many = f"{number:,} combinations of its options, a goal each"
                raise DataError(f"product {p['asin']}: {many}; {MOST_GOALS:,} goals are the most")
            for values in cartesian(*(p["options"][name] for name in names)):
                chosen = dict(zip(names, values))
                wish = ", and ".join(f"{k}: {v}" for k, v in chosen.items())
                wish = f" with {wish}" if wish else ""
                instruction = f"{p['instruction_text']}{wish}{text}"
                goals.append(_goal(p, instruction, attributes, upper, chosen))
                uses.update(attributes)

    for goal in goals:  # a synthetic goal counts more the rarer its attributes are
        a = goal["attributes"]
        goal["weight"] = 1 if human else sum(1.0 / uses[x] for x in a) / len(a)

    if without:
        catalog.skipped["instruction without attributes"] = without
    random.Random(233).shuffle(goals)  # the original's constant
    return goals


def make_validation_goals(catalog: Catalog, goals: list[dict], human: bool, seed: int):
    """Goals that are not in `goals`, which has all that make_goals finds of this kind.

    In our own shop other people ask (its products carry their instructions). Elsewhere nobody else
    does: the goals are of the other kind, synthetic where `goals` are people's, and the other way
    round. Synthetic ones are of at most MOST_GOALS / MOST_OPTIONS products, drawn by lot, with
    MOST_OPTIONS combinations of options at most, so that any catalogue has them. Whoever wants of a
    product exactly what one of `goals` wants of it is left out.
    """
    products = catalog.products
    if human and "validation_instructions" in products[0]:
        products = [{**p, "instructions": p["validation_instructions"]} for p in products]
    else:
        human = not human
    if not human:
        products = [p for p in products if p.get("instruction_text") is not None]
        products = [p for p in products if _combinations(p) <= MOST_OPTIONS]
        most = min(len(products), MOST_GOALS // MOST_OPTIONS)
        products = random.Random(seed).sample(products, most)

    found = make_goals(Catalog(products, catalog.prices), human, seed)
    known = {_wanted(goal) for goal in goals}
    return [goal for goal in found if _wanted(goal) not in known]


def _combinations(product) -> int:
    """How many choices of one value for each option there are."""
    return math.prod(map(len, product["options"].values()))


def _wanted(goal):
    """What a goal asks for, whatever the words and the price."""
    options = goal["goal_options"]
    values = options.values() if isinstance(options, dict) else options
    return goal["asin"], frozenset(goal["attributes"]), frozenset(map(str, values))


def _price_limit(price, draw):
    """(upper limit in dollars, the words for it).

    The limit is the larger of two of the next four multiples of ten.
    """
    choices = [p for p in PRICE_LIMITS if p > price][:4]
    if len(choices) < 2:
        return NO_LIMIT, ""
    upper = max(draw.sample(choices, 2))
    return upper, f", and price lower than {upper:.2f} dollars"


def _goal(product, instruction, attributes, price_upper, options):
    goal = {k: product[k] for k in ("asin", "category", "query", "name", "product_category")}
    goal.update(
        instruction_text=instruction,
        attributes=attributes,
        price_upper=price_upper,
        goal_options=options,
    )
    return goal


def fetch_hub() -> Path:
    """Directory with the three small files of the Hub data set YWZBrandon/webshop-data.

    They are downloaded once. Written against huggingface_hub's documented interface and tested with
    a stub; it was not run against the Hub.
    """
    from huggingface_hub import snapshot_download

    patterns = [f"*{name}" for name in SMALL_FILES]
    try:
        root = Path(snapshot_download(HUB_DATA, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # network, hub and disk have no common class
        reason = f"the hub does not give {HUB_DATA} ({type(error).__name__})"
        raise DataError(f"{reason}; download its three files, and give their directory") from None
    # the files may lie in a folder of the data set
    found = sorted(path.parent for path in root.rglob(SMALL_FILES[0]))
    return found[0] if found else root


# --- a shop of our own ----------------------------------------------------------------------------

PER_TYPE = 36  # products of each of the 32 types: 1,152 in all
ASKS = 6  # people's instructions for each product: 6,912 in all
BRANDS = (
    "Norvik Alden Brisco Calder Dunmore Elwood Farrow Gilby Harlow Inverso Jessup Kelda Lomax "
    "Marlow Nuvia Orson Pender Quill Rowan Selby Tarn Umbra Velda Wexford"
).split()
COLOURS_SOLD = (
    "black, white, red, blue, green, pink, gray, brown, purple, orange, yellow, navy, beige, gold, "
    "silver, teal"
)
POOLS = {
    "CLOTHES": "small, medium, large, x-large, xx-large",
    "SHOES": "7, 8, 9, 10, 11, 12",
    "OUNCES": "8 oz, 12 oz, 16 oz, 32 oz",
    "PACKS": "1 pack, 2 pack, 4 pack, 6 pack",
    "BEDS": "twin, full, queen, king",
    "FLAVOURS": "vanilla, hazelnut, caramel, mocha, cinnamon, ginger, honey, berry",
    "SCENTS": "lavender, citrus, coconut, rose, vanilla, unscented",
    "STYLES": "modern, rustic, vintage, classic",
}

# attribute: how somebody asks for it who does not know the word; a leading + marks a thing that a
# product has
ATTRIBUTES = {
    "machine washable": "that i can put in the washer",
    "water resistant": "that can take some rain",
    "long lasting": "that will hold up for years",
    "easy clean": "that only need a quick wipe",
    "heavy duty": "that can take a beating",
    "non slip": "that will not slide around",
    "wrinkle free": "that need no ironing",
    "slim fit": "that sit close to the body",
    "moisture wicking": "that keep me dry when i sweat",
    "quick release": "that come off in a second",
    "noise cancelling": "that shut out the world",
    "fast charging": "that fill the battery in no time",
    "hands free": "that i can use while i drive",
    "shock proof": "that survive a drop",
    "height adjustable": "that go up and down",
    "easy assemble": "that go together without tools",
    "stain resistant": "that forgive a spill",
    "thermal insulated": "that keep the heat inside",
    "super soft": "that feel gentle to the touch",
    "battery powered": "that need no socket",
    "cruelty free": "that were not tested on animals",
    "fragrance free": "without any perfume",
    "sulfate free": "without harsh detergents",
    "anti aging": "that make me look younger",
    "gluten free": "that are safe for celiacs",
    "sugar free": "with nothing sweet added",
    "low carb": "that suit my diabetes",
    "high protein": "that feed my muscles",
    "dairy free": "without any milk",
    "fair trade": "that pay their farmers well",
    "plant based": "for vegans",
    "usda organic": "grown without pesticides",
    "+rubber sole": "that grip wet ground",
    "+memory foam": "that cushion every move",
    "+arch support": "that are kind to flat feet",
    "+button closure": "that i do not pull over my head",
    "+long sleeve": "that cover my arms",
    "+stretch fabric": "that move with me",
    "+high waist": "that come up over my hips",
    "+laptop pocket": "that fit my computer",
    "+uv protection": "that block the sun",
    "+stereo sound": "that fill a room with music",
    "+bluetooth pairing": "that work without cables",
    "+aluminum alloy": "made of light metal",
    "+steel frame": "that stand firm",
    "+solid wood": "made of real timber",
    "+faux leather": "that look like hide",
    "+led light": "that save power",
    "+blackout lining": "that make the room dark",
    "+hidden zipper": "that close out of sight",
    "+coconut oil": "that smell like the tropics",
    "+argan oil": "that make hair shine",
    "+vitamin c": "that brighten the face",
    "+sensitive skin": "that do not sting",
    "+dark roast": "that taste strong and bitter",
    "+resealable bag": "that keep after opening",
}
# query | category | path | variants | lowest and highest price; then the attributes; then the
# options beside a color
TYPES = """
running shoes | fashion | Shoes › Athletic | trail, road, gym | 25 240
non slip, +rubber sole, +memory foam, +arch support, machine washable, water resistant
size: {SHOES}; width: narrow, wide, roomy

dress shirts | fashion | Men › Shirts | office, evening, striped | 15 140
slim fit, +long sleeve, +button closure, wrinkle free, +stretch fabric, machine washable
size: {CLOTHES}; collar: spread, mandarin, pointed

hoodies | fashion | Men › Sweatshirts | fleece, zip, college | 18 150
+long sleeve, machine washable, super soft, +stretch fabric, wrinkle free, water resistant
size: {CLOTHES}; style: {STYLES}

yoga pants | fashion | Women › Active | capri, flare, jogger | 12 120
+high waist, moisture wicking, +stretch fabric, machine washable, super soft, +hidden zipper
size: {CLOTHES}; length: short, regular, tall

sandals | fashion | Shoes › Summer | beach, slide, hiking | 10 130
non slip, +arch support, +memory foam, water resistant, +rubber sole, +faux leather
size: {SHOES}

backpacks | fashion | Luggage › Bags | school, travel, hiking | 20 220
+laptop pocket, water resistant, heavy duty, +hidden zipper, easy clean, +faux leather
size: 15 l, 25 l, 40 l; style: {STYLES}

sunglasses | fashion | Accessories › Eyewear | aviator, sport, round | 9 160
+uv protection, non slip, shock proof, +aluminum alloy, water resistant, easy clean
lens: mirrored, tinted, clear

bluetooth speakers | electronics | Audio › Speakers | shower, party, pocket | 14 270
+stereo sound, water resistant, fast charging, hands free, long lasting, shock proof
style: {STYLES}; pack: {PACKS}

headphones | electronics | Audio › Headphones | studio, gaming, travel | 18 370
noise cancelling, +stereo sound, +bluetooth pairing, fast charging, +memory foam, hands free
plug: usb, lightning, jack

phone cases | electronics | Phones › Cases | wallet, bumper, glitter | 7 80
shock proof, non slip, easy clean, +faux leather, heavy duty, fast charging
model: pixel 8, galaxy s23, iphone 14, oneplus 11; finish: matte, glossy, brushed

laptop stands | electronics | Computers › Stands | desk, folding, swivel | 12 150
+aluminum alloy, height adjustable, non slip, heavy duty, easy assemble, +steel frame
size: 13 in, 15 in, 17 in

charging cables | electronics | Phones › Cables | braided, coiled, flat | 6 70
fast charging, long lasting, heavy duty, +aluminum alloy, water resistant, +led light
length: 3 ft, 6 ft, 10 ft; plug: usb, lightning, magnetic

keyboards | electronics | Computers › Keyboards | gaming, office, compact | 15 260
+bluetooth pairing, +led light, easy clean, long lasting, battery powered, +aluminum alloy
layout: english, german, french; switch: linear, tactile, clicky

watch bands | electronics | Wearables › Bands | sport, mesh, woven | 6 100
quick release, water resistant, +faux leather, +stretch fabric, easy clean, long lasting
size: 38 mm, 42 mm, 45 mm; clasp: buckle, magnet, loop

table lamps | garden | Lighting › Lamps | bedside, reading, touch | 16 200
+led light, height adjustable, +solid wood, battery powered, easy assemble, +steel frame
style: {STYLES}; bulb: warm, cool, daylight

bar stools | garden | Furniture › Stools | swivel, backless, counter | 35 410
+faux leather, +solid wood, height adjustable, easy assemble, +steel frame, easy clean
height: 24 in, 26 in, 30 in; style: {STYLES}

area rugs | garden | Decor › Rugs | shag, woven, outdoor | 18 360
non slip, stain resistant, super soft, machine washable, easy clean, +memory foam
size: 2x3 ft, 4x6 ft, 5x8 ft, 9x12 ft; shape: round, square, oval

curtains | garden | Decor › Windows | bedroom, kitchen, sheer | 12 140
+blackout lining, thermal insulated, machine washable, wrinkle free, stain resistant, super soft
length: 45 in, 63 in, 84 in; style: {STYLES}

bed sheets | garden | Bedding › Sheets | hotel, flannel, striped | 16 190
super soft, machine washable, wrinkle free, stain resistant, moisture wicking, thermal insulated
size: {BEDS}; pieces: 3 pc, 4 pc, 6 pc

throw pillows | garden | Decor › Pillows | sofa, bench, patio | 8 110
+hidden zipper, +memory foam, super soft, machine washable, stain resistant, +faux leather
size: 12x20 in, 18x18 in, 24x24 in; pack: {PACKS}

bookshelves | garden | Furniture › Shelves | corner, ladder, hanging | 28 440
+solid wood, +steel frame, easy assemble, heavy duty, easy clean, height adjustable
tiers: 2 tier, 3 tier, 5 tier

wall clocks | garden | Decor › Clocks | kitchen, pendulum, giant | 11 150
battery powered, +solid wood, +led light, easy clean, long lasting, +steel frame
size: 10 in, 14 in, 20 in; style: {STYLES}

office chairs | garden | Furniture › Chairs | swivel, executive, mesh | 50 540
height adjustable, +memory foam, +faux leather, easy assemble, heavy duty, +steel frame
arms: fixed, folding, padded; style: {STYLES}

face serums | beauty | Skin › Serums | night, day, glow | 9 130
+vitamin c, anti aging, cruelty free, fragrance free, +sensitive skin, +coconut oil
scent: {SCENTS}; size: {OUNCES}

shampoos | beauty | Hair › Shampoos | daily, volume, repair | 6 80
sulfate free, +argan oil, +coconut oil, cruelty free, fragrance free, +sensitive skin
scent: {SCENTS}; size: {OUNCES}; pack: {PACKS}

lip glosses | beauty | Makeup › Lips | shiny, plumping, tinted | 5 60
long lasting, cruelty free, fragrance free, +coconut oil, +vitamin c, water resistant
finish: matte, glossy, glitter

hair brushes | beauty | Hair › Brushes | paddle, round, travel | 6 70
easy clean, +solid wood, non slip, +sensitive skin, long lasting, quick release
size: mini, medium, jumbo; bristle: nylon, boar, bamboo

body lotions | beauty | Skin › Lotions | daily, firming, winter | 6 80
fragrance free, +coconut oil, +sensitive skin, cruelty free, anti aging, +vitamin c
scent: {SCENTS}; size: {OUNCES}; pack: {PACKS}

ground coffee | grocery | Drinks › Coffee | breakfast, espresso, camp | 8 100
+dark roast, fair trade, usda organic, +resealable bag, sugar free, dairy free
flavor: {FLAVOURS}; size: {OUNCES}; pack: {PACKS}

protein bars | grocery | Snacks › Bars | crunchy, chewy, breakfast | 7 90
high protein, low carb, gluten free, sugar free, plant based, dairy free
flavor: {FLAVOURS}; pack: {PACKS}

green tea | grocery | Drinks › Tea | loose, bagged, powdered | 5 80
usda organic, fair trade, sugar free, +resealable bag, gluten free, dairy free
flavor: {FLAVOURS}; size: {OUNCES}; pack: {PACKS}

trail mix | grocery | Snacks › Nuts | tropical, spicy, salted | 6 90
gluten free, usda organic, low carb, +resealable bag, high protein, plant based
flavor: {FLAVOURS}; size: {OUNCES}; pack: {PACKS}
""".format(**POOLS)
USES = (
    "home, work, travel, weekends, school, long days, summer, winter, small rooms, busy mornings, "
    "guests, everyday use"
).split(", ")
REMARKS = (
    "A quiet favorite of our staff.",
    "Packed by hand in a plain box.",
    "Checked twice before it leaves our store.",
    "Send it back within a month if it does not suit.",
    "Designed by a small family firm.",
    "The color may vary a little from the photo.",
    "See the chart before you order.",
    "Our team answers within a day.",
    "One of the oldest lines in our house.",
    "New this season.",
)
PITCH = (
    "Are you looking for a gift? I am sure you need not look any longer: find one you like, at a "
    "price lower than you would think, for few dollars. Please choose the color and size you want."
)
PITCHES = 6  # products that carry the pitch: a search with a whole sentence meets them first
OPENINGS = (
    "i need",
    "i want",
    "i am looking for",
    "im looking for",
    "i would like",
    "find me",
    "can you find me",
    "show me",
    "i want to buy",
    "please get me",
    "looking for",
    "help me find",
    "i am shopping for",
    "get me",
)
TAILS = (
    " {wish}",
    ", {wish}",
    ". {wish} please",
    ", and choose {wish}",
    ". i want {wish}",
    ". please pick {wish}",
    ", it should be {wish}",
    " with {wish}",
)


def generate_shop(seed: int) -> tuple[list, dict, dict]:
    """Our own shop from a seed, as the three tables of a data directory.

    They hold 1,152 products of 32 types, their attributes, and 6,912 instructions. The rows have
    the schema of the published files and go through the same loader; only the key
    validation_instructions of a product is our own. No text is taken from the published data.
    """
    draw = random.Random(seed)
    types = TYPES.strip().split("\n\n")
    asins = draw.sample([f"B{i}" for i in range(1000, 10_000)], PER_TYPE * len(types))
    rows, attributes, human = [], {}, {}
    for entry in types:
        head, pool, groups = entry.split("\n")
        query, category, path, variants, prices = head.split(" | ")
        low, high = map(float, prices.split())
        groups = dict(g.split(": ") for g in groups.split("; "))
        if not groups.keys() & {"flavor", "scent"}:
            groups = {"color": COLOURS_SOLD, **groups}
        titles = set()
        while len(titles) < PER_TYPE:
            has = draw.sample(pool.split(", "), 4)
            plain = [a.lstrip("+") for a in has]
            variant = draw.choice(variants.split(", "))
            title = f"{draw.choice(BRANDS)} {plain[0]} {plain[1]} {variant} {query}".title()
            if title in titles:
                continue
            titles.add(title)
            asin = asins[len(rows)]
            options = {}
            for name, values in groups.items():
                values = values.split(", ")
                kept = draw.sample(values, draw.randint(min(3, len(values)), min(4, len(values))))
                options[name] = sorted(kept, key=values.index)
            price = low * (high / low) ** draw.random()
            tag = f"${price:.2f}" if draw.random() < 0.9 else f"${price:.2f}${price * 1.2:.2f}"
            rows.append(
                {
                    "asin": asin,
                    "name": title,
                    "full_description": _describe(query, variant, has, draw),
                    "small_description": _bullets(has, draw),
                    "pricing": tag,
                    "images": [f"{asin}.jpg"],
                    "category": category,
                    "query": query,
                    "product_category": f"{category.title()} › {path} › {query.title()}",
                    "customization_options": {
                        k: [{"value": v, "image": None} for v in vs] for k, vs in options.items()
                    },
                }
            )
            wishes = draw.sample(plain[:3], 2)
            attributes[asin] = {
                "attributes": plain,
                "instruction": f"Find me {', '.join(wishes)} {query}",
                "instruction_attributes": wishes,
            }
            human[asin] = [_ask(query, variant, has, options, draw) for _ in range(ASKS)]

            # from a stream of its own, so that nothing else is drawn otherwise
            other = random.Random(f"webshop validation {seed} {asin}")
            rows[-1]["validation_instructions"] = [_ask(query, variant, has, options, other)]

    for row in draw.sample(rows, PITCHES):
        row["full_description"] += f" {PITCH}"
    draw.shuffle(rows)
    return rows, attributes, human


def _says(attribute):
    """An attribute as part of a sentence about a product: "with rubber sole", "non slip"."""
    return f"with {attribute[1:]}" if attribute.startswith("+") else attribute


def _describe(query, variant, has, draw):
    use, other = draw.sample(USES, 2)
    things = f"{variant} {query}"
    things = f"{things} {_says(has[2])}" if has[2].startswith("+") else f"{has[2]} {things}"
    return f"{things.capitalize()} for {use} and {other}. {draw.choice(REMARKS)}"


def _bullets(has, draw):
    uses = draw.sample(USES, 4)
    bullets = [f"Good for {uses[0]}."]
    bullets += [f"{_says(a)}: made for {use}.".capitalize() for a, use in zip(has[1:], uses[1:])]
    return bullets + [draw.choice(REMARKS)]


def _ask(query, variant, has, options, draw):
    """One person's instruction for a product.

    It asks for some of its attributes, in the shop's words or others, and for options of it.
    """
    known = draw.sample(has[:2] if draw.random() < 0.75 else has[:3], draw.choice((1, 1, 1, 2)))
    plain = draw.random() < 0.5  # half of the people know the shop's words
    before = [a for a in known if plain and not a.startswith("+")]
    after = [f"with {a[1:]}" for a in known if plain and a.startswith("+")]
    after += [ATTRIBUTES[a] for a in known if not plain]
    thing = f"{variant} {query}" if draw.random() < 0.5 else query
    chosen = {name: draw.choice(values) for name, values in options.items()}
    shuffled = draw.sample(list(chosen.items()), len(chosen))
    wish = ", ".join(_wish(name, value, draw) for name, value in shuffled)
    parts = [draw.choice(OPENINGS), " and ".join(before), thing, " and ".join(after)]
    request = " ".join(part for part in parts if part)
    return {
        "instruction": request + draw.choice(TAILS).format(wish=wish),
        "instruction_attributes": [a.lstrip("+") for a in known],
        "instruction_options": list(chosen.values()),
    }


def _wish(name, value, draw):
    if name == "color":
        return draw.choice(("{} color", "color {}", "{}")).format(value)
    if name in ("flavor", "scent", "style"):
        return draw.choice((f"{value} {name}", f"{name} {value}"))
    return f"{name} {value}"
