"""A writer keeps a record and applies remarks; a critic compares the record with the facts.

The two prompts are functions here so that whoever runs the loop asks as the model has learned it: the writer starts
from a record with faults, the critic names the first of them, the writer repairs it, until the critic accepts.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from gewell.eval.tasks.sample import Request, Sample, assistant, system, user
from gewell.eval.tasks.words import CITIES, COLOURS, DAYS, FIRST_NAMES, ITEMS, LAST_NAMES, SIZES

WRITER_SYSTEM = "You are the writer. Keep the record and apply the critic's remarks."
CRITIC_SYSTEM = "You are the critic. Compare the record with the facts."
ACCEPTED = "accepted"

Fields = Mapping[str, str]

# Nothing but the facts says a field's value, so a fault cannot be seen from the record alone.
_FIELDS: dict[str, Callable[[Random], str]] = {
    "client": lambda rng: f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
    "item": lambda rng: rng.choice(ITEMS),
    "colour": lambda rng: rng.choice(COLOURS),
    "size": lambda rng: rng.choice(SIZES),
    "count": lambda rng: str(rng.randrange(1, 100)),
    "price": lambda rng: str(rng.randrange(5, 1000)),
    "city": lambda rng: rng.choice(CITIES),
    "day": lambda rng: rng.choice(DAYS),
    "order": lambda rng: f"{rng.randrange(10000):04d}",
}


def random_fields(rng: Random, num_fields: int) -> dict[str, str]:
    """An order with this many of the nine known fields, in their usual sequence."""
    chosen = set(rng.sample(list(_FIELDS), num_fields))
    return {name: draw(rng) for name, draw in _FIELDS.items() if name in chosen}


def with_faults(rng: Random, facts: Fields, num_faults: int) -> dict[str, str]:
    """The facts with other values in this many fields."""
    record = dict(facts)
    for name in rng.sample(list(facts), num_faults):
        while record[name] == facts[name]:
            record[name] = _FIELDS[name](rng)
    return record


def record_text(fields: Fields) -> str:
    return "\n".join(f"{name}: {value}" for name, value in fields.items())


def facts_text(fields: Fields) -> str:
    return "; ".join(f"{name}={value}" for name, value in fields.items())


def remark(facts: Fields, record: Fields) -> str:
    """What the critic must say: the first field that differs, or that there is none."""
    wrong = next((name for name in facts if record.get(name) != facts[name]), None)
    return ACCEPTED if wrong is None else f"{wrong} should be {facts[wrong]}"


def writer_messages(draft: Fields, rounds: Sequence[tuple[str, str]] = ()) -> list[dict[str, Any]]:
    """The writer's conversation: the draft, then (the writer's record, the critic's remark on it) of each round."""
    messages = [system(WRITER_SYSTEM), user(f"Write this record, one field per line.\n{facts_text(draft)}")]
    for record, said in rounds:
        messages += [assistant(record), user(f"The critic says: {said}")]
    return messages


def critic_messages(facts: Fields, record: str, rounds: Sequence[tuple[str, str]] = ()) -> list[dict[str, Any]]:
    """The critic's conversation: (record, remark) of earlier rounds, then the record to judge. Facts are said once."""
    messages: list[dict[str, Any]] = [system(CRITIC_SYSTEM)]
    head = f"Facts:\n{facts_text(facts)}\n"
    for earlier, said in rounds:
        messages += [user(f"{head}Record:\n{earlier}"), assistant(said)]
        head = ""
    return [*messages, user(f"{head}Record:\n{record}")]


def make_writer(request: Request) -> Sample:
    rng = request.rng
    facts = random_fields(rng, rng.randint(3, 9))
    record = with_faults(rng, facts, rng.randint(0, min(3, len(facts))))
    draft, rounds = dict(record), []
    for _ in range(rng.randint(0, 3)):
        said = remark(facts, record)
        if said == ACCEPTED:
            break
        rounds.append((record_text(record), said))
        record = _repaired(record, facts)
    thinking = rng.random() < 0.15
    return Sample(
        task="writer",
        messages=writer_messages(draft, rounds),
        answer=record_text(record),
        thinking=thinking,
        thought=("Write the fields." if not rounds else f"Change it: {rounds[-1][1]}.") if thinking else "",
    )


def make_critic(request: Request) -> Sample:
    rng = request.rng
    facts = random_fields(rng, rng.randint(3, 9))
    record = with_faults(rng, facts, rng.choice((0, 0, 1, 1, 2, 3)))
    rounds = []
    if rng.random() < 0.4:
        while (said := remark(facts, record)) != ACCEPTED and rng.random() < 0.8:
            rounds.append((record_text(record), said))
            record = _repaired(record, facts)
    said = remark(facts, record)
    thinking = rng.random() < 0.15
    return Sample(
        task="critic",
        messages=critic_messages(facts, record_text(record), rounds),
        answer=said,
        thinking=thinking,
        thought="Compare the fields one by one." if thinking else "",
    )


def _repaired(record: Fields, facts: Fields) -> dict[str, str]:
    wrong = next(name for name in facts if record[name] != facts[name])
    return {**record, wrong: facts[wrong]}
