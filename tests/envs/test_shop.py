"""The shop's rewards equal cases computed by hand; the scripted buyer finds what is wanted."""

import pytest

from roll_lite.envs.catalogue import Catalogue, Product, make_catalogue
from roll_lite.envs.game import as_reply
from roll_lite.envs.shop import Goal, Shop, purchase_reward, type_match


def product(nouns, category="clothing", attributes=("a", "b", "c"), price=20.0, id="B1"):
    return Product(
        id=id,
        title=f"Brand {nouns}",
        category=category,
        nouns=frozenset(nouns.split()),
        attributes=attributes,
        options={"color": ("red", "blue"), "size": ("small", "large")},
        price=price,
    )


JACKET = product("rain jacket hood travel")
GOAL = Goal(JACKET, ("a", "b"), {"color": "red", "size": "large"}, 30.0)


@pytest.mark.parametrize(
    ("bought", "chosen", "reward"),
    [
        (JACKET, {"color": "red", "size": "large"}, 1.0),
        (JACKET, {"color": "red", "size": "small"}, 4 / 5),
        (JACKET, {}, 3 / 5),
        (product("rain jacket hood travel", price=30.01), {"color": "red"}, 3 / 5),
        (product("rain jacket", attributes=("a", "x", "y")), {}, 2 / 5),
        (product("desk lamp"), {"color": "red", "size": "large"}, 0.0),
        (product("desk lamp travel", "furniture", ("x",), 99), {}, 0.0),
    ],
)
def test_rewards_of_a_purchase(bought, chosen, reward):
    assert purchase_reward(GOAL, bought, chosen) == pytest.approx(reward)


def test_type_match_by_the_share_of_nouns():
    long = product("a b c d e f g h i j k l")  # twelve nouns
    assert type_match(product("a"), long) == 0.1  # 1 / 12
    assert type_match(product("a b", "food"), long) == 0.5  # 2 / 12, another category
    assert type_match(product("a b"), long) == 1  # 2 / 12, the same category
    assert type_match(product("a b c", "food"), long) == 1  # 3 / 12
    assert type_match(product("z"), long) == 0


def test_search_ranks_rare_words_first_and_ignores_case():
    products = [product("red shirt", id="B1"), product("red jacket", id="B2")]
    products.append(product("red zipper shirt", id="B3"))
    catalogue = Catalogue(products)
    assert [p.id for p in catalogue.search("ZIPPER shirt!", 50)] == ["B3", "B1"]
    assert [p.id for p in catalogue.search("zipper red", 50)] == ["B3", "B1", "B2"]
    assert catalogue.search("", 50) == catalogue.search("unheard-of", 50) == []


def test_the_catalogue_comes_from_its_seed():
    products = make_catalogue(0).products
    again = make_catalogue.__wrapped__(0).products
    assert products == again != make_catalogue.__wrapped__(1).products
    assert len(products) == len({p.id for p in products}) == 360
    assert len(make_catalogue(0).search("for travel", 50)) == 50


def click(game, thing):
    return game.step(as_reply(f"click[{thing}]"))


def test_pages_lead_to_each_other():
    game = Shop(max_steps=50)
    game.reset(0)
    assert game.step(as_reply("search[rain jacket travel]"))[1:4] == (0, False, False)
    first = [p.id for p in game.page.shown]
    click(game, "Next >")
    assert len(first) == 10 and not set(first) & {p.id for p in game.page.shown}
    assert "page 2, 50 in all" in game.observe()
    click(game, "< prev")
    click(game, first[3])
    assert game.page.product.id == first[3] and "[buy now]" in game.observe()
    name, values = next(iter(game.page.product.options.items()))
    click(game, values[1])
    assert f"chosen: {values[1]}" in game.observe()
    click(game, "description")
    assert all(attribute in game.observe() for attribute in game.page.product.attributes)
    click(game, "< prev")
    assert game.page.chosen == {name: values[1]}
    click(game, "< prev")
    assert game.page.name == "results" and game.page.number == 0
    click(game, "back to search")
    assert "Search page" in game.observe()


@pytest.mark.parametrize(
    ("page", "action"),
    [
        ("search", "click[buy now]"),
        ("search", "search[]"),
        ("search", "search[ ]"),
        ("search", "search[jacket"),
        ("results", "search[jacket]"),
        ("results", "click[buy now]"),
        ("results", "click[< prev]"),
        ("results", "click[B1]"),
    ],
)
def test_what_the_page_does_not_offer_is_invalid(page, action):
    game = Shop()
    game.reset(0)
    if page == "results":
        game.step(as_reply("search[jacket]"))
    before = game.observe()
    _, reward, terminated, _, info = game.step(as_reply(action))
    assert game.observe() == before and not terminated and reward == 0
    assert info["mean"] == {"valid": 0, "effective": 0}


def test_the_scripted_buyer_buys_a_full_match():
    game = Shop()
    for seed in range(100):
        game.reset(seed)
        is_over = False
        while not is_over:
            _, reward, is_over, truncated, info = game.step(as_reply(game.solve()[0]))
            assert not truncated
        names = ("success", "purchased", "score", "full_match")
        assert reward == 1 and info["last"] == dict.fromkeys(names, 1)


def test_a_purchase_that_does_not_fit_is_reported_apart():
    game = Shop()
    game.reset(0)
    game.step(as_reply(f"search[{game.goal.kind}]"))
    click(game, next(p.id for p in game.page.shown if p is not game.goal.product))
    _, reward, terminated, _, info = click(game, "buy now")
    last = info["last"]
    assert terminated and last["purchased"] == 1 and last["success"] == last["full_match"] == 0
    assert 0 < reward == last["score"] < 1
