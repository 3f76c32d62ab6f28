"""Episodes in worker processes: equal to those played inline, whatever other episodes do."""

import asyncio
import bdb
import io
import pdb
import random
import re
import zlib
from functools import partial

import pytest
from support import worker_envs
from support.episodes import Model, players, task
from support.paths import SOURCES
from support.process_checks import wait_until
from support.scripts import run_recipe_file
from support.worker_envs import NUM_TURNS, AsyncWalk, Walk

from roll_lite.envs.env import Ending, OutOfTokens
from roll_lite.envs.play import EnvError
from roll_lite.types import Score
from roll_lite.workers.failures import TooManyFailures
from roll_lite.workers.pool import EnvWorkers

ENVS = {
    name.lower(): getattr(worker_envs, name)
    for name in ("Walk", "AsyncWalk", "Stubborn", "Random", "Unmarked",
                 "sum_up", "until_full", "impatient", "echo", "not_a_number")
}  # fmt: skip


PLAYERS = players(ENVS)


def play(workers, domain, model, seed=3, **extra):
    return asyncio.run(workers.play(model, task(domain, seed, **extra)))


@pytest.fixture(scope="module")
def inline():
    with EnvWorkers(PLAYERS, num_workers=0, max_error_share=1.0) as workers:
        yield workers


@pytest.fixture(scope="module")
def shared():
    """One worker, so that all episodes meet there."""
    with EnvWorkers(PLAYERS, num_workers=1, seconds=60.0, max_error_share=1.0) as workers:
        yield workers


@pytest.fixture(scope="module")
def hasty():
    """For steps that reach their time limit."""
    with EnvWorkers(PLAYERS, num_workers=1, seconds=0.6, max_error_share=1.0) as workers:
        yield workers


@pytest.mark.parametrize("domain", ["walk", "asyncwalk", "sum_up"])
def test_an_episode_in_a_worker_equals_one_that_is_played_inline(shared, inline, domain):
    models = Model("ok", "go on", "tell me"), Model("ok", "go on", "tell me")
    endings = [play(w, domain, m) for w, m in zip((shared, inline), models, strict=True)]
    assert endings[0] == endings[1] and models[0].log == models[1].log
    assert len(models[0].log) >= 5  # asks and results


def test_the_coroutine_by_hand(shared):
    model = Model("abc", "de", "f")
    numbers = random.Random(3).sample(range(100), 3)
    system, question = ({"role": "system", "content": "Add."},
                        {"role": "user", "content": str(numbers)})  # fmt: skip
    assert play(shared, "sum_up", model) == Ending(
        reason="returned", score=Score(value=2.0, parts={"third": 1.0})
    )
    said = {"role": "assistant", "content": "abc"}
    again = {"role": "user", "content": "Again."}
    changed = {"role": "user", "content": f"Once more: {numbers}"}
    assert model.log == [
        ([system, question], [{"name": "add"}], ("\n",), 7, "first"),
        (3.0, {"mean": {"long": 1.0}}),
        ([system, question, said, again], None, (), None, None),
        ([changed], None, (), None, None),
        (0.5, {}),
    ]


def test_options_travel_with_the_environment(inline):
    shorter = players({"walk": partial(Walk)}, max_turns=2, history=0)
    with EnvWorkers(shorter, num_workers=1) as workers:
        model = Model()
        assert play(workers, "walk", model) == Ending(reason="turns")
    assert [len(told[0]) for told in model.log[::2]] == [1, 1]


def play_together(workers, domain, bad, num_others=4):
    """A bad episode does its worst when the others are at the first turn or further on.

    Returns what became of the bad one, and for the others pairs of ending and log.
    """

    async def gather():
        bad_one = asyncio.Event()
        waiting = []

        async def wait(model):  # half of the others wait at their second ask
            if model.num_replies == 1 and model.number % 2:
                waiting.append(model)
                await bad_one.wait()

        async def wait_for_others(model):
            while len(waiting) < num_others // 2:
                await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.02, bad_one.set)

        models = [Model("ok", before=wait) for _ in range(num_others)]
        for number, model in enumerate(models):
            model.number = number
        worst = Model(bad, before=wait_for_others)
        calls = [workers.play(model, task(domain, seed)) for seed, model in enumerate(models)]
        first, *others = await asyncio.gather(
            workers.play(worst, task(domain, 99)), *calls, return_exceptions=True
        )
        return first, [(end, model.log) for end, model in zip(others, models, strict=True)]

    return asyncio.run(gather())


@pytest.fixture(scope="module")
def undisturbed(inline):
    """What the others of `play_together` come to by themselves."""

    def find(domain, num_others=4):
        models = [Model("ok") for _ in range(num_others)]
        return [(play(inline, domain, m, s), m.log) for s, m in enumerate(models)]

    return find


