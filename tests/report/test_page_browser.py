# ruff: noqa: RUF001 (mathematical signs)
"""The page in a real browser: it draws what was recorded, finds samples, and runs no text."""

import json
import math
import re
import shlex
import subprocess
import sys
from threading import Thread

import pytest
from support.chromium import Browser, needs_chromium, renderer_megabytes
from support.made_runs import HOSTILE, make_run, metrics, sample, write_lines

from roll_lite.report.__main__ import main
from roll_lite.report.page import make_server, write_two_samples
from roll_lite.report.reader import RunFolder
from roll_lite.report.records import pack

pytestmark = [pytest.mark.slow, needs_chromium]
VIEWS = ("#overview", "#curves", "#time", "#rollouts")


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory):
    browser = Browser(str(tmp_path_factory.mktemp("profile")))
    yield browser
    browser.close()


@pytest.fixture
def browser(shared_browser):
    shared_browser.errors.clear()
    shared_browser.resize(1280, 900)
    yield shared_browser
    shared_browser.run("try { localStorage.clear() } catch {}")  # not of about:blank
    assert shared_browser.errors == []


def write(*folders):
    assert main([*map(str, folders), "--out", str(folders[0] / "page.html")]) == 0
    return f"file://{folders[0]}/page.html"


@pytest.fixture
def address(tmp_path, tiny_folder):
    return write(make_run(tmp_path / "a", model=str(tiny_folder)))


def listed(browser):
    """Replies of the listed samples."""
    browser.wait("!document.querySelector('#about').textContent.includes('Reading')")
    return browser.texts(".row .start")


def set_filter(browser, name, value):
    """Fill in a field of the filters, or check its box."""
    field = f"document.querySelector('[data-filter={name}]')"
    part = "checked" if isinstance(value, bool) else "value"
    browser.run(f"{field}.{part} = {json.dumps(value)}; {field}.dispatchEvent(new Event('change'))")


@pytest.mark.parametrize("width", [1400, 390])
def test_every_view_opens_without_errors_and_fits(browser, tmp_path, tiny_folder, width):
    long = "very_long_" * 20
    first = make_run(tmp_path / "a", model=str(tiny_folder), data=[long])
    rows = [metrics(step) | {f"loss/{long}": step} for step in (1, 2, 3, 4)]
    write_lines(first / "metrics.jsonl", rows)
    row = sample(4, 0, prompt_id=long, reply=long, domain=long, reason=long, end=long)
    write_lines(first / "rollouts" / "step_00004.jsonl", [row, row | {"index": 1}])
    browser.resize(width, 844)
    browser.open(write(first, make_run(tmp_path / "b", lr=0.2)))
    for theme in ("light", "dark"):
        browser.wait(f"document.documentElement.dataset.theme === '{theme}'")
        for view in (*VIEWS, "#sample/0/step_00004/0", "#group/0/step_00004/0"):
            browser.go(view)
            browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
            assert len(browser.texts("main > *")) >= 2
            assert browser.run("document.documentElement.scrollWidth") <= width, view
        browser.run("document.getElementById('theme').click()")


def test_a_table_of_runs_is_sorted_by_a_click_on_a_title(browser, tmp_path):
    steps = {"a": 2, "b": 4, "c": 3}
    for name, num_steps in steps.items():
        make_run(tmp_path / "runs" / name, num_steps=num_steps)
    browser.open(write(tmp_path / "runs"))
    for title, names in (("step", "acb"), ("step", "bca"), ("run", "abc"), ("reward/mean", "acb")):
        buttons = "[...document.querySelectorAll('#runs button')]"
        browser.run(f"{buttons}.find((b) => b.textContent.startsWith('{title}')).click()")
        shown = browser.texts("#runs tr td:first-child")
        assert [text[-1] for text in shown] == [*names]
    heights = "[...document.querySelectorAll('#runs tr')].map(row => row.clientHeight)"
    assert max(browser.run(heights)) < 40  # one line, however many columns there are


def test_two_samples_are_side_by_side_and_the_token_is_marked(browser, tmp_path, tiny_folder):
    runs = [RunFolder(make_run(tmp_path / name, model=str(tiny_folder))) for name in "ab"]
    samples = sample(3, 0, reply=HOSTILE), sample(3, 0, token_ids=[5, 6, 7, 9, 9])
    write_two_samples(runs, samples, tmp_path / "apart.html", HOSTILE, 3)
    browser.open(f"file://{tmp_path}/apart.html")
    assert len(browser.texts(".side")) == 2
    marked = "[...document.querySelectorAll('.apart')].map((token) => token.title.split(',')[0])"
    assert browser.run(marked) == ["token 8", "token 9"]
    assert browser.run("window.hacked") is None


