"""The asynchronous client, where it differs from the other: many followers on one connection."""

import asyncio
import threading

import pytest
from gewell_producers.async_client import QUEUE_MESSAGES, AsyncClient
from gewell_producers.connection import Patience
from gewell_producers.errors import Unreachable
from gewell_producers.job import Job

from gewell.embedded import EmbeddedServer, Persistence
from gewell.errors import JobFailed, NoWorker
from gewell.protocol import State
from tests.producers.conftest import IMPATIENT
from tests.producers.fake_worker import FakeWorker

pytestmark = pytest.mark.redis


@pytest.fixture
async def client(server, ns):
    async with AsyncClient(server.url, namespace=ns) as made:
        yield made


async def follow(client, job_id, **options):
    async with client.follow(job_id, **options) as stream:
        return "".join([chunk.text async for chunk in stream])


async def submit(client, worker):
    job_id = await client.submit(Job.completion("one two"))
    return job_id, await asyncio.to_thread(worker.take)


async def test_two_hundred_followers_share_one_subscription(client, worker, raw):
    jobs = [Job.completion(f"a b {i}") for i in range(200)]
    followers = [asyncio.create_task(follow(client, job.id)) for job in jobs]
    await asyncio.sleep(0.2)
    await client.submit_many(jobs)
    await asyncio.to_thread(worker.serve)
    assert await asyncio.gather(*followers) == [f"{i} b a" for i in range(200)]
    assert len(raw.client_list(_type="pubsub")) == 1


async def test_epoch_change_and_unpublished_chunks_show_no_seam(client, worker):
    job_id, job = await submit(client, worker)
    job.claim()
    job.chunk("ab")
    following = asyncio.create_task(follow(client, job_id))
    await asyncio.sleep(0.1)
    job.chunk("cd", publish=False)
    job.claim()
    job.chunk("ef")
    job.finish()
    assert await following == "abcdef"


async def test_lost_subscription_is_made_again_for_all_followers(client, worker, raw):
    jobs = []
    for _ in range(5):
        jobs.append(await submit(client, worker))
    for _, job in jobs:
        job.claim()
        job.chunk("a")
    followers = [asyncio.create_task(follow(client, job_id)) for job_id, _ in jobs]
    for i in range(10):
        await asyncio.sleep(0.02)
        raw.client_kill_filter(_type="pubsub")
        for _, job in jobs:
            job.chunk(str(i))
    for _, job in jobs:
        job.finish()
    assert await asyncio.gather(*followers) == ["a0123456789"] * 5


async def test_follower_that_lags_behind_its_queue_reads_the_rest_from_the_stream(client, worker):
    job_id, job = await submit(client, worker)
    job.claim()
    job.chunk("0 ")
    async with client.follow(job_id) as stream:
        heard = [(await anext(stream)).text]
        num_chunks = QUEUE_MESSAGES * 3
        for i in range(1, num_chunks):
            job.chunk(f"{i} ")
        await asyncio.sleep(0.3)  # the hub has dropped what the queue could not hold
        job.finish()
        heard += [chunk.text async for chunk in stream]
    assert heard == [f"{i} " for i in range(num_chunks)]


async def test_two_followers_of_one_job_and_one_that_leaves_early(client, worker):
    job_id, job = await submit(client, worker)
    job.claim()
    job.chunk("a")
    async with client.follow(job_id) as short:
        assert (await anext(short)).text == "a"
        long = asyncio.create_task(follow(client, job_id))
        await asyncio.sleep(0.1)
    job.chunk("b")
    job.finish()
    assert await long == "ab"
    assert await follow(client, job_id, after=short.last) == "b"


async def test_follower_that_comes_back_to_a_channel_is_subscribed_again(client, worker):
    job_id, job = await submit(client, worker)
    job.claim()
    for i in range(20):
        job.chunk(str(i))
        async with client.follow(job_id) as stream:
            assert (await anext(stream)).text == "0"
    following = asyncio.create_task(follow(client, job_id))
    await asyncio.sleep(0.1)
    job.finish()
    assert await asyncio.wait_for(following, 0.5) == "".join(str(i) for i in range(20))


async def test_map_and_gather(client, worker):
    await asyncio.to_thread(worker.serve)
    jobs = [Job.completion("fail" if i == 7 else f"a {i}") for i in range(40)]
    states = [record.state async for record in client.map(jobs, max_in_flight=8)]
    assert sorted(states) == [State.DONE] * 39 + [State.ERROR]
    records = await client.gather([Job.completion(f"a {i}") for i in range(10)])
    assert [record.text for record in records] == [f"{i} a" for i in range(10)]


async def test_failures_and_absences_are_told(server, ns, worker):
    async with AsyncClient(server.url, namespace=ns, patience=IMPATIENT) as client:
        await asyncio.to_thread(worker.serve)
        with pytest.raises(JobFailed):
            await client.run(Job.completion("fail"))
        worker.die()
        with pytest.raises(NoWorker, match="gewell up"):
            await client.require_worker()
        with pytest.raises(TimeoutError):
            await client.result("not-there", timeout_s=0.1)
    async with AsyncClient("redis://127.0.0.1:1", patience=Patience(connect_s=0.1)) as client:
        with pytest.raises(Unreachable):
            await asyncio.wait_for(follow(client, "x"), 5)
        with pytest.raises(Unreachable):
            await client.submit(Job.completion("x"))


async def test_followers_and_map_survive_a_restart_of_the_server(data_dir):
    server = EmbeddedServer(data_dir, persistence=Persistence.EVERYSEC).start()
    try:
        with FakeWorker(server.url, "r") as worker:
            async with AsyncClient(server.url, namespace="r") as client:
                job_id, job = await submit(client, worker)
                job.claim()
                job.chunk("before ")
                following = asyncio.create_task(follow(client, job_id))
                await asyncio.sleep(0.1)
                await asyncio.to_thread(server.stop)
                await asyncio.sleep(0.2)
                await asyncio.to_thread(server.start)
                job.chunk("after")
                job.finish()
                assert await following == "before after"
                worker.serve()
                threading.Timer(0.1, lambda: (server.stop(), server.start())).start()
                jobs = (Job.completion(f"a {i}", job={"id": f"r{i}"}) for i in range(400))
                records = {record.id: record.state async for record in client.map(jobs, max_in_flight=50)}
                assert len(records) == 400
    finally:
        server.stop()
