"""The page's data are those of the folder, whatever the folder holds; the comparison's numbers."""

import html.parser
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from http.server import ThreadingHTTPServer
from itertools import pairwise
from threading import Thread

import pytest
from support.made_runs import HOSTILE, make_run, metrics, sample, write_lines

from roll_lite.report.__main__ import main
from roll_lite.report.overview import elapsed, overview, warnings
from roll_lite.report.page import choose_steps, make_server
from roll_lite.report.reader import RunFolder
from roll_lite.report.terminal import comparison


class Page(html.parser.HTMLParser):
    """Tags in order, and the text of the JSON element."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.policy, self._in_data, self.json = [], "", False, ""
        self.feed(text)
        self.data = json.loads(self.json)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        attributes = dict(attributes)
        self._in_data = attributes.get("id") == "data"
        if attributes.get("http-equiv"):
            self.policy = attributes["content"]

    def handle_data(self, text):
        self.json += text if self._in_data else ""

    def handle_endtag(self, tag):
        self._in_data = False


def page_of(*folders, options=()):
    assert main([*map(str, folders), *options]) == 0
    return Page((folders[0] / "report.html").read_text())


def test_the_page_holds_the_metrics_and_samples_of_the_folder(tmp_path):
    folder = make_run(tmp_path / "a")
    (run,) = page_of(folder).data["runs"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for name in {name for row in rows for name in row}:
        assert run["metrics"][name] == [row.get(name) for row in rows]
    assert run["metrics"]["seconds"] == [1.5, 3.5, 5.5, 7.5]  # time/step, then 2 s each
    assert run["meanings"]["time/step"].startswith("step s (seconds): the whole step")
    for name in ("step_00001", "step_00004"):
        lines = (folder / "rollouts" / f"{name}.jsonl").read_text().splitlines()
        samples = run["samples"][name]["samples"]
        assert [{k: v for k, v in s.items() if k != "at"} for s in samples] == list(
            map(json.loads, lines)
        )
    (lost,) = run["samples"]["dropped_00002"]["samples"]
    assert lost["why"] == "its reward raised" and lost["error"] == "Traceback: boom"
    assert run["notes"] == [
        "tokens are shown as numbers: the model's folder with its tokenizer is gone"
    ]


def test_tokens_have_the_texts_of_the_tokenizer(tiny_folder, tmp_path):
    import transformers

    folder = make_run(tmp_path / "a", num_steps=1, model=str(tiny_folder))
    (run,) = page_of(folder).data["runs"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    assert run["texts"] == {str(i): tokenizer.decode([i]) for i in (5, 6, 7, 8, 9)}


def test_hostile_text_stays_data(tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1, data=[HOSTILE])
    long = "<b>" * 400_000
    rows = [sample(1, 0, reply=HOSTILE, prompt_id=HOSTILE), sample(1, 1, reply=long)]
    write_lines(folder / "rollouts" / "step_00001.jsonl", rows)
    page, plain = page_of(folder), page_of(make_run(tmp_path / "b", num_steps=1))
    assert page.tags == plain.tags
    assert "default-src 'none'" in page.policy and "unsafe" not in page.policy
    (run,) = page.data["runs"]
    first, second = run["samples"]["step_00001"]["samples"]
    assert first["reply"] == first["prompt_id"] == run["options"]["data"][0] == HOSTILE
    assert second["reply"].startswith("<b>" * 6000)
    assert "1,180,000 more characters" in second["reply"] and len(second["reply"]) < 21_000


def test_values_that_are_not_finite_are_missing(tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1)
    rows = [metrics(1) | {"loss/loss": float("nan")}, metrics(2) | {"loss/loss": float("-inf")}]
    write_lines(folder / "metrics.jsonl", rows)
    assert page_of(folder).data["runs"][0]["metrics"]["loss/loss"] == [None, None]


def torn(folder):
    for path in [*folder.glob("*.jsonl"), *folder.glob("rollouts/*4.jsonl")]:
        path.write_bytes(b'\xff\xfe{"step": 1\n[1]\n' + path.read_bytes()[:-20])
    (folder / "config.json").write_text('{"model": "no')


def deep(folder):
    """Lines and options that json reads, and that what walks over them cannot."""
    nested = "[" * 900 + "]" * 900
    for path in [*folder.glob("*.jsonl"), *folder.glob("rollouts/*4.jsonl")]:
        path.write_text(f'{{"step": 1, "time": 0, "x": {nested}}}\n{path.read_text()}')
    (folder / "config.json").write_text(f'{{"model": {nested}}}')


def begun(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "metrics.jsonl").touch()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (torn, ["config.json cannot be read",
                "metrics.jsonl: broken lines that were skipped: 2",
                "metrics.jsonl: its last line is not complete"]),
        (deep, ["config.json cannot be read",
                "metrics.jsonl: broken lines that were skipped: 1",
                "events.jsonl: broken lines that were skipped: 1"]),
        (begun, ["config.json is missing", "metrics.jsonl has no complete line yet",
                 "events.jsonl is missing", "rollouts/ has no samples: see --rollouts-every"]),
    ],
)  # fmt: skip
def test_the_page_says_what_is_missing(tmp_path, change, told):
    folder = make_run(tmp_path / "a")
    change(folder)
    (run,) = page_of(folder).data["runs"]
    assert set(told) <= set(run["notes"])
    assert len(run["metrics"].get("step", [])) == {torn: 3, deep: 4, begun: 0}[change]
    assert run["starts"] == []


def test_a_folder_that_is_not_there_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert "is not a folder; name a run folder" in capsys.readouterr().err


def test_a_folder_of_runs_becomes_a_table_of_them_and_one_page(tmp_path, capsys):
    folders = [make_run(tmp_path / "runs" / name, lr=lr) for name, lr in (("a", 0.1), ("b/c", 0.2))]
    (folders[0] / "model").mkdir()
    (folders[0] / "model" / "config.json").write_text("{}")
    new = tmp_path / "runs" / "new"
    new.mkdir()
    config = {"steps": 6, "lr": 0.3, "model": f"{'x' * 40}/end", "starts": [], "recipe": "sft"}
    (new / "config.json").write_text(json.dumps(config))
    (tmp_path / "runs" / "notes").mkdir()
    page = page_of(tmp_path / "runs")
    assert [run["name"] for run in page.data["runs"]] == [*map(str, folders), str(new)]
    head, *lines = capsys.readouterr().out.splitlines()[:4]
    assert re.split("  +", head)[:5] == ["run", "recipe", "step", "running", "best evaluation"]
    rows = [re.split("  +", line) for line in lines]
    best = "eval/pass@1 0.4 at 4"
    assert [row[:6] for row in rows[:2]] == [
        [str(folder), "-", "4/6", "0:00:08", best, "0.5714"] for folder in folders
    ]
    assert rows[2][:5] == [str(new), "sft", "-", "-", "-"]
    options = dict(zip(re.split("  +", head), zip(*rows, strict=True), strict=True))
    assert options["lr"] == ("0.1", "0.2", "0.3")
    assert options["model"][2].startswith("...xxx") and options["model"][2].endswith("x/end")


def test_a_folder_without_runs_is_an_error(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    assert main([str(tmp_path)]) == 2
    assert "is not a run folder, and none is below it" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_samples_keep_to_their_budget_and_the_page_says_so(tmp_path):
    folder = make_run(tmp_path / "a", num_steps=60, num_samples=16)
    (run,) = page_of(folder, options=["--samples-mb", "0.1"]).data["runs"]
    chosen = {int(name[5:]) for name in run["samples"] if name.startswith("step")}
    assert {1, 58, 59, 60} <= chosen and 15 <= len(chosen) <= 24
    assert len(json.dumps(run["samples"], separators=(",", ":"))) < 102_000
    assert all(part["total"] == 16 for n, part in run["samples"].items() if n[0] == "s")
    assert any(0 < len(part["samples"]) < 16 for part in run["samples"].values())
    assert len(run["names"]) == 61  # all are named


def test_steps_are_chosen_evenly():
    assert choose_steps(range(1, 11)) == list(range(1, 11))
    chosen = choose_steps(range(1, 1001))
    assert chosen[-3:] == [998, 999, 1000] and len(chosen) <= 24
    assert {b - a for a, b in pairwise(chosen[:-3])} == {48}


def test_a_resumed_run_does_not_count_the_time_between_its_starts(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "a")
    rows = [metrics(1), metrics(2), metrics(3) | {"time": 5000.0}]
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "events.jsonl", [{"event": "resumed", "step": 2, "time": 4990.0}])
    run = RunFolder(folder)
    assert elapsed(run) == [1.5, 3.5, 5.0]
    monkeypatch.setattr(time, "time", lambda: 5010.0)
    stand = overview(run)
    assert (stand["step"], stand["num_steps"], stand["age"]) == (3, 6, 10.0)
    assert stand["seconds_left"] == pytest.approx((5.0 - 1.5) / 2 * 3)
    assert stand["best"] | {"metric": "eval/pass@1", "value": 0.2, "step": 2} == stand["best"]


def test_warnings_name_metric_and_steps():
    usual = {"loss/grad_norm": 1.0, "loss/entropy": 0.5, "reward/mean": 0.5}
    calm = [{"step": step, **usual} for step in range(1, 16)]
    assert warnings(calm) == []
    calm[12]["loss/grad_norm"] = 30.0
    calm[13]["loss/entropy"] = calm[14]["loss/entropy"] = 0.002
    calm[3] |= {"rollout/started": 10, "rollout/filtered": 6}
    found = {w["metric"]: (w["step"], w["num_steps"]) for w in warnings(calm)}
    assert found == {"loss/entropy": (15, 1), "loss/grad_norm": (13, 1), "rollout/filtered": (4, 1)}


def test_a_reader_follows_a_growing_and_a_rewritten_file(tmp_path):
    folder = make_run(tmp_path / "a")
    run, path = RunFolder(folder), folder / "metrics.jsonl"
    line = json.dumps(metrics(5))
    for part in (line[:10], line[10:] + "\n"):
        with path.open("a") as file:
            file.write(part)
        run.refresh()
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5] and run.num_restarts == 0
    write_lines(tmp_path / "new", [metrics(1)])
    (tmp_path / "new").rename(path)
    run.refresh()
    assert [row["step"] for row in run.rows] == [1] and run.num_restarts == 1


def test_the_comparison_has_the_values_at_equal_steps_and_seconds(tmp_path):
    slow, fast = make_run(tmp_path / "slow"), make_run(tmp_path / "fast", num_steps=3, lr=0.2)
    rows = [metrics(step) | {"time": 100.0 + step} for step in (1, 2, 3)]  # 1 s a step
    write_lines(fast / "metrics.jsonl", rows)
    text = comparison([RunFolder(slow), RunFolder(fast)])
    tables = [[line.split() for line in part.splitlines()] for part in text.split("\n\n")]
    assert tables[0][1:] == [["lr", "0.1", "0.2"]]
    assert tables[1][0][:3] == ["at", "step", "3"]
    assert ["reward/mean", "0.4286", "0.4286"] in tables[1]
    assert ["eval/pass@1", "0.2", "0.2"] in tables[1]  # of step 2, the last that has it
    # fast ends after 1.5 + 1 + 1 s, when slow has ended its steps 1 and 2 (1.5 + 2 s).
    assert tables[2][0][:3] == ["after", "3.5", "s"]
    assert ["step", "2", "3"] in tables[2]
    assert ["reward/mean", "0.2857", "0.4286"] in tables[2]


def test_the_server_pages_through_all_samples_and_needs_its_word(tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1, num_samples=20)
    server, address = make_server([RunFolder(folder)])
    Thread(target=server.serve_forever, daemon=True).start()
    assert server.server_address[0] == "127.0.0.1"

    def get(path):
        return urllib.request.urlopen(address + path).read().decode()

    try:
        assert Page(get("")).data["live"]
        page = json.loads(get("samples?run=0&name=step_00001&start=0"))
        assert len(page["samples"]) == 20 and page["next"] is None
        place = page["samples"][7]["at"]
        assert len(json.loads(get(f"samples?run=0&name=step_00001&start={place}"))["samples"]) == 13
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(2)) + "\n")
        news = json.loads(get("news?run=0&rows=1"))
        assert news["metrics"]["step"] == [2] and news["overview"]["step"] == 2
        for wrong in ("../news?run=0&rows=0", "samples?run=0&name=../config&start=0", "news?run=9"):
            with pytest.raises(urllib.error.HTTPError, match="40"):
                get(wrong)
    finally:
        server.shutdown()
        server.server_close()


def test_serving_says_how_to_reach_it_from_elsewhere(tmp_path, capsys, monkeypatch):
    def stopped(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", stopped)
    assert main([str(make_run(tmp_path / "a")), "--serve"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    port = first.split(":")[2].split("/")[0]
    assert f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, then" in second


def test_the_server_skips_samples_that_are_nested_too_deeply(tmp_path):
    folder = make_run(tmp_path / "a")
    deep(folder)
    server, address = make_server([RunFolder(folder)])
    Thread(target=server.serve_forever, daemon=True).start()
    query = "samples?run=0&name=step_00004&start=0"
    with urllib.request.urlopen(address + query, timeout=60) as answer:
        assert json.load(answer)["broken"] == 1
    server.shutdown()


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.json", "phase"])
def test_a_pipe_is_no_record(tmp_path, name):
    folder = make_run(tmp_path / "a")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    os.mkfifo(folder / "rollouts" / "step_00009.jsonl")
    program = f"from roll_lite.report.__main__ import main; main([{str(folder)!r}])"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert Page((folder / "report.html").read_text()).data["runs"]


def test_it_starts_without_torch():
    code = "import roll_lite.report.__main__, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