def test_tiles_come_first_and_facts_are_folded(browser, address):
    browser.open(address)
    assert browser.texts("main > :first-child .tile .value") == ["0.5714", "0.4", "4 of 6"]
    assert browser.texts(".tile .more") == [
        "0.1429 at first",
        "eval/pass@1, step 4; 0.2 at first",
        "about 4 s left",
    ]
    assert browser.run("document.querySelector('progress').value") == pytest.approx(4 / 6)
    tops = [
        browser.run(f"document.querySelector('{part}').getBoundingClientRect().top")
        for part in (".tiles", ".charts", "details")
    ]
    assert tops == sorted(tops)
    assert browser.run("[...document.querySelectorAll('details')].every(d => !d.open)")


@pytest.mark.parametrize("scale", [1, 0.5])
def test_the_reward_of_evaluations_is_shown_unless_it_is_the_pass_rate(browser, tmp_path, scale):
    folder = make_run(tmp_path / "a")
    rows = [metrics(step) for step in (2, 4)]
    rows = [row | {"eval/reward": scale * row["eval/pass@1"]} for row in rows]
    write_lines(folder / "metrics.jsonl", rows)
    browser.open(write(folder))
    assert len(browser.texts('figure[data-metric="eval/reward"]')) == (scale != 1)


@pytest.mark.parametrize("width", [1400, 390])
def test_charts_are_drawn_in_pixels_and_fill_their_box(browser, address, width):
    browser.resize(width, 844)
    browser.open(address)
    figure = "document.querySelector('figure[data-metric=\"eval/pass@1\"]')"
    browser.wait(f"!!{figure}.querySelector('svg path')")
    assert browser.texts('figure[data-metric="eval/pass@1"] .readout') == ["0.4  "]
    ticks = browser.run(f"[...{figure}.querySelectorAll('text')].map(t => t.textContent)")
    assert ticks[:6] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]  # a share
    text = f"{figure}.querySelector('svg text')"
    assert browser.run(f"getComputedStyle({text}).fontSize") == "11px"
    assert browser.run(f"{figure}.querySelector('svg').getScreenCTM().a") == 1
    box, svg = (
        browser.run(f"{node}.getBoundingClientRect().toJSON()")
        for node in (figure, f"{figure}.querySelector('svg')")
    )
    assert box["bottom"] - svg["bottom"] < 10 and svg["width"] > box["width"] - 30


def test_small_shares_have_an_axis_of_their_own(browser, tmp_path):
    folder = make_run(tmp_path / "a")
    rows = [metrics(step) | {"mismatch/outside": step / 1000} for step in (1, 2, 3, 4)]
    write_lines(folder / "metrics.jsonl", rows)
    browser.open(write(folder) + "#curves/mismatch%2Foutside")
    browser.wait("!!document.querySelector('figure.chosen svg path')")
    ticks = browser.run(
        "[...document.querySelectorAll('figure.chosen svg text')].map(t => t.textContent)"
    )
    assert ticks[:5] == ["0", "0.001", "0.002", "0.003", "0.004"]


def test_constant_curves_are_hidden_until_a_click(browser, address):
    browser.open(address + "#curves")

    def shown():
        names = "[...document.querySelectorAll('figure')].map(f => f.dataset.metric)"
        return set(browser.run(names))

    assert {"reward/mean", "loss/entropy"} <= shown()
    assert not {"loss/grad_norm", "time/train"} & shown()
    lines = browser.texts(".constants")
    assert "show 1 constant curve loss/grad_norm 1" in lines
    assert "show 3 constant curves time/step 1.5, time/rollout 1, time/train 0.5" in lines
    browser.run(
        "[...document.querySelectorAll('.constants button')].forEach(button => button.click())"
    )
    assert {"loss/grad_norm", "time/train"} <= shown() and not browser.texts(".constants")
    browser.open(address + "#curves/time%2Ftrain")  # a link shows its curve
    assert "time/train" in shown()


def test_pins_and_folded_sections_are_remembered(browser, address):
    browser.open(address + "#curves")
    titles = browser.texts("h2")
    browser.run("document.querySelector('[data-metric=\"loss/entropy\"] .pin').click()")
    browser.run("document.querySelectorAll('summary')[1].click()")
    for _ in range(2):
        assert browser.texts("h2")[:2] == ["Pinned", titles[0]]
        open_sections = "[...document.querySelectorAll('details')].map(d => d.open)"
        assert browser.run(open_sections) == [True, False] + [True] * (len(titles) - 1)
        assert browser.texts("details:first-child figcaption span:nth-child(2)") == ["loss/entropy"]
        browser.open(address + "#curves")
    browser.go("#overview")
    first = "document.querySelector('figure').dataset.metric"
    assert browser.run(first) == "loss/entropy"
    browser.run("document.querySelector('.pin').click()")
    assert browser.run(first) == "reward/mean"


