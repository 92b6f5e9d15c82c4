"""Planner, writer and critic: the planner puts orders in sequence, then each is written and criticised in turn.

gewell pipeline run plan.py items.jsonl -o out.jsonl
An item: {"id": "batch-1", "orders": {"120": {"draft": {...}, "facts": {...}}, "45": {...}}}
Two critics look at the last record of each order side by side: one draft, one prefill, two opinions.
"""

from gewell_producers.pipelines.pipeline import Item, ItemRun, Pipeline

from gewell.eval.tasks.writer_critic import ACCEPTED, critic_messages, writer_messages

MAX_ROUNDS = 4


async def plan(run: ItemRun, item: Item) -> dict[str, object]:
    orders = item["orders"]
    question = f"Sort these numbers from small to large:\n{' '.join(orders)}"
    planned = await run.ask("planner", [{"role": "user", "content": question}], last=True, temperature=0, max_tokens=60)
    sequence = [number for number in planned.text.split() if number in orders]
    results = []
    for number in sequence:
        draft, facts = orders[number]["draft"], orders[number]["facts"]
        writer, critic = f"writer-{number}", f"critic-{number}"  # a conversation of its own for each order
        rounds: list[tuple[str, str]] = []
        while len(rounds) < MAX_ROUNDS and (not rounds or rounds[-1][1] != ACCEPTED):
            record = await run.ask(
                writer, writer_messages(draft, rounds), back_after=critic, temperature=0, max_tokens=200
            )
            remark = await run.ask(
                critic,
                critic_messages(facts, record.text, rounds),
                back_after=writer,
                temperature=0,
                max_tokens=60,
            )
            rounds.append((record.text, remark.text))
        final = critic_messages(facts, rounds[-1][0])
        votes = await run.ask_all(f"judge-{number}", [final, final], temperature=0, max_tokens=60)
        accepted = sum(vote.text == ACCEPTED for vote in votes)
        results.append({"order": number, "record": rounds[-1][0], "rounds": len(rounds), "votes": accepted})
    return {"plan": sequence, "orders": results}


pipeline = Pipeline(name="plan", work=plan)
