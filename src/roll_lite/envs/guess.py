"""Guess a number from hints: the smallest example of a game."""

from dataclasses import dataclass
from random import Random

from roll_lite.envs.game import Game


@dataclass(kw_only=True)
class Guess(Game):
    highest: int = 100

    @property
    def instruction(self) -> str:
        return (
            f"Guess a number from 1 to {self.highest}. You are told if it is too low or too high."
        )

    def start(self, random: Random) -> None:
        self.number = random.randint(1, self.highest)
        self.low, self.high, self.hint = 1, self.highest, "No guess yet."
        self.is_over = self.is_won = False

    def observe(self) -> str:
        return self.hint

    def actions(self) -> list[str]:
        return [str(number) for number in range(1, self.highest + 1)]

    def act(self, action: str) -> float:
        guess = int(action)
        self.is_over = self.is_won = guess == self.number
        if guess < self.number:
            self.low, self.hint = max(self.low, guess + 1), f"{guess} is too low."
        elif guess > self.number:
            self.high, self.hint = min(self.high, guess - 1), f"{guess} is too high."
        else:
            self.hint = f"{guess} is right."
        return float(self.is_won)

    def solve(self) -> list[str]:
        return [str((self.low + self.high) // 2)]
