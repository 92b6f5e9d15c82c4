"""One tool call: the right tool of those declared with the right arguments, or the answer once the tool has spoken."""

from random import Random
from typing import Any

from gewell.eval.tasks.sample import Request, Sample, assistant, user
from gewell.eval.tasks.words import CITIES, FIRST_NAMES, ITEMS

_TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "get_weather": ("Weather of a city", {"city": "string"}),
    "get_time": ("Local time of a city", {"city": "string"}),
    "get_price": ("Price of an item", {"item": "string"}),
    "add_item": ("Put items on the list", {"count": "integer", "item": "string"}),
    "send_note": ("Send a note to a person", {"name": "string", "text": "string"}),
}


def tool_declaration(name: str) -> dict[str, Any]:
    about, parameters = _TOOLS[name]
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def make_tool(request: Request) -> Sample:
    rng = request.rng
    names = rng.sample(list(_TOOLS), rng.randint(1, 3))
    tools = [tool_declaration(name) for name in names]
    name = rng.choice(names)
    question, arguments, result, said = _use(rng, name)
    if rng.random() < 0.6:
        call = {"name": name, "arguments": arguments}
        return Sample(task="tool", messages=[user(question)], tools=tools, call=call)
    messages = [
        user(question),
        {
            **assistant(""),
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": result},
    ]
    return Sample(task="tool", messages=messages, tools=tools, answer=said)


def _use(rng: Random, name: str) -> tuple[str, dict[str, Any], str, str]:
    """A question, the arguments it needs, what the tool answers, and what the model then says."""
    city, item, person = rng.choice(CITIES), rng.choice(ITEMS), rng.choice(FIRST_NAMES)
    number = rng.randrange(2, 100)
    if name == "get_weather":
        sky = rng.choice(("sunny", "windy", "cold", "warm"))
        result = f"{sky}, {number} degrees"
        return f"How is the weather in {city}?", {"city": city}, result, f"The weather in {city} is {result}."
    if name == "get_time":
        time = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
        return f"What time is it in {city}?", {"city": city}, time, f"It is {time} in {city}."
    if name == "get_price":
        return f"What does a {item} cost?", {"item": item}, str(number), f"A {item} costs {number}."
    if name == "add_item":
        return f"Put {number} {item} on the list.", {"item": item, "count": number}, "done", "Done."
    text = f"bring the {item}"
    return f"Tell {person} to {text}.", {"name": person, "text": text}, "sent", f"I told {person}."