def test_curves_have_the_values_of_the_metrics(browser, tmp_path):
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", num_steps=3, lr=0.2)
    browser.open(write(first, second) + "#curves/reward%2Fmean")
    figure = "document.querySelector('figure.chosen')"
    browser.wait(f"!!{figure}?.querySelector('svg path')")
    box = browser.run(f"(({figure}.querySelector('svg')).getBoundingClientRect()).toJSON()")
    grid = f"{figure}.querySelector('.grid')"
    left, right = (
        box["x"] + float(browser.run(f"{grid}.getAttribute('{end}')")) for end in ("x1", "x2")
    )
    assert browser.texts("figure.chosen .readout b") == ["0.5714", "0.4286"]  # the last ones
    for step in (1, 2, 3, 4):
        x = left + (right - left) * (step - 1) / 3
        browser.move(x, box["y"] + 50)
        told = browser.texts("figure.chosen .readout")[0].split("  ")
        assert told[0] == f"step {step}: {float(f'{step / 7:.4g}')}"
        assert told[1] == f"step {min(step, 3)}: {float(f'{min(step, 3) / 7:.4g}')}"
    assert "Domain odd" in browser.texts("h2")
    browser.go("#overview")
    assert browser.texts("#differences td") == ["lr", "0.1", "0.2"]


def test_the_bars_are_the_recorded_seconds(browser, address):
    browser.open(address + "#time")
    bars = "document.querySelectorAll('#bars rect[data-step=\"3\"]')"
    pairs = f"[...{bars}].map(bar => [bar.dataset.part, Number(bar.getAttribute('height'))])"
    heights = dict(browser.run(pairs))
    assert heights["time/rollout"] == pytest.approx(2 * heights["time/train"], rel=1e-6)
    browser.wait("document.querySelectorAll('#timeline svg rect').length >= 8 * 4")


def test_ranks_have_lanes(browser, address):
    """Two engines, and a trainer beside the first; samples take turns between the engines."""
    browser.open(address + "#time/0/3")
    lanes = "[...document.querySelectorAll('#timeline [data-rank]')]"
    browser.wait(f"{lanes}.length > 0")
    found = browser.run(
        f"{lanes}.map(b => [b.dataset.rank, b.dataset.state, Number(b.getAttribute('width'))])"
    )
    assert [(rank, state) for rank, state, _ in found] == [
        ("0", "train"), ("0", "generating"), ("1", "generating"),
    ]  # fmt: skip
    assert found[1][2] == pytest.approx(found[2][2]) == pytest.approx(found[0][2] * 0.3 / 0.5)


def test_filters_find_what_they_must(browser, address):
    browser.open(address + "#rollouts/0/step_00003")
    assert listed(browser) == [f"answer {n} of step 3" for n in range(8)]
    set_filter(browser, "text", "ANSWER 5")
    assert listed(browser) == ["answer 5 of step 3"]
    set_filter(browser, "everywhere", True)
    assert listed(browser) == [f"answer 5 of step {step}" for step in (1, 2, 3, 4)]
    set_filter(browser, "text", "")
    set_filter(browser, "domain", "odd")
    set_filter(browser, "least", "2")
    assert listed(browser) == [f"answer 5 of step {step}" for step in (1, 2, 3, 4)]
    set_filter(browser, "least", "")
    set_filter(browser, "domain", "")
    set_filter(browser, "text", "boom")
    assert browser.texts(".row .reward") == ["failed"]
    browser.run("document.querySelector('.row').click()")
    assert browser.texts(".error") == ["Traceback: boom"]


