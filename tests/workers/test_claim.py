"""Claims against a real server, two claimers side by side: the wrong one of them winning means a job answered twice."""

from dataclasses import replace

import pytest
from gewell_workers.claim import Claim, Known, Taken, Wanted, claim_jobs, fold, look_up, watch
from gewell_workers.resp import Client
from harness import Harness

from gewell.protocol import Lane, State

pytestmark = pytest.mark.redis


def taken(job_id: str = "a", entry_id: str = "5-0") -> Taken:
    return Taken(lane=Lane.NORMAL, entry_id=entry_id, job_id=job_id, body=b"{}")


async def connect(harness: Harness) -> Client:
    client = Client(harness.server.url, name="test")
    await client.connect()
    return client


async def look(client: Client, harness: Harness, *entries: Taken) -> list[Known]:
    return await look_up(client, harness.keys, [(one, "digest", None, None, 7) for one in entries])


async def claim(client: Client, harness: Harness, *pairs: tuple[Taken, Known], by: str = "w") -> list[Claim | None]:
    wanted = [Wanted(taken=one, known=known, is_crash=False) for one, known in pairs]
    return await claim_jobs(client, harness.keys, wanted, worker_id=by, fingerprint="f", now_ms=1)


async def test_first_claim_opens_the_stream(any_harness: Harness):
    client = await connect(any_harness)
    (known,) = await look(client, any_harness, taken())
    (made,) = await claim(client, any_harness, (taken(), known))
    assert made is not None
    assert (made.epoch, made.kept.ids, made.same_model) == (1, [], True)
    assert any_harness.redis.xrange(any_harness.keys.out("a")) == [
        (b"1-0", {b"fence": b"1"}),
        (b"1-1", {b"restart": b'{"keep":0}'}),
    ]
    assert any_harness.state("a") == State.RUNNING
    client.close()


async def test_of_two_claims_after_one_look_the_later_wins_and_fences_the_earlier(any_harness: Harness):
    first, second = await connect(any_harness), await connect(any_harness)
    (known_1,), (known_2,) = await look(first, any_harness, taken()), await look(second, any_harness, taken())
    (made_1,) = await claim(first, any_harness, (taken(), known_1))
    (made_2,) = await claim(second, any_harness, (taken(), known_2))
    assert made_1 is not None
    assert made_2 is not None
    assert (made_1.epoch, made_2.epoch) == (1, 2)
    with pytest.raises(Exception, match="equal or smaller"):
        any_harness.redis.xadd(any_harness.keys.out("a"), {"d": "{}"}, id="1-2", nomkstream=True)
    first.close()
    second.close()


async def test_job_that_ended_between_two_looks_is_not_claimed_again(any_harness: Harness):
    """Found by chaos: a second look, needed after another transaction, saw the end and claimed all the same."""
    client = await connect(any_harness)
    (known,) = await look(client, any_harness, taken())
    any_harness.redis.hset(any_harness.keys.job("a"), mapping={"state": "done", "epoch": 1})
    assert await claim(client, any_harness, (taken(), known)) == [None]  # the old look is no longer worth anything
    (again,) = await watch(client, any_harness.keys, [taken()])
    assert await claim(client, any_harness, (taken(), again)) == [None]
    assert any_harness.state("a") == State.DONE
    assert not any_harness.redis.exists(any_harness.keys.out("a"))
    client.close()


async def test_one_changed_job_does_not_keep_the_others_of_the_batch_unclaimed(any_harness: Harness):
    client = await connect(any_harness)
    entries = [taken("a", "5-0"), taken("b", "6-0"), taken("c", "7-0")]
    known = await look(client, any_harness, *entries)
    any_harness.redis.hset(any_harness.keys.job("b"), mapping={"state": "cancelled"})
    made = await claim(client, any_harness, *zip(entries, known, strict=True))
    assert [one and one.epoch for one in made] == [1, None, 1]
    client.close()


async def test_entry_of_a_known_id_is_told_from_its_owner(any_harness: Harness):
    client = await connect(any_harness)
    first, second = await look(client, any_harness, taken(entry_id="5-0"), taken(entry_id="6-0"))
    assert first.entry == second.entry == "normal/5-0"
    assert await claim(client, any_harness, (taken(entry_id="6-0"), second)) == [None]
    client.close()


async def test_later_claim_keeps_what_stands_and_knows_another_model(any_harness: Harness):
    client = await connect(any_harness)
    (known,) = await look(client, any_harness, taken())
    await claim(client, any_harness, (taken(), known))
    any_harness.redis.xadd(any_harness.keys.out("a"), {"d": '{"ids":[65,66],"t":"AB","ch":"content"}'}, id="1-2")
    (known,) = await look(client, any_harness, taken())
    (made,) = await claim(client, any_harness, (taken(), known))
    assert made is not None
    assert (made.epoch, made.kept.ids, made.kept.text, made.same_model) == (2, [65, 66], {"content": "AB"}, True)
    assert any_harness.redis.xrange(any_harness.keys.out("a"))[-1] == (b"2-1", {b"restart": b'{"keep":2}'})
    any_harness.redis.hset(any_harness.keys.job("a"), "fingerprint", "another")
    (known,) = await look(client, any_harness, taken())
    (made,) = await claim(client, any_harness, (taken(), known))
    assert made is not None
    assert not made.same_model
    client.close()


async def test_lost_hash_does_not_begin_below_the_epochs_of_the_stream(any_harness: Harness):
    client = await connect(any_harness)
    for entry_id in ("4-0", "4-1"):
        any_harness.redis.xadd(any_harness.keys.out("a"), {"fence": "1"}, id=entry_id)
    (known,) = await look(client, any_harness, taken())
    (made,) = await claim(client, any_harness, (taken(), known))
    assert made is not None
    assert made.epoch == 5
    assert any_harness.redis.hget(any_harness.keys.job("a"), "epoch") == b"5"
    client.close()


def test_restart_that_keeps_less_begins_anew():
    def entry(name: str, value: str) -> list[bytes]:
        return [name.encode(), value.encode()]

    kept = fold(
        [
            (b"1-2", entry("d", '{"ids":[1,2],"t":"ab","ch":"content"}')),
            (b"1-3", entry("restart", '{"keep":0}')),
            (b"1-4", entry("d", '{"ids":[1],"t":"a","ch":"content"}')),
            (b"2-1", entry("restart", '{"keep":1}')),
            (b"2-2", entry("d", '{"ids":[3],"t":"c","ch":"reasoning"}')),
        ]
    )
    assert kept.ids == [1, 3]
    assert kept.text == {"content": "a", "reasoning": "c"}


def test_taken_knows_when_it_was_sent():
    assert replace(taken(), entry_id="1700000000123-4").enqueued_at_ms == 1_700_000_000_123
