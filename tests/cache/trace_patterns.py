"""Small job traces for tests, in the format of `gewell.cache.sim.trace`: who comes back when, and after whom."""

import random
from typing import Any


class Pattern:
    """Collects records; conversations repeat their history, answers verbatim."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.records: list[dict[str, Any]] = []
        self.history: dict[str, list[list[Any]]] = {}
        self.last: dict[str, str] = {}

    def add(self, segments, out, conv=None, after=(), stable=None, hints=None) -> str:
        prompt = sum(n for _, n in segments)
        record = {
            "t": 0.0,
            "id": f"j{len(self.records)}",
            "conv": conv,
            "after": list(after),
            "segments": [list(s) for s in segments],
            "stable": prompt if stable is None else stable,
            "out": out,
        }
        if hints:
            record["hints"] = hints
        self.records.append(record)
        return record["id"]

    def turn(self, conv: str, start, message: int, out: int, after=()) -> str:
        history = self.history.setdefault(conv, [list(s) for s in start])
        history.append([f"{conv}.u{len(history)}", message])
        before = [self.last[conv]] if conv in self.last else []
        job = self.add(history, out, conv, [*before, *after])
        history.append([f"{job}/out", out])
        self.last[conv] = job
        return job


def seats(num_seats=30, rounds=10, seed="seats") -> list[dict[str, Any]]:
    """Conversations that take turns, one after the other."""
    pattern = Pattern(seed)
    rng = pattern.rng
    for _ in range(rounds):
        for n in range(num_seats):
            start = [["sys", 1200], [f"s{n}.start", 1000 + 97 * n]]
            pattern.turn(f"s{n}", start, rng.randint(100, 500), rng.randint(200, 600))
    return pattern.records


def writers_and_critics(num_writers=24, rounds=8, seed="writers") -> list[dict[str, Any]]:
    """Writers grow; each draft goes to a critic with a fresh prompt, and returns to its writer with the verdict."""
    pattern = Pattern(seed)
    rng = pattern.rng
    verdict: dict[int, str] = {}
    for _ in range(rounds):
        order = rng.sample(range(num_writers), num_writers)
        drafts = []
        for n in order:
            start = [["sys-writer", 2000], [f"w{n}.brief", 1500 + 211 * n]]
            after = [verdict[n]] if n in verdict else []
            drafts.append((n, pattern.turn(f"w{n}", start, rng.randint(150, 600), rng.randint(500, 1200), after)))
        for n, job in drafts:
            prompt = [["sys-critic", 2400], [f"{job}.copy", 900]]
            verdict[n] = pattern.add(prompt, rng.randint(150, 400), after=[job])
    return pattern.records


def flood(num_valuable=10, rounds=20, seed="flood") -> list[dict[str, Any]]:
    """A few long conversations return now and then, between many prompts that never do."""
    pattern = Pattern(seed)
    rng = pattern.rng
    for r in range(rounds):
        for n in range(num_valuable):
            if (r + n) % 3 == 0:
                start = [["sys-v", 2000], [f"v{n}.doc", 9000 + 500 * n]]
                pattern.turn(f"v{n}", start, rng.randint(100, 600), rng.randint(200, 700))
            for _ in range(2):
                name = f"x{len(pattern.records)}"
                hints = {"one_off": True} if rng.random() < 0.5 else None
                pattern.add([["sys-x", 900], [name, rng.randint(300, 4000)]], rng.randint(50, 300), hints=hints)
    return pattern.records


PATTERNS = {f.__name__: f for f in (seats, writers_and_critics, flood)}