def test_tokens_tell_their_recorded_numbers(browser, address, tiny_folder):
    import transformers

    browser.open(address + "#rollouts/0/step_00003")
    browser.wait("document.querySelectorAll('.row').length === 8")
    browser.run("document.querySelectorAll('.row')[2].click()")
    titles = browser.run("[...document.querySelectorAll('.token')].map(t => t.title)")
    parts = [dict(part.rsplit(" ", 1) for part in title.split(", ")) for title in titles]
    assert [float(p["logprob"]) for p in parts] == [-0.125, -2.5, -0.03125]
    assert [p["version"] for p in parts] == ["3", "3", "4"]
    assert [p["advantage"] for p in parts] == ["1", "1", "1"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    assert browser.texts(".token") == [tokenizer.decode([i]) for i in (7, 8, 9)]


def test_what_newer_runs_record_is_shown(browser, tmp_path):
    """Packed numbers, entropies, the reason, and the command that repeats a sample."""
    told = {
        "visit": 2, "seed": 5, "reason": "extracted 41, expected <b>42</b>",
        "logprobs": pack([-0.1, -2.5, -0.03125]), "entropies": pack([0.3, 1.5, 0.0]),
        "mismatches": pack([0.0, 0.0625, 3.0]),
        "advantages": pack([0.5, -0.5, 0.25]), "prompt_id": "it's/train/0",
    }  # fmt: skip
    folder = make_run(tmp_path / "a", num_steps=1)
    broken = sample(1, 2, logprobs="no base64!")
    write_lines(folder / "rollouts" / "step_00001.jsonl", [sample(1, 0, **told), broken])
    browser.open(write(folder) + "#sample/0/step_00001/0")
    browser.wait("!!document.querySelector('#sample')")
    titles = browser.run("[...document.querySelectorAll('.token')].map(t => t.title)")
    parts = [dict(part.rsplit(" ", 1) for part in title.split(", ")) for title in titles]
    assert [p["logprob"] for p in parts] == ["-0.1", "-2.5", "-0.03125"]
    assert [p["entropy"] for p in parts] == ["0.3", "1.5", "0"]
    assert [p["mismatch"] for p in parts] == ["0", "0.0625", "3"]
    assert [p["advantage"] for p in parts] == ["0.5", "-0.5", "0.25"]
    assert browser.texts("#reason") == ["reason: extracted 41, expected <b>42</b>"]
    (command,) = browser.texts("#replay")
    assert shlex.split(command) == [
        "roll-lite", "replay", str(folder), "--sample", "1/it's/train/0/0",
    ]  # fmt: skip
    choose = "document.querySelector('#sample select')"
    browser.run(f"{choose}.value = 'entropy'; {choose}.dispatchEvent(new Event('change'))")
    shades = browser.run(
        "[...document.querySelectorAll('.token')].map(t => t.style.backgroundColor)"
    )
    assert len(set(shades)) == 3 and all("40, 90, 220" in shade for shade in shades)
    browser.run(f"{choose}.value = 'mismatch'; {choose}.dispatchEvent(new Event('change'))")
    assert browser.texts("#scale") == ["0.001 or less  1 or more"]
    colours = browser.run(
        "[...document.querySelectorAll('.token')].map(t => t.style.backgroundColor)"
    )
    opacities = [float(re.findall(r"[\d.]+", colour)[3]) for colour in colours]
    share = (math.log10(0.0625) + 3) / 3
    assert opacities == pytest.approx([0, 0.85 * share, 0.85], abs=1e-2)
    browser.press("n")  # it has no entropies
    browser.wait("document.querySelector('#conversation').textContent.includes('answer 2')")
    off = browser.run(f"[...{choose}.options].filter(o => o.disabled).map(o => o.textContent)")
    assert off == [
        "logprob (not recorded)", "mismatch (not trained on)", "entropy (not trained on)",
    ]  # fmt: skip
    assert not browser.texts("#replay") and not browser.texts("#reason")


def choose(browser, field, value):
    node = f"document.querySelector('{field}')"
    browser.run(f"{node}.value = '{value}'; {node}.dispatchEvent(new Event('change'))")


def test_samples_are_sorted(browser, tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1)
    rows = [
        sample(1, 0, reward=0.5, advantages=0.25),
        sample(1, 1, reward=2.0, advantages=pack([-1.0, -2.0, 0.0])),
        sample(1, 2, reward=-1.0, advantages=0.75),
        sample(1, 3, reward=None, state="failed", turns=[], tokens=9, advantages=None),
    ]
    write_lines(folder / "rollouts" / "step_00001.jsonl", rows)
    browser.open(write(folder) + "#rollouts/0/step_00001")
    orders = {
        "recorded": [0, 1, 2, 3], "reward up": [2, 0, 1, 3], "reward down": [1, 0, 2, 3],
        "tokens down": [3, 0, 1, 2], "tokens up": [0, 1, 2, 3],
        "advantage down": [2, 0, 1, 3], "advantage up": [1, 0, 2, 3],
    }  # fmt: skip
    for order, numbers in orders.items():
        choose(browser, "#sort", order)
        assert listed(browser) == [f"answer {n} of step 1" for n in numbers], order
    assert dict(zip(browser.texts("#facts dt"), browser.texts("#facts dd"), strict=True)) == {
        "state": "done", "reward": "2", "domain": "odd", "advantage": "-1", "tokens": "3",
        "turns": "1", "part format": "0.25",
    }  # fmt: skip


def test_effects_are_shown_and_sorted(browser, tmp_path):
    """Those of a group, and those of samples."""
    folder = make_run(tmp_path / "a", num_steps=2)
    for step in (1, 2):
        rows = [sample(step, number, visit=0) for number in (0, 1, 4, 5, 8)]
        write_lines(folder / "rollouts" / f"step_0000{step}.jsonl", rows)
    group = {"prompt_id": "p1", "visit": 0, "effect": -0.5}
    other = {"prompt_id": "p0", "visit": 0, "effect": 0.0}
    write_lines(folder / "influence_00001.jsonl", [group, other])
    samples = [{**group, "index": index, "effect": index - 0.5} for index in (0, 1)]
    write_lines(folder / "influence_00002.jsonl", samples)
    address = write(folder)
    browser.open(address + "#rollouts/0/step_00001")
    assert len(listed(browser)) == 5
    assert browser.texts(".row .effect") == ["no effect", "no effect", "hurt 0.5", "hurt 0.5"]
    browser.go("#rollouts/0/step_00002")
    choose(browser, "#sort", "effect down")
    assert listed(browser)[:2] == ["answer 5 of step 2", "answer 4 of step 2"]
    assert browser.texts(".row .effect") == ["helped 0.5", "hurt 0.5"]


def test_the_histogram_shows_and_filters_rewards(browser, tmp_path):
    folder = make_run(tmp_path / "a", num_steps=2)
    rows = [sample(2, number, reward=number / 100) for number in range(100)]
    write_lines(folder / "rollouts" / "step_00002.jsonl", rows)
    browser.open(write(folder) + "#rollouts/0/step_00001")
    listed(browser)
    bins = "[...document.querySelectorAll('.bin')].map(bin => bin.title)"
    assert browser.run(bins) == [
        "3 samples of reward 0", "3 samples of reward 1", "2 samples of reward 2",
    ]  # fmt: skip
    browser.run("document.querySelectorAll('.bin')[1].click()")
    assert listed(browser) == [f"answer {n} of step 1" for n in (1, 4, 7)]
    assert len(browser.texts(".bin")) == 3 and len(browser.texts(".bin.left-out")) == 2
    browser.run("document.querySelectorAll('.bin')[1].click()")
    assert len(listed(browser)) == 8
    browser.go("#rollouts/0/step_00002")
    listed(browser)
    titles = browser.run(bins)
    assert len(titles) == 20 and sum(int(title.split()[0]) for title in titles) == 100
    assert "mean 0.495" in browser.texts("#histogram")[0]


def test_a_group_is_shown_side_by_side(browser, address):
    browser.open(address + "#rollouts/0/step_00003")
    set_filter(browser, "least", "1")
    listed(browser)
    browser.run("document.querySelector('.group button').click()")
    browser.wait("!!document.querySelector('#group')")
    assert browser.texts(".column .text") == [f"answer {n} of step 3" for n in range(4)]
    assert browser.texts(".column .reward") == ["0", "1", "2", "0"]
    assert browser.texts(".column .faint") == [
        f"advantage {a}, 3 tokens" for a in (-1, 0, 1, -1)
    ]  # fmt: skip
    tops = "[...document.querySelectorAll('.column')].map(c => c.getBoundingClientRect().top)"
    assert len(set(browser.run(tops)[:3])) == 1
    browser.open(address + browser.run("location.hash"))
    browser.wait("document.querySelectorAll('.column').length === 4")
    browser.run("document.querySelectorAll('.column a')[2].click()")
    browser.wait("!!document.querySelector('#sample')")
    assert browser.texts("#conversation .assistant .text") == ["answer 2 of step 3"]


def test_colours_of_tokens_are_graded_and_have_a_scale(browser, address):
    browser.open(address + "#sample/0/step_00003/0")
    browser.wait("!!document.querySelector('#sample')")
    shades = "[...document.querySelectorAll('{} ')].map(n => n.style.backgroundColor)"
    assert len(set(browser.run(shades.format(".token")))) == 3
    assert len(set(browser.run(shades.format("#scale .shade")))) == 9
    assert browser.texts("#scale") == ["0  -6 or less"]
    choose(browser, "#sample select", "advantage")
    assert browser.texts("#scale") == ["-1  1"]
    tokens, scale = (set(browser.run(shades.format(part))) for part in (".token", "#scale .shade"))
    assert len(tokens) == 1 and tokens <= scale
    choose(browser, "#sample select", "version")
    assert browser.texts("#scale .shade") == ["3", "4"]


def test_markdown_is_shown_if_asked_and_runs_nothing(browser, tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1)
    reply = (
        "# Title\nsome **bold `code`** and *slanted* \\x [a](javascript:alert(1))\n\n"
        "- one\n- two <b>\n\n3. three\n> said\n```py\n**raw**\n```\n" + HOSTILE
    )
    write_lines(folder / "rollouts" / "step_00001.jsonl", [sample(1, 0, reply=reply)])
    browser.open(write(folder) + "#sample/0/step_00001/0")
    browser.wait("!!document.querySelector('#sample')")
    text = "#conversation .assistant .text"
    assert browser.texts(text)[0].startswith(reply[:100])
    browser.run("document.querySelector('#markdown').click()")
    found = {
        tag: browser.texts(f"{text} {tag}")
        for tag in ("h4", "b", "code", "i", "ul li", "ol li", "blockquote", "pre", "a", "img")
    }
    assert found == {
        "h4": ["Title"], "b": ["bold code"], "code": ["code"], "i": ["slanted"],
        "ul li": ["one", "two <b>"], "ol li": ["three"], "blockquote": ["said"],
        "pre": ["**raw**"], "a": [], "img": [],
    }  # fmt: skip
    assert "\\x [a](javascript:alert(1))" in browser.texts(text)[0]
    assert browser.run(f"document.querySelector('{text} ol').start") == 3
    assert browser.run("window.hacked") is None


def show_markdown(browser, tmp_path, reply):
    """Open a sample with this reply, as Markdown; returns where its text is."""
    folder = make_run(tmp_path / "a", num_steps=1)
    write_lines(folder / "rollouts" / "step_00001.jsonl", [sample(1, 0, reply=reply)])
    browser.open(write(folder) + "#sample/0/step_00001/0")
    browser.wait("!!document.querySelector('#sample')")
    browser.run("document.querySelector('#markdown').click()")
    return "#conversation .assistant .text"


FORMULAS = {  # in MathML, without attributes
    r"$\frac{a}{b}$": "<mfrac><mi>a</mi><mi>b</mi></mfrac>",
    r"$\frac12$": "<mfrac><mn>1</mn><mn>2</mn></mfrac>",
    r"\(x_{1}^2\)": "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>",
    r"$x^10$": "<msup><mi>x</mi><mn>1</mn></msup><mn>0</mn>",  # as LaTeX reads it
    r"$\sqrt[3]{8}-\sqrt x$":
        "<mroot><mn>8</mn><mn>3</mn></mroot><mo>−</mo><msqrt><mi>x</mi></msqrt>",
    r"$\alpha \le 10{,}000$": "<mi>α</mi><mo>≤</mo><mn>10,000</mn>",
    r"$f'$": "<msup><mi>f</mi><mo>′</mo></msup>",
    r"$$\sum_{i=1}^n i$$":
        "<munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover>"
        "<mi>i</mi>",
    r"\[\left(\frac{1}{x}\right]\].":
        "<mrow><mo>(</mo><mfrac><mn>1</mn><mi>x</mi></mfrac><mo>]</mo></mrow><mtext>.</mtext>",
    r"$50\% \text{ if } x \in \mathbb{R}$":
        "<mn>50</mn><mi>%</mi><mtext>&nbsp;if&nbsp;</mtext><mi>x</mi><mo>∈</mo><mi>ℝ</mi>",
    r"$\boxed{42}$": "<mrow><mn>42</mn></mrow>",
    "\\[\n\\begin{aligned}\na &= 1 \\\\\n  &= 2\n\\end{aligned}\n\\]":
        "<mtable><mtr><mtd><mi>a</mi></mtd><mtd><mo>=</mo><mn>1</mn></mtd></mtr>"
        "<mtr><mtd></mtd><mtd><mo>=</mo><mn>2</mn></mtd></mtr></mtable>",
}  # fmt: skip
NO_FORMULAS = (
    "$5 and $6", "from $5-$10, or 3$", "$5 per apple$", r"$\unknown{x}$", r"$\frac{1}{2$", "$x}$",
    r"$\text{a $ b}$", r"\(x", "$$x$", r"\$x\$", "`$x$`", r"$\begin{matrix} 1 \end{pmatrix}$",
    "$x^$", "$" + 50 * "{" + 50 * "}" + "$", "$x" + 50 * r"\over x" + "$",
    r"$\constructor$", "$<script>\u202e$",
)  # fmt: skip


@pytest.mark.parametrize("width", [1400, 390])
def test_formulas_are_mathml(browser, tmp_path, width):
    browser.resize(width, 844)
    reply = "\n\n".join([*FORMULAS, "$" + "+".join(f"x_{{{n}}}" for n in range(80)) + "$"])
    text = show_markdown(browser, tmp_path, reply)
    tags = r"/<(\w+)[^>]*>/g, '<$1>'"
    found = browser.run(
        f"[...document.querySelectorAll('{text} math')].map(m => m.innerHTML.replace({tags}))"
    )
    for shown, (source, expected) in zip(found, FORMULAS.items(), strict=False):
        assert shown == expected, source
    assert len(found) == len(FORMULAS) + 1  # the last one is wide
    assert browser.run("document.documentElement.scrollWidth") <= width
    top, bottom = (
        browser.run(f"document.querySelector('{text} mfrac > mi:{part}-child').{box}")
        for part, box in (("first", "getBoundingClientRect().bottom"),
                          ("last", "getBoundingClientRect().top"))
    )  # fmt: skip
    assert top <= bottom + 1


def test_what_is_no_formula_or_not_understood_stays_its_source(browser, tmp_path):
    text = show_markdown(browser, tmp_path, "\n\n".join(NO_FORMULAS))
    assert browser.texts(f"{text} math") == []
    shown = [source.strip("`").replace("\u202e", "U+202E") for source in NO_FORMULAS]
    assert browser.texts(f"{text} p") == shown


HOSTILE_MARKS = (
    "\\", "$", "$x$ ", "$$x$$\n\n", r"\(", "\\[\n", "{", r"$\frac{", "**a ", "a`b``c",
    "\\begin{align}\n", "- a\n1. a\n",
)  # fmt: skip


@pytest.mark.parametrize("mark", HOSTILE_MARKS)
def test_a_megabyte_of_marks_becomes_a_bounded_number_of_formulas(browser, address, mark):
    """Shown whole, as a live page shows it; quadratic work would not end within the limit."""
    browser.open(address)
    reply = f"{json.dumps(mark)}.repeat({2**20 // len(mark)})"
    formulas, length = browser.run(
        f"{{ const node = el('div', {{}}, markdown({reply}));"
        "[node.querySelectorAll('math *').length, node.textContent.length] }"
    )
    assert formulas <= 20_000
    has_formulas = mark.startswith(("$x", "$$x"))
    assert length >= 200_000 and (formulas > 5_000) == has_formulas


def test_a_phone_shows_the_sample_above_the_fold(browser, address):
    browser.resize(390, 844)
    browser.open(address + "#rollouts/0/step_00003")
    listed(browser)
    assert not browser.texts("#sample")  # the list comes first
    browser.run("document.querySelectorAll('.row')[5].click()")
    bottom = "document.querySelector('{}').getBoundingClientRect().bottom"
    assert browser.run(bottom.format("#conversation .assistant")) < 700
    assert browser.run(bottom.format("#sample")) < browser.run(bottom.format("#list"))
    assert browser.run("scrollY") == 0


def test_keys_and_links_open_samples(browser, address):
    browser.open(address + "#rollouts/0/step_00002")
    listed(browser)

    def shown():
        return browser.texts("#conversation .assistant .text")

    assert shown() == ["answer 0 of step 2"]
    for key, reply in (("n", 1), ("n", 2), ("p", 1), ("f", 3), ("f", 6)):
        browser.press(key)
        assert shown() == [f"answer {reply} of step 2"]  # rewards 0, 1, 2, 0, 1, 2, 0
    place = browser.run("location.hash")
    browser.open(address + place)
    browser.wait("!!document.querySelector('#sample')")
    assert shown() == ["answer 6 of step 2"]


def test_turns_are_a_conversation(browser, tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1)
    said = [("user", "go"), ("assistant", "left"), ("user", "a wall"), ("assistant", "right")]
    turn = {"read": 1, "sampled": 1, "finish": "stop", "versions": [[0, 1]], "state": ""}
    changes = {
        "transcript": [{"role": role, "content": text} for role, text in said],
        "turns": [turn | {"reward": 0.5}, turn | {"reward": -0.25}],
        "token_ids": [1, 2, 3, 4], "logprobs": pack([-1.0, -2.0]), "sequences": [[1], [0]],
    }  # fmt: skip
    write_lines(folder / "rollouts" / "step_00001.jsonl", [sample(1, 0, **changes)])
    browser.open(write(folder) + "#sample/0/step_00001/0")
    browser.wait("!!document.querySelector('#sample')")
    assert browser.texts("#conversation .text") == [text for _, text in said]
    assert browser.texts("#conversation .assistant .role") == [
        "assistant, turn 1: reward 0.5", "assistant, turn 2: reward -0.25",
    ]  # fmt: skip
    titles = browser.run("[...document.querySelectorAll('.token')].map(t => t.title)")
    assert [t.split(", ")[:3] for t in titles] == [
        ["token 2", "turn 2", "logprob -1"], ["token 4", "turn 1", "logprob -2"],
    ]  # fmt: skip


def test_hostile_text_is_shown_and_runs_nothing(browser, tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1, data=[HOSTILE])
    hostile = sample(
        1, 0, reply=HOSTILE, prompt_id=HOSTILE, domain=HOSTILE, error=HOSTILE, extra={"a": HOSTILE},
        parts={HOSTILE: 1.0}, messages=[{"role": HOSTILE, "content": HOSTILE}],
    )  # fmt: skip
    rows = [hostile, sample(1, 1, reply="<b>" + "x" * 1_000_000)]
    write_lines(folder / "rollouts" / "step_00001.jsonl", rows)
    write_lines(folder / "metrics.jsonl", [metrics(1) | {f"reward/{HOSTILE}": 1.0}])
    browser.open(write(folder))
    for view in VIEWS:
        browser.go(view)
    browser.wait("document.querySelectorAll('.row').length === 2")
    for row in (1, 0):
        browser.run(f"document.querySelectorAll('.row')[{row}].click()")
    shown = browser.texts("#conversation .assistant .text")[0]
    assert shown.startswith("<script>window.hacked = 1</script><img src=x onerror=")
    assert "U+202Eabc" in shown and "U+0000" in shown and "U+D800" in shown
    assert browser.run("window.hacked") is None
    assert browser.run("document.querySelectorAll('main img, main script').length") == 0
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("files", [("metrics.jsonl",), ("config.json", "events.jsonl")])
def test_a_folder_without_some_files_opens(browser, tmp_path, files):
    whole, folder = make_run(tmp_path / "whole"), tmp_path / "part"
    folder.mkdir()
    for name in files:
        (folder / name).write_bytes((whole / name).read_bytes()[:-5])
    browser.open(write(folder))
    for view in VIEWS:
        browser.go(view)
    browser.go("#overview")
    notes = browser.texts(".note")
    assert any("rollouts/ has no samples" in note for note in notes)
    assert sum("is missing" in note for note in notes) == 3 - len(files)


def test_the_live_page_follows_the_run(browser, tmp_path):
    folder = make_run(tmp_path / "a")
    server, address = make_server([RunFolder(folder)])
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        browser.open(address)
        assert "step 4 of 6" in browser.texts("#what-ran")[0]
        write_lines(folder / "rollouts" / "step_00005.jsonl", [sample(5, 0)])
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(5)) + "\n")
        browser.wait("document.querySelector('#what-ran').textContent.includes('step 5 of 6')")
        rows = "document.querySelectorAll('.row .start').length"  # when the server has sent them
        browser.go("#rollouts/0/step_00005")
        browser.wait(rows, lambda number: number == 1)
        assert listed(browser) == ["answer 0 of step 5"]
        browser.go("#rollouts/0/step_00001")
        browser.wait(rows, lambda number: number == 8)
        browser.call("Page.navigate", url="about:blank")  # it asks the server no more
    finally:
        server.shutdown()
        server.server_close()


