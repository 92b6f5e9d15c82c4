"""Which lane is read how often: a wrong share starves somebody for days."""

import pytest
from gewell_workers.lanes import LaneReader
from gewell_workers.resp import Client
from harness import Harness

from gewell.protocol import Lane

pytestmark = pytest.mark.redis


async def reader(harness: Harness) -> tuple[LaneReader, Client]:
    client = Client(harness.server.url, name="test")
    await client.connect()
    made = LaneReader(client, harness.keys, "me")
    await made.ensure_groups()
    await made.ensure_groups()  # again without harm
    return made, client


def fill(harness: Harness, **counts: int) -> None:
    for lane, count in counts.items():
        for idx in range(count):
            harness.redis.xadd(harness.keys.jobs(lane), {"id": f"{lane}-{idx}", "body": "{}"})


async def test_lanes_share_eight_to_four_to_one_even_with_room_for_one(harness: Harness):
    made, client = await reader(harness)
    fill(harness, high=100, normal=100, low=100)
    read = [(await made.read(1, list(Lane)))[0].lane for _ in range(26)]
    assert {lane: read.count(lane) for lane in Lane} == {Lane.HIGH: 16, Lane.NORMAL: 8, Lane.LOW: 2}
    assert Lane.LOW in read[:13]
    client.close()


async def test_empty_lane_leaves_its_share_to_the_others(harness: Harness):
    made, client = await reader(harness)
    fill(harness, low=30, normal=3)
    read = [taken.lane for taken in await made.read(26, list(Lane))]
    assert (read.count(Lane.NORMAL), read.count(Lane.LOW)) == (3, 23)
    client.close()


async def test_paused_lanes_are_not_read_and_order_is_kept(harness: Harness):
    made, client = await reader(harness)
    fill(harness, low=5, normal=5)
    taken = await made.read(10, [Lane.LOW])
    assert [one.job_id for one in taken] == [f"low-{idx}" for idx in range(5)]
    assert await made.read(10, []) == []
    client.close()


async def test_lost_group_is_made_again_and_its_entries_come_back(harness: Harness):
    made, client = await reader(harness)
    fill(harness, normal=2)
    assert len(await made.read(10, list(Lane))) == 2
    harness.redis.xgroup_destroy(harness.keys.jobs("normal"), "gpu")
    assert await made.read(10, list(Lane)) == []
    assert [one.job_id for one in await made.read(10, list(Lane))] == ["normal-0", "normal-1"]
    client.close()
