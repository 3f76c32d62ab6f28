"""A small web shop in the manner of WebShop: search, read, choose options, buy what is wanted."""

import math
from dataclasses import dataclass, field
from random import Random
from typing import Literal, NamedTuple

from roll_lite.envs.catalogue import Product, make_catalogue
from roll_lite.envs.game import Game

NUM_HITS = 50
PAGE_SIZE = 10
BACK, NEXT, PREVIOUS, DESCRIPTION, BUY = (
    "back to search",
    "next >",
    "< prev",
    "description",
    "buy now",
)


class Goal(NamedTuple):
    product: Product
    """One that satisfies the goal."""
    attributes: tuple[str, ...]
    options: dict[str, str]
    max_price: float

    @property
    def kind(self) -> str:
        return " ".join(self.product.title.split(",")[0].split()[1:])

    @property
    def text(self) -> str:
        options = ", ".join(f"{name}: {value}" for name, value in self.options.items())
        return (
            f"Find {self.kind}, {' and '.join(self.attributes)}, with {options}, for at most "
            f"{self.max_price:.2f} dollars."
        )


def draw_goal(random: Random, products: list[Product]) -> Goal:
    product = random.choice(products)
    attributes = tuple(random.sample(product.attributes, 2))
    options = {name: random.choice(values) for name, values in product.options.items()}
    price = math.ceil(product.price / 10) * 10 + random.choice((0, 10, 20))
    return Goal(product, attributes, options, float(price))


def type_match(bought: Product, wanted: Product) -> float:
    """How much the kinds of product agree, by the nouns of their titles and their categories."""
    share = len(bought.nouns & wanted.nouns) / len(wanted.nouns)
    if share == 0:
        return 0.0
    if share < 0.1:
        return 0.1
    return 1.0 if share > 0.2 or bought.category == wanted.category else 0.5


def purchase_reward(goal: Goal, bought: Product, chosen: dict[str, str]) -> float:
    """From 0 to 1: the share of attributes, options and price that fit, times the type match."""
    num_attributes = len(set(goal.attributes) & set(bought.attributes))
    num_options = len(goal.options.items() & chosen.items())
    num_fitting = num_attributes + num_options + (bought.price <= goal.max_price)
    num_wanted = len(goal.attributes) + len(goal.options) + 1
    return type_match(bought, goal.product) * num_fitting / num_wanted


