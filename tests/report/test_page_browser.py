"""The page in a real browser: it draws what was recorded, finds samples, and runs no text."""

import json
import re
import shlex
import subprocess
import sys
from threading import Thread

import pytest
from support.chromium import Browser, needs_chromium, renderer_megabytes
from support.made_runs import HOSTILE, make_run, metrics, sample, write_lines

from roll_lite.report.__main__ import main
from roll_lite.report.page import make_server
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


@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_opens_without_errors_and_fits(browser, address, width):
    browser.resize(width, 800)
    browser.open(address)
    for theme in ("light", "dark"):
        browser.wait(f"document.documentElement.dataset.theme === '{theme}'")
        for view in VIEWS:
            browser.go(view)
            assert len(browser.texts("main > *")) >= 2
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
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


def test_curves_have_the_values_of_the_metrics(browser, tmp_path):
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", num_steps=3, lr=0.2)
    browser.open(write(first, second) + "#curves/reward%2Fmean")
    figure = "document.querySelector('figure.chosen')"
    browser.wait(f"!!{figure}?.querySelector('svg path')")
    box = browser.run(f"(({figure}.querySelector('svg')).getBoundingClientRect()).toJSON()")
    left, right = (box["x"] + box["width"] * x / 420 for x in (46, 412))
    for step in (1, 2, 3, 4):
        x = left + (right - left) * (step - 1 + 0.12) / (3 + 0.24)  # 4% of margin on both sides
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
    """Packed numbers, entropies, the grader's reason, and the command that repeats a sample."""
    told = {
        "visit": 2, "seed": 5, "reason": "extracted 41, expected <b>42</b>",
        "logprobs": pack([-0.1, -2.5, -0.03125]), "entropies": pack([0.3, 1.5, 0.0]),
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
    assert [p["advantage"] for p in parts] == ["0.5", "-0.5", "0.25"]
    assert browser.texts("#reason") == ["grader: extracted 41, expected <b>42</b>"]
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
    browser.press("n")  # it has no entropies
    browser.wait("document.querySelector('#conversation').textContent.includes('answer 2')")
    off = browser.run(f"[...{choose}.options].filter(o => o.disabled).map(o => o.textContent)")
    assert off == ["logprob (not recorded)", "entropy (not trained on)"]
    assert not browser.texts("#replay") and not browser.texts("#reason")


def test_keys_and_links_open_samples(browser, address):
    browser.open(address + "#rollouts/0/step_00002")
    listed(browser)
    assert not browser.texts("#sample")

    def shown():
        return browser.texts("#conversation .assistant .text")

    for key, reply in (("n", 0), ("n", 1), ("n", 2), ("p", 1), ("f", 3), ("f", 6)):
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


@pytest.mark.parametrize("files", [(), ("metrics.jsonl",), ("config.json", "events.jsonl")])
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
        assert "step 4 of 6" in browser.texts("#overview")[0]
        write_lines(folder / "rollouts" / "step_00005.jsonl", [sample(5, 0)])
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(5)) + "\n")
        browser.wait("document.querySelector('#overview').textContent.includes('step 5 of 6')")
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
