"""Products for the shop, all made up, from a seed; and the search over them."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import NamedTuple

PRODUCTS_PER_KIND = 12
NUM_ATTRIBUTES = 4
"""Attributes of each product; its title shows the first half."""


class Category(NamedTuple):
    kinds: tuple[str, ...]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    prices: tuple[int, int]


COLORS = ("black", "blue", "green", "grey", "red", "white", "yellow")
CATEGORIES = {
    "clothing": Category(
        ("rain jacket", "crew shirt", "knit sweater", "lounge pants", "trail shorts", "wool socks"),
        ("machine washable", "quick drying", "slim fit", "loose fit", "long sleeve", "stretchy"),
        {"color": COLORS, "size": ("small", "medium", "large", "x-large", "xx-large")},
        (9, 80),
    ),
    "furniture": Category(
        ("floor lamp", "storage bench", "bar stool", "coffee table", "book shelf", "desk chair"),
        ("easy to assemble", "solid wood", "steel frame", "space saving", "padded", "foldable"),
        {"color": COLORS, "height": ("18 inch", "24 inch", "30 inch", "36 inch")},
        (25, 300),
    ),
    "food": Category(
        ("trail mix", "green tea", "oat bars", "rice crackers", "fruit jam", "bean coffee"),
        ("gluten free", "sugar free", "low sodium", "non gmo", "plant based", "kosher certified"),
        {"flavor": ("almond", "berry", "cocoa", "ginger", "honey", "lemon"),
         "pack": ("pack of 1", "pack of 3", "pack of 6", "pack of 12")},
        (4, 45),
    ),
    "electronics": Category(
        ("ear buds", "wall charger", "phone case", "desk speaker", "wrist watch", "video camera"),
        ("fast charging", "water resistant", "noise cancelling", "hands free", "dust proof",
         "high resolution"),
        {"color": COLORS, "storage": ("16 gb", "32 gb", "64 gb", "128 gb")},
        (12, 220),
    ),
    "beauty": Category(
        ("face cream", "hair oil", "lip balm", "body lotion", "nail polish", "hand soap"),
        ("cruelty free", "fragrance free", "paraben free", "long lasting", "for sensitive skin",
         "travel sized"),
        {"scent": ("cedar", "citrus", "lavender", "mint", "rose", "vanilla"),
         "volume": ("50 ml", "100 ml", "200 ml")},
        (5, 60),
    ),
}  # fmt: skip
BRANDS = ("Alder", "Brisk", "Corvo", "Dunmore", "Elmet", "Fenwick", "Garnet", "Hollis", "Ivory")
USES = ("travel", "camping", "office", "school", "kitchen", "garden", "party", "gym", "holiday")
"""Nouns that products of all categories have in their titles: shared, but weak evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    id: str
    title: str
    category: str
    nouns: frozenset[str]
    """Nouns of the title."""
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    """Values to choose from, by the option's name."""
    price: float

    @property
    def words(self) -> set[str]:
        values = [value for values in self.options.values() for value in values]
        return words_of(" ".join([self.title, self.category, *self.attributes, *values]))


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


class Catalogue:
    """Products, and an index of their words."""

    def __init__(self, products: list[Product]):
        self.products = products
        self._words = [product.words for product in products]
        counts = Counter(word for words in self._words for word in words)
        self._weights = {word: math.log(1 + len(products) / n) for word, n in counts.items()}

    def search(self, query: str, num_hits: int) -> list[Product]:
        """Products with words of the query, by the sum of log(1 + products / products with it)."""
        asked = words_of(query) & self._weights.keys()
        scores = [sum(self._weights[w] for w in sorted(asked & words)) for words in self._words]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [self.products[index] for index in order[:num_hits] if scores[index] > 0]


@cache
def make_catalogue(seed: int) -> Catalogue:
    random = Random(seed)
    kinds = [(name, kind) for name, category in CATEGORIES.items() for kind in category.kinds]
    drawn = [pair for pair in kinds for _ in range(PRODUCTS_PER_KIND)]
    ids = random.sample(range(100_000, 1_000_000), len(drawn))
    return Catalogue([_draw(random, f"B{id}", *pair) for id, pair in zip(ids, drawn, strict=True)])


def _draw(random: Random, id: str, name: str, kind: str) -> Product:
    category = CATEGORIES[name]
    uses = random.sample(USES, 4)
    attributes = tuple(random.sample(category.attributes, NUM_ATTRIBUTES))
    shown = ", ".join(attributes[: NUM_ATTRIBUTES // 2])
    return Product(
        id=id,
        title=f"{random.choice(BRANDS)} {kind}, {shown}, for {', '.join(uses)}",
        category=name,
        nouns=frozenset((*kind.split(), *uses)),
        attributes=attributes,
        options={
            option: tuple(sorted(random.sample(values, 3), key=values.index))
            for option, values in category.options.items()
        },
        price=random.randint(*category.prices) - 0.01,
    )
