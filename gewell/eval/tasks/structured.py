"""JSON after a schema: the fields that the schema asks for, in its order and types, from a line of facts."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from gewell.eval.scorers import Scorer
from gewell.eval.tasks.sample import Request, Sample, user
from gewell.eval.tasks.words import CITIES, COLOURS, FIRST_NAMES, ITEMS, LAST_NAMES

_FIELDS: dict[str, tuple[str, Callable[[Random], Any]]] = {
    "name": ("string", lambda rng: f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"),
    "city": ("string", lambda rng: rng.choice(CITIES)),
    "item": ("string", lambda rng: rng.choice(ITEMS)),
    "colour": ("string", lambda rng: rng.choice(COLOURS)),
    "age": ("integer", lambda rng: rng.randrange(18, 99)),
    "count": ("integer", lambda rng: rng.randrange(1, 1000)),
    "price": ("number", lambda rng: rng.randrange(100, 10000) / 100),
    "paid": ("boolean", lambda rng: rng.random() < 0.5),
    "active": ("boolean", lambda rng: rng.random() < 0.5),
    "tags": ("array", lambda rng: rng.sample(COLOURS, rng.randint(1, 3))),
}


def make_json(request: Request) -> Sample:
    rng = request.rng
    facts = {name: _FIELDS[name][1](rng) for name in rng.sample(list(_FIELDS), rng.randint(2, 7))}
    wanted = rng.sample(list(facts), rng.randint(1, len(facts)))
    properties = {name: _property(_FIELDS[name][0]) for name in wanted}
    schema = {"type": "object", "properties": properties, "required": wanted}
    told = "; ".join(f"{name} {_plain(value)}" for name, value in facts.items())
    thinking = rng.random() < 0.1
    return Sample(
        task="json",
        messages=[user(f"Facts: {told}\nAnswer with JSON after this schema:\n{compact(schema)}")],
        answer=compact({name: facts[name] for name in wanted}),
        thinking=thinking,
        thought=f"Fields: {', '.join(wanted)}." if thinking else "",
        scorer=Scorer.JSON,
    )


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _property(kind: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}} if kind == "array" else {"type": kind}


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(value) if isinstance(value, list) else str(value)