@pytest.mark.parametrize(
    ("domain", "reply", "message", "dies"),
    [
        ("walk", "crash", r"ended by signal 11 \(Seg.*in string_at.*in step", True),
        ("walk", "exit 7", "ended itself with exit code 7", True),
        ("walk", "allocate 3000", r"more than memory_gib=2\.0", True),
        ("walk", "print 2000", "printed more than output_kib=1024", True),
        ("walk", "raise mine", "worker_rewards.OwnError: mine", False),
        ("walk", "leave 3", "SystemExit: 3", False),
        ("asyncwalk", "deep exit 7", "ended itself with exit code 7", True),
        ("asyncwalk", "deep raise mine", "worker_rewards.OwnError: mine", False),
        ("sum_up", "exit 7", "ended itself with exit code 7", True),
    ],
)
def test_only_the_culprit_fails(shared, undisturbed, domain, reply, message, dies):
    shared.metrics()
    error, others = play_together(shared, domain, reply)
    assert isinstance(error, EnvError)
    assert str(error).startswith(f"{domain}, seed 99, turn 1: ")
    assert re.search(f"(?s){message}", f"{error} {error.__notes__}")
    assert others == undisturbed(domain)
    metrics = shared.metrics()
    replayed = metrics["env/replayed"]
    assert 2 <= replayed <= 4 if dies else replayed == 0
    counts = [metrics[f"env/{name}"] for name in ("episodes", "errors", "crashes", "timeouts")]
    assert counts == [5, 1, dies, 0]


def test_no_episode_fails_if_its_worker_was_killed(shared, undisturbed, tmp_path):
    shared.metrics()
    end, others = play_together(shared, "walk", f"killed-once {tmp_path / 'killed'}")
    assert not isinstance(end, Exception) and others == undisturbed("walk")
    metrics = shared.metrics()
    assert metrics["env/errors"] == 0 and metrics["env/replaced"] == 1


@pytest.mark.parametrize(
    ("domain", "reply", "where", "dies"),
    [
        ("walk", "hang", "in hang", True),
        ("asyncwalk", "wait 1000", "await asyncio.sleep", False),
        pytest.param("asyncwalk", "deep hang", "in hang", True, marks=pytest.mark.slow),
        pytest.param("stubborn", "wait 1000", "did not end when", False, marks=pytest.mark.slow),
    ],
)
def test_only_the_one_that_hangs_fails(hasty, undisturbed, domain, reply, where, dies):
    hasty.metrics()
    error, others = play_together(hasty, domain, reply)
    note = f"{error} {error.__notes__}"
    assert f"{domain}, seed 99, turn 1: the environment took longer than env_seconds=0.6" in note
    assert where in note and f"{SOURCES}/roll_lite" not in note
    assert others == undisturbed("asyncwalk" if domain == "stubborn" else domain)
    metrics = hasty.metrics()
    assert metrics["env/timeouts"] == 1 and metrics["env/crashes"] == 0
    assert (metrics["env/replayed"] > 0) == dies


def test_time_in_which_others_run_is_not_counted(hasty):
    """One waits, while others block the worker for longer than the time limit."""

    async def gather():
        models = [Model("wait 0.1"), *(Model("sleep 0.2") for _ in range(4))]
        return await asyncio.gather(*(hasty.play(m, task("asyncwalk")) for m in models))

    assert asyncio.run(gather()) == [Ending(reason="truncated")] * 5


def test_what_cannot_be_replayed_says_so(shared):
    error, others = play_together(shared, "random", "exit 1")
    assert "exit code 1" in str(error)
    lost = [str(end) for end, _ in others if isinstance(end, EnvError)]
    assert lost and all("after the same 1 replies it said" in text for text in lost)
    assert all("must come from the seed" in text for text in lost)
    assert all(end == Ending(reason="truncated") for end, _ in others if str(end) not in lost)


def test_a_death_that_is_no_episodes_fault(shared):
    """It is played again, but not for ever."""
    shared.metrics()
    with pytest.raises(EnvError, match="turn 1: the environment's process ended itself"):
        play(shared, "unmarked", Model())
    assert shared.metrics()["env/replayed"] == 2


