"""How well a model plays a game: as it is, after imitating a solver, and after reinforcement.

python scripts/bench/games.py --model models/SmolLM2-135M-Instruct --env frozen_lake --out runs/fl-0
python scripts/bench/games.py --model ... --env sokoban --transfer sokoban_symbols sokoban_8x8 \
        --seed 1 --out runs/so-1 -- --steps 200 --lr 1e-5          # options of recipes/agentic.py
python scripts/bench/games.py --model ... --episodes 0 ...         # reinforcement alone

Each stage is a recipe in a process of its own; its output is in the folder. Success is over the
same held-out episodes, greedy. At the end a table, also as JSON.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"


def main() -> None:
    options, further = _parse()
    out = Path(options.out)
    out.mkdir(parents=True)
    games = [options.env, *options.transfer]
    table: dict[str, dict[str, float]] = {}
    seconds: dict[str, float] = {}

    def evaluate(model: str, stage: str) -> None:
        folder = out / f"eval-{stage}"
        _run(out, "evaluate", "--model", model, "--data", *games, "--prompts", options.held_out,
             "--run-dir", folder, "--kv-cache-gib", 8, *_of_episodes(further))  # fmt: skip
        metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        table[stage] = {
            game: metrics["eval/pass@1" if len(games) == 1 else f"eval/{game}/pass@1"]
            for game in games
        } | {k: v for k, v in metrics.items() if k.startswith(f"eval/{options.env}/")}

    model = options.model
    if not options.skip_before:
        evaluate(model, "before")
    if options.episodes:
        traces = out / "traces.jsonl"
        command = ["-m", "roll_lite", "envs", "traces", options.env, "--episodes", options.episodes,
                   "--mistakes", options.mistakes, "--seed", options.seed, "--out", traces,
                   *_history(further)]  # fmt: skip
        _call(out / "traces.log", command)
        start = time.perf_counter()
        _run(out, "sft", "--model", model, "--data", traces, "--seed", options.seed,
             "--steps", options.sft_steps, "--schedule", "linear", "--run-dir", out / "sft",
             "--eval-every", 0)  # fmt: skip
        seconds["sft"] = time.perf_counter() - start
        model = str(out / "sft" / "model")
        evaluate(model, "sft")
    start = time.perf_counter()
    _run(out, "agentic", "--model", model, "--data", options.env, "--seed", options.seed,
         "--run-dir", out / "rl", "--kv-cache-gib", 8, *further)  # fmt: skip
    seconds["rl"] = time.perf_counter() - start
    evaluate(str(out / "rl" / "model"), "rl")
    rows = [json.loads(line) for line in (out / "rl" / "metrics.jsonl").open()]
    steps = sorted(row["time/step"] for row in rows if "time/step" in row)
    seconds["rl step (median)"] = steps[len(steps) // 2]
    result = {"options": vars(options), "further": further, "success": table, "seconds": seconds}
    (out / "result.json").write_text(json.dumps(result, indent=1))
    for stage, rates in table.items():
        print(f"{stage:<8}", *(f"{game} {rates[game]:.1%}" for game in games), sep="  ")
    print("seconds", {name: round(value, 2) for name, value in seconds.items()})


def _run(out: Path, recipe: str, *arguments: object) -> None:
    folder = str(arguments[arguments.index("--run-dir") + 1])
    _call(out / f"{Path(folder).name}.log", [RECIPES / f"{recipe}.py", *arguments])


def _call(log: Path, arguments: list[object]) -> None:
    with log.open("w") as file:
        command = [sys.executable, *map(str, arguments)]
        if subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode:
            sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")


def _of_episodes(further: list[str]) -> list[str]:
    """Those of the options that an evaluation needs to play like the training."""
    names = ("--history", "--max-tokens", "--max-turns", "--episode-tokens", "--env-workers")
    pairs = itertools.pairwise(further)
    return [word for pair in pairs if pair[0] in names for word in pair]


def _history(further: list[str]) -> list[str]:
    return further[(i := further.index("--history")) : i + 2] if "--history" in further else []


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--env", default="frozen_lake")
    parser.add_argument("--transfer", nargs="*", default=[], help="other games to evaluate on")
    parser.add_argument("--episodes", type=int, default=2000, help="of the solver; 0: no SFT")
    parser.add_argument("--mistakes", type=float, default=0.0, help="share of random actions")
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--held-out", type=int, default=1024, help="episodes to evaluate on")
    parser.add_argument("--skip-before", action="store_true", help="another seed's run has it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True)
    own, _, further = " ".join(sys.argv[1:]).partition(" -- ")
    return parser.parse_args(own.split()), further.split()


if __name__ == "__main__":
    main()