def test_a_large_run_stays_small(browser, tmp_path):
    """1,000 steps of 512 samples: what writing the page, and the page itself, take of memory."""
    folder = make_run(tmp_path / "a", num_steps=1)
    write_lines(folder / "metrics.jsonl", [
        metrics(step) | {f"loss/m{i}": step / (i + 1) for i in range(50)} for step in range(1, 1001)
    ])  # fmt: skip
    turn = {"read": 2, "sampled": 160, "versions": [[0, 1]]}
    packed = pack([-0.12345] * 160)
    tokens = {"token_ids": [5] * 162, "logprobs": packed, "entropies": packed, "turns": [turn]}
    first = folder / "rollouts" / "step_00001.jsonl"
    write_lines(first, [sample(1, number, **tokens) for number in range(512)])
    for step in range(2, 1001):
        (folder / "rollouts" / f"step_{step:05d}.jsonl").hardlink_to(first)
    # Its own peak: what the system tells of a child includes the process that forked it.
    program = (
        "import sys; from roll_lite.report.__main__ import main; assert main(sys.argv[1:]) == 0; "
        "print(open('/proc/self/status').read())"
    )
    command = [sys.executable, "-c", program, folder, "--out", folder / "page.html"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(re.search(r"VmHWM:\s+(\d+) kB", said)[1]) / 1024 < 500
    assert (folder / "page.html").stat().st_size < 25e6
    browser.open(f"file://{folder}/page.html")
    browser.wait("document.querySelectorAll('figure svg path').length >= 3")
    browser.go("#rollouts")
    browser.wait("document.querySelectorAll('.row').length > 100")
    assert "are left out" in browser.texts("#about")[0]
    assert renderer_megabytes(browser) < 500
