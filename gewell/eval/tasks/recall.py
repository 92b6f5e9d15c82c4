"""Facts told over several turns of a chat and asked for later, with and without thinking."""

from collections.abc import Callable
from random import Random

from gewell.eval.tasks.sample import Request, Sample, assistant, system, user
from gewell.eval.tasks.words import ADJECTIVES, CITIES, COLOURS, FIRST_NAMES, ITEMS, LAST_NAMES, NOUNS

_NOTED = "Noted."
_SYSTEM = ("You are a helpful assistant.", "Answer briefly.")

# What a fact is about: the statement, the question, and how its value is drawn.
_FACTS: tuple[tuple[str, str, Callable[[Random], str]], ...] = (
    ("My name is {v}.", "What is my name?", lambda rng: rng.choice(FIRST_NAMES)),
    ("My last name is {v}.", "What is my last name?", lambda rng: rng.choice(LAST_NAMES)),
    ("I live in {v}.", "Where do I live?", lambda rng: rng.choice(CITIES)),
    ("I was born in {v}.", "Where was I born?", lambda rng: rng.choice(CITIES)),
    ("My favourite colour is {v}.", "What is my favourite colour?", lambda rng: rng.choice(COLOURS)),
    ("The door code is {v}.", "What is the door code?", lambda rng: f"{rng.randrange(10000):04d}"),
    ("The room number is {v}.", "What is the room number?", lambda rng: str(rng.randrange(100, 1000))),
    ("My sister is called {v}.", "What is my sister called?", lambda rng: rng.choice(FIRST_NAMES)),
    ("My cat is called {v}.", "What is my cat called?", lambda rng: rng.choice(NOUNS).capitalize()),
    ("I lost my {v}.", "What did I lose?", lambda rng: rng.choice(ITEMS)),
    ("I am {v} years old.", "How old am I?", lambda rng: str(rng.randrange(18, 90))),
    ("The password is {v}.", "What is the password?", lambda rng: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"),
)


def make_recall(request: Request) -> Sample:
    """Facts one by one or several in a message; questions in between and at the end."""
    rng = request.rng
    facts = [(said, asked, draw(rng)) for said, asked, draw in rng.sample(_FACTS, rng.randint(2, 7))]
    messages = [system(rng.choice(_SYSTEM))] if rng.random() < 0.5 else []
    told: list[tuple[str, str, str]] = []
    for group in _groups(rng, facts):
        messages += [user(" ".join(said.format(v=value) for said, _, value in group)), assistant(_NOTED)]
        told += group
        if rng.random() < 0.4:
            _, asked, value = rng.choice(told)
            messages += [user(asked), assistant(value)]
    _, asked, value = rng.choice(told)
    thinking = rng.random() < 0.4
    return Sample(
        task="recall",
        messages=[*messages, user(asked)],
        answer=value,
        thinking=thinking,
        thought=f"The user told me: {value}." if thinking else "",
    )


def _groups(rng: Random, facts: list[tuple[str, str, str]]) -> list[list[tuple[str, str, str]]]:
    groups: list[list[tuple[str, str, str]]] = []
    rest = list(facts)
    while rest:
        size = min(len(rest), rng.choice((1, 1, 1, 2, 3)))
        groups.append(rest[:size])
        rest = rest[size:]
    return groups
