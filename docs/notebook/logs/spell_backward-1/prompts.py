"""Prompts for reasoning-gym's spell_backward: two examples, spelled letter by letter, and a word.

    python prompts.py test.jsonl --rows 1024 --split held_out
    python prompts.py train.jsonl --rows 60000 --without test.jsonl

Words are in upper case, which the tokenizer cuts into shorter and more frequent pieces. Training
has more of the long words, which are harder: one of n letters is kept with probability (n / 10)^2.
"""

import argparse
import json
import random
import sys

from roll_lite.rewards import reasoning_gym

SOURCE = "rg:spell_backward:min_word_len=3,max_word_len=10"
EXAMPLES = ("PLANET", "EGYPT")


def answered(word: str) -> str:
    forward, backward = " ".join(word), " ".join(word[::-1])
    return f"Forward: {forward}\nBackward: {backward}\n<answer>{word[::-1]}</answer>"


def messages(word: str) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": "Spell the word backward."}]
    for example in EXAMPLES:
        turns.append({"role": "user", "content": example})
        turns.append({"role": "assistant", "content": answered(example)})
    return [*turns, {"role": "user", "content": word}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out")
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--split", choices=("train", "held_out"), default="train")
    parser.add_argument("--without", metavar="FILE", help="its words are left out, in any case")
    args = parser.parse_args()
    seen: set[str] = set()
    if args.without:
        with open(args.without, encoding="utf-8") as file:
            seen.update(json.loads(line)["ground_truth"].upper() for line in file)
    chance, num_rows = random.Random(0), 0
    with open(args.out, "w", encoding="utf-8") as file:
        for number in range(reasoning_gym.SIZE):
            if num_rows == args.rows:
                break
            prompt = reasoning_gym.question(SOURCE, number, seed=0, split=args.split)
            backward = prompt.ground_truth.upper()
            if backward in seen:
                continue
            seen.add(backward)
            is_short = chance.random() > (len(backward) / 10) ** 2
            if args.split == "train" and is_short:
                continue
            num_rows += 1
            row = {
                "id": f"{args.split}-{number}", "prompt": messages(backward[::-1]),
                "domain": prompt.domain, "ground_truth": prompt.ground_truth, **prompt.extra,
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
    if num_rows < args.rows:
        sys.exit(f"error: --rows {args.rows}: there are only {num_rows} such words; ask for fewer")


if __name__ == "__main__":
    main()
