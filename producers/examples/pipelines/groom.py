"""Grooming records: a writer writes one out, a critic who knows the facts names a fault at a time, until it accepts.

gewell pipeline run groom.py items.jsonl -o out.jsonl
An item: {"id": "order-7", "draft": {"item": "mug", "count": "3"}, "facts": {"item": "mug", "count": "4"}}
The prompts are those that gewell-nano, the model that comes with the package, has learned.
"""

from gewell_producers.pipelines.pipeline import Item, ItemRun, Pipeline

from gewell.eval.tasks.writer_critic import ACCEPTED, critic_messages, writer_messages

MAX_ROUNDS = 4


async def groom(run: ItemRun, item: Item) -> dict[str, object]:
    rounds: list[tuple[str, str]] = []
    for _ in range(MAX_ROUNDS):
        record = await run.ask(
            "writer", writer_messages(item["draft"], rounds), back_after="critic", temperature=0, max_tokens=200
        )
        remark = await run.ask(
            "critic",
            critic_messages(item["facts"], record.text, rounds),
            back_after="writer",
            temperature=0,
            max_tokens=60,
        )
        rounds.append((record.text, remark.text))
        if remark.text == ACCEPTED:
            break
    return {"record": rounds[-1][0], "accepted": rounds[-1][1] == ACCEPTED, "rounds": len(rounds)}


pipeline = Pipeline(name="groom", work=groom)