@dataclass(slots=True)
class Page:
    """What the browser shows, and what leads back."""

    name: Literal["search", "results", "item", "description"] = "search"
    hits: list[Product] = field(default_factory=list)
    number: int = 0
    """Number of the page of results."""
    product: Product | None = None
    chosen: dict[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> list[Product]:
        return self.hits[self.number * PAGE_SIZE : (self.number + 1) * PAGE_SIZE]

    @property
    def is_last(self) -> bool:
        return (self.number + 1) * PAGE_SIZE >= len(self.hits)


@dataclass(kw_only=True)
class Shop(Game):
    """`success` is a full match, a score of 1, not any purchase."""

    catalogue_seed: int = 0

    @property
    def instruction(self) -> str:
        return (
            "Buy a product in a web shop that fits the task, with its attributes and options, "
            "within its price.\n"
            "Actions: search[words] on the search page, click[thing] for a thing that the page "
            f"shows in brackets. click[{BUY}] ends the game."
        )

    def start(self, random: Random) -> None:
        self.catalogue = make_catalogue(self.catalogue_seed)
        self.goal = draw_goal(random, self.catalogue.products)
        self.page = Page()
        self.score = 0.0
        self.is_over = False

    @property
    def is_won(self) -> bool:
        return self.score == 1

    def measure(self) -> dict[str, float]:
        bought = {"purchased": float(self.is_over), "score": self.score}
        return super().measure() | bought | {"full_match": float(self.is_won)}

    def observe(self) -> str:
        lines = [f"Task: {self.goal.text}", *getattr(self, f"_{self.page.name}_lines")()]
        return "\n".join([*lines, " ".join(f"[{thing}]" for thing in self._buttons())])

    def _search_lines(self) -> list[str]:
        return ["Search page. The action is search[words]."]

    def _results_lines(self) -> list[str]:
        page = self.page
        head = f"Results, page {page.number + 1}, {len(page.hits)} in all:"
        return [head, *(f"[{p.id}] {p.title}, {p.price:.2f} dollars" for p in page.shown)]

    def _item_lines(self) -> list[str]:
        product = self.page.product
        chosen = self.page.chosen
        options = [
            f"{name}: {' '.join(f'[{v}]' for v in values)}, chosen: {chosen.get(name, 'none')}"
            for name, values in product.options.items()
        ]
        return [f"{product.id}: {product.title}, {product.price:.2f} dollars", *options]

    def _description_lines(self) -> list[str]:
        product = self.page.product
        return [f"Description of {product.id}: {', '.join(product.attributes)}."]

    def _buttons(self) -> list[str]:
        """What can be clicked besides products and options."""
        page = self.page
        if page.name == "search":
            return []
        if page.name == "results":
            more = [PREVIOUS] * (page.number > 0) + [NEXT] * (not page.is_last)
            return [BACK, *more]
        return [BACK, PREVIOUS, *([DESCRIPTION, BUY] if page.name == "item" else [])]

    def actions(self) -> list[str]:
        """On the search page, where any words can be searched, one example."""
        page = self.page
        things = self._buttons()
        if page.name == "search":
            return [f"search[{self.goal.kind}]"]
        if page.name == "results":
            things += [product.id for product in page.shown]
        if page.name == "item":
            things += [value for values in page.product.options.values() for value in values]
        return [f"click[{thing}]" for thing in things]

    def read(self, reply: str) -> str | None:
        answer = (self.answer_of(reply) or "").lower()
        is_search = answer.startswith("search[") and answer.endswith("]") and answer[7:-1].strip()
        if is_search:
            return answer if self.page.name == "search" else None
        return super().read(reply)

    def act(self, action: str) -> float:
        thing = action.partition("[")[2].removesuffix("]")
        if action.startswith("search"):
            self.page = Page("results", self.catalogue.search(thing, NUM_HITS))
        elif thing == BUY:
            self.is_over = True
            self.score = purchase_reward(self.goal, self.page.product, self.page.chosen)
        else:
            self._click(thing)
        return self.score

    def _click(self, thing: str) -> None:
        page = self.page
        if thing == BACK:
            self.page = Page()
        elif thing == DESCRIPTION:
            page.name = "description"
        elif page.name == "results":
            self._click_result(thing)
        elif thing == PREVIOUS:
            page.name = "item" if page.name == "description" else "results"
        else:
            name = next(name for name, values in page.product.options.items() if thing in values)
            page.chosen[name] = thing

    def _click_result(self, thing: str) -> None:
        page = self.page
        if thing in (NEXT, PREVIOUS):
            page.number += 1 if thing == NEXT else -1
            return
        page.name = "item"
        page.chosen = {}
        page.product = next(product for product in page.shown if product.id == thing)

    def solve(self) -> list[str]:
        """A scripted buyer: searches for what the task says, knows which product it means."""
        page = self.page
        goal = self.goal
        if page.name == "search":
            return [f"search[{goal.kind} {' '.join(goal.attributes)}]"]
        if page.name == "results":
            return [f"click[{self._way_to_product()}]"]
        if page.name == "description" or page.product is not goal.product:
            return [f"click[{PREVIOUS}]"]
        missing = [v for name, v in goal.options.items() if page.chosen.get(name) != v]
        return [f"click[{thing}]" for thing in (*missing, BUY)]

    def _way_to_product(self) -> str:
        page = self.page
        product = self.goal.product
        if product in page.shown:
            return product.id
        return BACK if page.is_last else NEXT