def test_cancelling_closes_the_environment(tmp_path):
    envs = {"walk": partial(AsyncWalk, str(tmp_path / "closed"))}

    async def cancel(workers):
        asked = asyncio.Event()

        async def wait(model):
            asked.set()
            await asyncio.sleep(1000)

        call = asyncio.ensure_future(workers.play(Model(before=wait), task()))
        await asked.wait()
        call.cancel()
        await asyncio.wait([call])
        return call.cancelled()

    with EnvWorkers(players(envs), num_workers=1) as workers:
        assert asyncio.run(cancel(workers))
        wait_until((tmp_path / "closed").exists)
        assert play(workers, "walk", Model()) == Ending(reason="truncated")
        wait_until(lambda: (tmp_path / "closed").read_text() == "closed\n" * 2)
        assert workers.metrics()["env/episodes"] == 1


def test_cancelling_at_any_moment(shared):
    """Also before the episode begins; nothing of it stays in the worker."""

    async def cancel():
        calls = [asyncio.ensure_future(shared.play(Model(), task("asyncwalk"))) for _ in range(60)]
        for number, call in enumerate(calls):
            asyncio.get_running_loop().call_later(0.001 * (number % 20), call.cancel)
        await asyncio.wait(calls)

    asyncio.run(cancel())
    wait_until(lambda: not shared._supervisor.num_jobs)


@pytest.mark.parametrize("domain", ["walk", "sum_up"])
@pytest.mark.parametrize("where", ["inline", "shared"])
def test_an_error_of_the_conversation_is_raised_as_it_is(request, where, domain):
    workers = request.getfixturevalue(where)
    workers.metrics()
    broken = ConnectionError("no engine")
    with pytest.raises(ConnectionError) as error:
        play(workers, domain, Model("ok", broken))
    assert error.value is broken and workers.metrics()["env/errors"] == 0


@pytest.mark.parametrize("where", ["inline", "shared"])
def test_out_of_tokens(request, where):
    workers = request.getfixturevalue(where)
    full = OutOfTokens("context")
    assert play(workers, "until_full", Model("a", "b", full)).score == Score(
        value=5.0, parts={"context": 1.0}
    )
    model = Model("a", "b", full)
    with pytest.raises(OutOfTokens) as error:
        play(workers, "walk", model)
    assert error.value is full
    assert len(model.log) == 5  # three asks, two results
    assert workers.metrics()["env/errors"] == 0


def test_a_reply_that_was_given_up(shared):
    async def be_late(model):
        await asyncio.sleep(0.05 if len(model.log) == 1 else 0)

    model = Model("reply to first", "reply to second", before=be_late)
    assert play(shared, "impatient", model).score == Score(value=1.0)


def test_large_messages_in_both_directions(shared):
    """More than pipes hold, from many episodes at once."""

    async def gather():
        lengths = [3_000_000 + n for n in range(8)]
        models = [Model("x" * length) for length in lengths]
        calls = zip(models, lengths, strict=True)
        plays = (shared.play(model, task("echo", length=length)) for model, length in calls)
        return [ending.score.value for ending in await asyncio.gather(*plays)]

    assert asyncio.run(gather()) == [1.0] * 8


@pytest.mark.parametrize("where", ["inline", "shared"])
def test_scores_must_be_finite(request, where):
    with pytest.raises((EnvError, ValueError), match="reward=nan is not a finite number"):
        play(request.getfixturevalue(where), "not_a_number", Model())


def test_unknown_domain(shared):
    with pytest.raises(ValueError, match=r"domain='other', for which there is no environment"):
        play(shared, "other", Model())


def test_what_cannot_be_imported_is_refused():
    class Local(Walk):
        pass

    match = r"players\['x'\]=.*Local.*cannot be pickled.*or run with env_workers=0"
    with pytest.raises(ValueError, match=match):
        EnvWorkers(players({"x": Local}))


def test_a_debugger_inline():
    """It stops in the environment, and quitting it quits all episodes."""
    output = io.StringIO()

    class Stopping(Walk):
        def step(self, action):
            pdb.Pdb(stdin=io.StringIO("p action\nq\n"), stdout=output).set_trace()
            return super().step(action)

    with EnvWorkers(players({"walk": Stopping}), num_workers=0) as workers:
        with pytest.raises(bdb.BdbQuit):
            play(workers, "walk", Model("look here"))
        with pytest.raises(bdb.BdbQuit):
            play(workers, "walk", Model())
    assert "return super().step(action)" in output.getvalue() and "'look here'" in output.getvalue()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_broken_environments_end_the_run(num_workers, capfd):
    async def gather(workers):
        models = [Model("raise wrong") if n % 2 else Model() for n in range(60)]
        calls = (workers.play(model, task(seed=n)) for n, model in enumerate(models))
        return await asyncio.gather(*calls, return_exceptions=True)

    with EnvWorkers(players({"walk": Walk}), num_workers=num_workers) as workers:
        results = asyncio.run(gather(workers))
    assert {type(result) for result in results} == {Ending, EnvError, TooManyFailures}
    text = next(str(result) for result in results if isinstance(result, TooManyFailures))
    # 50 are needed; the last of them may have ended well, and then a failure is waited for
    assert re.search(r"of the last 5\d episodes failed, more than env_error_share=0.2", text)
    example = (
        r"- prompt p(\d+), seed \1, turn 1, "
        r"reply 'raise wrong': support\.worker_rewards\.OwnError: wr"
    )
    assert len(re.findall(example, text)) == 3
    shown = capfd.readouterr().err
    assert shown.count("the environment of domain 'walk' failed on prompt p") == 1
    assert shown.count("raise OwnError(argument)") == 1 and "reply: 'raise wrong'" in shown


