"""Clients and the real worker together (engine without weights), while workers die and servers stop."""

import asyncio
import os
import subprocess
import sys
import time

import pytest
from gewell_producers.async_client import AsyncClient
from gewell_producers.client import Client
from gewell_producers.job import Job

from gewell.embedded import EmbeddedServer, Persistence
from gewell.protocol import State

pytestmark = pytest.mark.redis

LEASE_S = 1.0
TEXT = {"max_tokens": 60, "temperature": 1, "ignore_eos": True}


class Workers:
    """Worker processes on one server."""

    def __init__(self, url, folder):
        self._url, self._folder = url, folder
        self.processes = []

    def start(self, step_s=0.02):
        command = [sys.executable, "-m", "gewell_workers", "--redis", self._url, "--model", "scripted"]
        environment = os.environ | {"GEWELL_SCRIPTED_STEP_S": str(step_s)}
        with (self._folder / f"worker-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen([*command, "--lease-s", str(LEASE_S)], stdout=log, stderr=log, env=environment)
        self.processes.append(process)
        with Client(self._url, namespace="gewell") as client:
            before = time.monotonic()
            while len(client.workers()) < sum(each.poll() is None for each in self.processes):
                assert process.poll() is None, (self._folder / f"worker-{len(self.processes) - 1}.log").read_text()
                assert time.monotonic() - before < 30
                time.sleep(0.05)
        return process

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def server(data_dir):
    with EmbeddedServer(data_dir, persistence=Persistence.EVERYSEC) as running:
        yield running


@pytest.fixture
def workers(server, tmp_path):
    made = Workers(server.url, tmp_path)
    yield made
    made.stop()


async def follow(client, job_id):
    async with client.follow(job_id) as stream:
        chunks = [chunk async for chunk in stream]
        record = await stream.record()
    return "".join(chunk.text for chunk in chunks), [i for chunk in chunks for i in chunk.ids], record


async def test_followers_see_no_seam_when_a_worker_is_killed_and_another_goes_on(server, workers):
    first = workers.start()
    jobs = [Job.completion(f"prompt {i}", **TEXT) for i in range(12)]
    async with AsyncClient(server.url, namespace="gewell") as client:
        await client.submit_many(jobs)
        following = [asyncio.create_task(follow(client, job.id)) for job in jobs]
        await asyncio.sleep(0.6)
        first.kill()
        await asyncio.to_thread(workers.start)
        seen = await asyncio.gather(*following)
    for text, ids, record in seen:
        assert record.state is State.DONE
        assert (text, tuple(ids)) == (record.text, record.token_ids)
        assert len(ids) == 60
    assert any(record.epoch > 1 for _, _, record in seen)


def test_map_gets_every_record_once_while_workers_come_and_go_and_the_server_restarts(server, workers):
    workers.start(0.001)
    num_jobs = 400

    def jobs():
        for i in range(num_jobs):
            if i == 100:
                workers.processes[0].kill()
                workers.start(0.001)
            if i == 250:
                server.stop()
                server.start()
            yield Job.completion(f"prompt {i}", job={"id": f"j{i}"}, **TEXT | {"max_tokens": 8})

    with Client(server.url, namespace="gewell") as client:
        records = list(client.map(jobs(), max_in_flight=64))
        assert sorted(record.id for record in records) == sorted(f"j{i}" for i in range(num_jobs))
        assert {record.state for record in records} == {State.DONE}
        assert sum(client.queue_lengths().values()) == 0


def test_cancelled_conversation_ends_running_and_queued_jobs_and_no_later_one(server, workers):
    workers.start()
    long = TEXT | {"max_tokens": 2000}
    mine = [Job.completion(f"mine {i}", job={"conversation": "c1"}, **long) for i in range(6)]
    with Client(server.url, namespace="gewell") as client:
        client.submit_many(mine)
        stream = client.follow(mine[0].id)
        assert next(stream).ids
        time.sleep(0.01)
        client.cancel(conversation="c1")
        assert stream.record().state is State.CANCELLED
        for job in mine:
            with client.follow(job.id, timeout_s=20) as each:
                assert each.record().state is State.CANCELLED
        assert client.run(Job.completion("later", job={"conversation": "c1"}, **TEXT | {"max_tokens": 3})).text
