"""Sums of up to three digits, sorting and copying."""

from random import Random

from gewell.eval.scorers import Scorer
from gewell.eval.tasks.sample import Request, Sample, Split, assistant, user
from gewell.eval.tasks.words import ADJECTIVES, ITEMS, NOUNS


def is_held_out(a: int, b: int) -> bool:
    """One pair of summands in ten is never trained on."""
    return (a * 1009 + b * 9173) % 10 == 3


def make_arithmetic(request: Request) -> Sample:
    """One or more sums and differences; one to a chat turn, or a list of them."""
    rng, split = request.rng, request.split
    thinking = rng.random() < 0.1
    if rng.random() < 0.5 or split is Split.HELD_OUT:
        sums = [_sum(rng, split) for _ in range(1 if split is Split.HELD_OUT else rng.randint(1, 4))]
        messages = []
        for text, result in sums[:-1]:
            messages += [user(f"What is {text}?"), assistant(result)]
        text, answer = sums[-1]
        messages.append(user(f"What is {text}?"))
        thought = f"{text}={answer}"
    else:
        sums = [_sum(rng, split) for _ in range(rng.randint(4, 12))]
        messages = [user("Compute:\n" + "\n".join(text for text, _ in sums))]
        answer = "\n".join(f"{text}={result}" for text, result in sums)
        thought = f"{len(sums)} lines."
    return Sample(
        task="arithmetic", messages=messages, answer=answer, thinking=thinking, thought=thought if thinking else ""
    )


def _sum(rng: Random, split: Split) -> tuple[str, str]:
    while True:
        a, b = (rng.randrange(*rng.choice(((0, 100), (100, 1000), (100, 1000)))) for _ in range(2))
        if split is Split.HELD_OUT:
            a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
        if is_held_out(a, b) != (split is Split.HELD_OUT):
            continue
        if rng.random() < 0.25:
            a, b = max(a, b), min(a, b)
            if is_held_out(a, b) == (split is Split.HELD_OUT):
                return f"{a}-{b}", str(a - b)
            continue
        return f"{a}+{b}", str(a + b)


def make_sort(request: Request) -> Sample:
    rng = request.rng
    numbers = [rng.randrange(10, 1000) for _ in range(rng.randint(3, 10))]
    down = rng.random() < 0.3
    order = "from large to small" if down else "from small to large"
    return Sample(
        task="sort",
        messages=[user(f"Sort these numbers {order}:\n{' '.join(map(str, numbers))}")],
        answer=" ".join(map(str, sorted(numbers, reverse=down))),
    )


def make_copy(request: Request) -> Sample:
    """Words, numbers or lines, to be given back unchanged; once in a while in reverse."""
    rng = request.rng
    kind = rng.choice(("words", "digits", "lines"))
    if kind == "words":
        parts = [rng.choice(rng.choice((ADJECTIVES, NOUNS, ITEMS))) for _ in range(rng.randint(3, 24))]
    elif kind == "digits":
        parts = [str(rng.randrange(10 ** rng.randint(1, 6))) for _ in range(rng.randint(2, 12))]
    else:
        parts = [f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}" for _ in range(rng.randint(2, 12))]
    glue = "\n" if kind == "lines" else " "
    if rng.random() < 0.15:
        return Sample(task="copy", messages=[user(f"Reverse:\n{glue.join(parts)}")], answer=glue.join(reversed(parts)))
    return Sample(
        task="copy",
        messages=[user(f"Copy:\n{glue.join(parts)}")],
        answer=glue.join(parts),
        scorer=Scorer.EXACT,
    )