def test_environments_of_the_recipe_itself(tmp_path):
    script = """
        import asyncio, os
        from roll_lite.envs.play import EpisodeOptions, player
        from roll_lite.types import Prompt
        from roll_lite.workers.pool import EnvWorkers

        class Mine:
            def reset(self, seed):
                return f"seed {seed}", {}
            def step(self, action):
                return "", float(os.getpid()), True, False, {}

        class Chat:
            finish_reason = "stop"
            async def __call__(self, messages, **options):
                print(messages)
                return {"role": "assistant", "content": "yes"}
            def result(self, reward, **measurements):
                print(reward != os.getpid())

        async def main():
            task = Prompt(id="p", messages=(), domain="d", ground_truth="", seed=5)
            with EnvWorkers({"d": player(Mine, "d", EpisodeOptions())}, num_workers=1) as workers:
                print((await workers.play(Chat(), task)).reason)

        if __name__ == "__main__":
            asyncio.run(main())
    """
    assert run_recipe_file(tmp_path, script).splitlines() == [
        "[{'role': 'user', 'content': 'seed 5'}]",
        "True",
        "terminated",
    ]


def test_closing_fails_running_episodes():
    async def close_meanwhile(workers):
        async def close(model):
            await asyncio.to_thread(workers.close)

        await workers.play(Model(before=close), task())

    with EnvWorkers(players({"walk": Walk}), num_workers=1) as workers:
        with pytest.raises(EnvError, match="the environment workers were closed"):
            asyncio.run(close_meanwhile(workers))
        with pytest.raises(EnvError, match="the environment workers were closed"):
            play(workers, "walk", Model())


@pytest.mark.slow
def test_code_that_waits_for_a_processor_does_not_hang():
    """It runs longer than the limit, but has a processor for a part of that time only."""
    with EnvWorkers(PLAYERS, num_workers=1, seconds=2.0) as workers:
        play(workers, "walk", Model("starve 2.5"))
        metrics = workers.metrics()
    assert metrics["env/timeouts"] == 0 and metrics["env/seconds"] > 2.5


def fate(seed):
    """What happens to an episode of the storm, and at which turn."""
    percent = zlib.crc32(str(seed).encode()) % 100
    bad = {0: "hang", 1: "exit 3" if seed % 2 else "crash"}.get(percent)
    return bad, seed % NUM_TURNS


@pytest.mark.slow
def test_a_storm(inline):
    """2,000 episodes in two workers, of which one percent hangs and one percent crashes."""
    seeds = range(2000)
    models = []
    for seed in seeds:
        bad, turn = fate(seed)
        models.append(Model(*["ok"] * turn, *([bad] if bad else [])))

    async def gather(workers):
        places = asyncio.Semaphore(256)

        async def one(seed):
            async with places:
                return await workers.play(models[seed], task("asyncwalk", seed))

        return await asyncio.gather(*map(one, seeds), return_exceptions=True)

    options = {"num_workers": 2, "seconds": 2.0, "max_error_share": 1.0}
    with EnvWorkers(PLAYERS, **options) as workers:
        results = asyncio.run(gather(workers))
        metrics = workers.metrics()
    hanging = [seed for seed in seeds if fate(seed)[0] == "hang"]
    crashing = [seed for seed in seeds if fate(seed)[0] not in (None, "hang")]
    assert 10 < len(hanging) < 30 and 10 < len(crashing) < 30
    assert [s for s in seeds if "took longer" in str(results[s])] == hanging
    assert [s for s in seeds if "'s process" in str(results[s])] == crashing
    counts = [metrics[f"env/{name}"] for name in ("episodes", "errors", "timeouts", "crashes")]
    assert counts == [2000, len(hanging) + len(crashing), len(hanging), len(crashing)]
    for seed in set(seeds) - {*hanging, *crashing}:
        model = Model(*["ok"] * fate(seed)[1])
        assert play(inline, "asyncwalk", model, seed) == results[seed], seed
        assert model.log == models[seed].log, seed
