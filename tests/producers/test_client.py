"""The client against a real server. A wrong answer loses, doubles or reorders what a model said, or hangs silently."""

import asyncio
import itertools
import threading
import time
from pathlib import Path

import pytest
from gewell_producers.async_client import AsyncClient
from gewell_producers.client import Client
from gewell_producers.connection import Patience
from gewell_producers.errors import QueueFull, StreamDiverged, UnknownJob, Unreachable
from gewell_producers.job import Job

from gewell.embedded import EmbeddedServer, Persistence
from gewell.errors import ConfigError, InvalidRequest, JobFailed, NoWorker
from gewell.protocol import Channel, Lane, State, ToolDelta
from tests.producers.fake_worker import FakeWorker

pytestmark = pytest.mark.redis


def text_of(chunks):
    return "".join(chunk.text for chunk in chunks)


def submit(client, worker, **fields):
    job_id = client.submit(Job.completion("one two", **fields))
    return job_id, worker.take()


# --- following --------------------------------------------------------------------------------------------------------


def test_follower_that_came_first_hears_everything(client, worker):
    job_id, job = submit(client, worker)
    heard = []
    follower = threading.Thread(target=lambda: heard.extend(client.follow(job_id)))
    follower.start()
    time.sleep(0.1)
    job.claim()
    for word in "abcdef":
        job.chunk(word)
    record = job.finish()
    follower.join(5)
    assert [chunk.text for chunk in heard] == list("abcdef")
    assert tuple(i for chunk in heard for i in chunk.ids) == record.token_ids


def test_follower_that_waits_before_the_job_is_submitted(client, worker):
    job = Job.completion("x")
    heard = []
    follower = threading.Thread(target=lambda: heard.extend(client.follow(job.id)))
    follower.start()
    time.sleep(0.1)
    client.submit(job)
    taken = worker.take().claim()
    taken.chunk("late")
    taken.finish()
    follower.join(5)
    assert text_of(heard) == "late"


def test_late_follower_reads_the_whole_stream(client, worker):
    job_id, job = submit(client, worker)
    job.claim()
    for word in "abc":
        job.chunk(word)
    job.finish()
    stream = client.follow(job_id)
    assert [chunk.text for chunk in stream] == ["a", "b", "c"]
    assert stream.end.state is State.DONE
    assert stream.record().text == "abc"


def test_messages_that_were_never_published_are_found_after_silence(client, worker):
    job_id, job = submit(client, worker)
    job.claim()
    job.chunk("a")
    stream = client.follow(job_id)
    assert next(stream).text == "a"
    job.chunk("b", publish=False)
    assert next(stream).text == "b"  # 1 s of silence, then the range
    job.chunk("c", publish=False)
    job.chunk("d")  # not the next one: a gap
    started = time.monotonic()
    assert (next(stream).text, next(stream).text) == ("c", "d")
    assert time.monotonic() - started < 0.5
    job.finish(publish=False)
    assert list(stream) == []


def test_slow_follower_loses_nothing_when_the_server_cuts_it(client, worker, raw):
    job_id, job = submit(client, worker)
    job.claim()
    heard = []
    for i, chunk in enumerate(_started(client.follow(job_id), job)):
        heard.append(chunk.text)
        if i < 20:
            raw.client_kill_filter(_type="pubsub")  # what the server does to a follower whose buffer is full
            job.chunk(f"{i}b ")
            job.chunk(f"{i}c ")
        elif i == 20:
            job.finish()
    assert heard == [chunk.text for chunk in client.follow(job_id)]
    assert len(heard) == 41


def _started(stream, job):
    job.chunk("first ")
    return stream


def test_epoch_change_in_mid_stream_shows_no_seam(client, worker):
    job_id, job = submit(client, worker)
    job.claim()
    stream = client.follow(job_id)
    job.chunk("ab")
    assert next(stream).text == "ab"
    job.chunk("cd", publish=False)  # the dying worker's last chunk was stored, not published
    job.claim()
    job.chunk("ef")
    job.claim()  # twice more, with nothing written between
    job.claim()
    job.chunk("gh")
    job.finish()
    assert [chunk.text for chunk in stream] == ["cd", "ef", "gh"]


def test_new_epoch_that_repeats_tokens_delivers_only_what_is_new(client, worker):
    job_id, job = submit(client, worker)
    job.claim()
    job.chunk("ab")
    job.chunk("cd")
    stream = client.follow(job_id)
    assert (next(stream).text, next(stream).text) == ("ab", "cd")
    job.claim(keep=2)
    job.chunk("cdef")
    job.finish(text="abcdef")
    rest = list(stream)
    assert text_of(rest) == "ef"
    assert [chunk.ids for chunk in rest] == [tuple(b"ef")]


def test_stream_that_the_server_lost_is_read_from_its_beginning_without_repeats(client, worker, raw, keys):
    job_id, job = submit(client, worker)
    job.claim()
    for word in ("ab", "cd"):
        job.chunk(word)
    stream = client.follow(job_id)
    assert (next(stream).text, next(stream).text) == ("ab", "cd")
    raw.delete(keys.out(job_id), keys.job(job_id))
    job.claim(keep=0)  # epoch 1 again: the new stream has lower ids than were seen
    job.chunk("abcdef")
    job.finish(text="abcdef")
    assert text_of(stream) == "ef"


def test_lost_stream_with_other_tokens_is_an_error_not_a_mixture(client, worker, raw, keys):
    job_id, job = submit(client, worker)
    job.claim()
    job.chunk("abcd")
    stream = client.follow(job_id)
    next(stream)
    raw.delete(keys.out(job_id), keys.job(job_id))
    job.claim(keep=0)
    job.chunk("abXd")
    with pytest.raises(StreamDiverged, match="from token 2 on"):
        next(stream)


def test_expired_stream_is_completed_from_the_result(client, worker, raw, keys):
    job_id, job = submit(client, worker)
    job.claim()
    job.chunk("ab")
    stream = client.follow(job_id)
    assert next(stream).text == "ab"
    job.chunk("cd", publish=False)
    job.finish(publish=False)
    raw.delete(keys.out(job_id))
    assert text_of(stream) == "cd"
    assert text_of(client.follow(job_id)) == "abcd"
    assert stream.record().token_ids == tuple(b"abcd")


def test_channels_and_tool_calls_survive_the_loss_of_the_stream(client, worker, raw, keys):
    job_id, job = submit(client, worker)
    job.claim()
    job.chunk("hm", channel=Channel.REASONING)
    call = ToolDelta(index=0, id="c0", name="add", arguments_delta='{"a":')
    job.chunk("", [1], channel=Channel.TOOL, tool=call)
    stream = client.follow(job_id)
    next(stream), next(stream)
    job.finish(
        publish=False, text="ok", reasoning="hm", tool_calls=({"id": "c0", "name": "add", "arguments": '{"a":1}'},),
        token_ids=(*b"hm", 1, 2, 3),
    )  # fmt: skip
    raw.delete(keys.out(job_id))
    rest = list(stream)
    assert [chunk.tool for chunk in rest if chunk.tool] == [ToolDelta(index=0, arguments_delta="1}")]
    assert text_of(rest) == "ok"
    assert [i for chunk in rest for i in chunk.ids] == [2, 3]


def test_expired_result_is_unknown(impatient, worker, raw, keys, monkeypatch):
    monkeypatch.setattr("gewell_producers.stream.UNKNOWN_GRACE_S", 0.5)
    job_id, job = submit(impatient, worker)
    job.claim()
    job.finish()
    raw.delete(keys.out(job_id), keys.res(job_id), keys.job(job_id))
    with pytest.raises(UnknownJob, match=job_id):
        impatient.result(job_id)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_reader_cut_every_few_chunks_resumes_behind_the_last_one(client, worker, every):
    job_id, job = submit(client, worker)
    job.claim()
    for i in range(12):
        job.chunk(f"{i} ")
        if i == 6:
            job.claim()
    job.finish()
    heard, last = [], None
    for _ in range(100):
        with client.follow(job_id, after=last) as stream:
            part = list(itertools.islice(stream, every))
            last = str(stream.last)
        heard += part
        if not part:
            break
    assert text_of(heard) == "".join(f"{i} " for i in range(12))


# --- results ----------------------------------------------------------------------------------------------------------


def test_result_waits_for_the_end_and_is_typed(client, worker):
    worker.serve()
    record = client.run(Job.chat("say this backwards", job={"metadata": {"row": 7}}))
    assert record.text == "backwards this say"
    assert record.metadata == {"row": 7}
    assert record.usage.completion == len(record.token_ids) == 18


def test_answer_of_another_request_under_the_same_id_is_not_handed_out(client, worker):
    worker.serve()
    assert client.run(Job.completion("a b", job={"id": "same"})).text == "b a"
    assert client.run(Job.completion("a b", job={"id": "same"})).text == "b a"
    with pytest.raises(InvalidRequest, match="id same was used for another request"):
        client.run(Job.completion("c d", job={"id": "same"}))


def test_failed_job_raises_with_its_record(client, worker):
    worker.serve()
    with pytest.raises(JobFailed, match="ended as error") as caught:
        client.run(Job.completion("fail"))
    assert caught.value.record["state"] == "error"


def test_result_gives_up_after_its_timeout(client, worker):
    job_id = client.submit(Job.completion("x"))
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=job_id):
        client.result(job_id, timeout_s=0.3)
    assert time.monotonic() - started < 2


def test_waiting_without_a_worker_says_what_to_do(impatient, worker):
    job_id = impatient.submit(Job.completion("x"))
    worker.die()
    with pytest.raises(NoWorker, match="start one with `gewell up`"):
        impatient.result(job_id)


def test_worker_that_comes_in_time_is_waited_for(server, ns, worker):
    worker.die()
    with Client(server.url, namespace=ns, patience=Patience(no_worker_s=30)) as client:
        job_id = client.submit(Job.completion("a b"))
        threading.Timer(1.2, lambda: (worker.register(), worker.serve())).start()
        assert client.result(job_id).text == "b a"


# --- submitting -------------------------------------------------------------------------------------------------------


def test_faulty_job_is_refused_before_anything_is_sent(client, raw, keys):
    with pytest.raises(InvalidRequest, match="temperature"):
        client.submit(Job.completion("x", temperature=-1))
    with pytest.raises(InvalidRequest, match="body of"):
        client.submit(Job.completion("x" * 9_000_000))
    with pytest.raises(InvalidRequest, match="id"):
        Job.completion("x", job={"id": "not usable"})
    assert raw.exists(keys.jobs(Lane.NORMAL)) == 0


def test_submit_many_takes_a_generator_lazily_and_keeps_order(client, raw, keys):
    seen = 0

    def jobs():
        nonlocal seen
        for i in range(1000):
            seen += 1
            assert seen - raw.xlen(keys.jobs(Lane.LOW)) <= 100
            yield Job.completion("x", job={"id": f"j{i}", "lane": Lane.LOW})

    assert client.submit_many(jobs(), batch_size=100) == 1000
    ids = [fields[b"id"].decode() for _, fields in raw.xrange(keys.jobs(Lane.LOW))]
    assert ids == [f"j{i}" for i in range(1000)]


def test_full_queue_is_waited_for_and_then_refused(impatient, worker, raw, keys):
    raw.hset(keys.info, "max_queue_len", 10)
    assert impatient.submit_many((Job.completion("x") for _ in range(10)), batch_size=5) == 10
    with pytest.raises(QueueFull, match="holds 10 jobs, its limit is 10"):
        impatient.submit(Job.completion("x"))
    threading.Timer(0.1, lambda: worker.take().claim().finish()).start()
    impatient.submit(Job.completion("x"))


def test_unreachable_server_is_named_without_its_password():
    patience = Patience(connect_s=0.1)
    client = Client("redis://user:secret@127.0.0.1:1/0", patience=patience)
    with client, pytest.raises(Unreachable, match=r"no Redis at redis://127.0.0.1:1/0 .*gewell up") as caught:
        client.submit(Job.completion("x"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"temperature": "VALUE"}, "request.temperature"),
        ({"logit_bias": {"7": "VALUE"}}, "request.logit_bias.7"),
        ({"job": {"metadata": [1, ("VALUE",)]}}, "metadata[1][0]"),
    ],
)
def test_what_is_no_number_is_refused_and_not_sent_as_not_given(fields: dict, path: str, value: float):
    def put(item):
        if isinstance(item, dict):
            return {name: put(inner) for name, inner in item.items()}
        return type(item)(map(put, item)) if isinstance(item, list | tuple) else value if item == "VALUE" else item

    with pytest.raises(InvalidRequest) as caught:
        Job.completion("hi", **put(fields)).body()
    assert caught.value.field == path


def test_body_that_contains_itself_or_is_nested_too_deep_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(InvalidRequest, match="metadata: nested too deep"):
        Job.completion("hi", job={"metadata": loop}).body()


@pytest.mark.parametrize(
    "url", ["redis://:secret@127.0.0.1:99999/0", "redis://:secret@127.0.0.1:port/0", "http://:secret@127.0.0.1/0"]
)
def test_unusable_url_is_a_setting_at_fault_and_hides_its_password(url: str):
    with pytest.raises(ConfigError) as caught:
        Client(url)
    assert "127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_both_clients_reach_a_server_over_its_unix_socket(data_dir: Path):
    async def submit_async(url: str) -> str:
        async with AsyncClient(url) as client:
            return await client.submit(Job.completion("hi", job={"id": "b"}))

    with EmbeddedServer(data_dir, unix_socket=data_dir / "s") as server:
        assert server.url.startswith("unix://")
        with Client(server.url) as client:
            assert client.submit(Job.completion("hi", job={"id": "a"})) == "a"
        assert asyncio.run(submit_async(server.url)) == "b"


def test_map_yields_failures_too_and_leaves_no_inbox(client, worker, raw, ns):
    worker.serve()
    jobs = [Job.completion("fail" if i == 3 else f"a {i}", job={"id": f"m{i}"}) for i in range(50)]
    records = {record.id: record for record in client.map(jobs, max_in_flight=7)}
    assert {record.state for record in records.values()} == {State.DONE, State.ERROR}
    assert records["m4"].text == "4 a"
    assert len(records) == 50
    assert list(raw.scan_iter(f"{ns}:inbox:*")) == []
    assert raw.xlen(f"{ns}:jobs:normal") == 0


def test_map_keeps_no_more_in_flight_than_asked(client, worker, raw, keys):
    worker.serve()
    most = 0

    def jobs():
        nonlocal most
        for i in range(200):
            most = max(most, raw.xlen(keys.jobs(Lane.NORMAL)))
            yield Job.completion(f"a {i}")

    assert len(list(client.map(jobs(), max_in_flight=16))) == 200
    assert most <= 16


def test_gather_keeps_the_jobs_order(client, worker):
    worker.serve()
    records = client.gather(Job.completion(f"a {i}") for i in range(30))
    assert [record.text for record in records] == [f"{i} a" for i in range(30)]


def test_second_run_with_the_same_ids_is_answered_from_the_first(client, worker):
    worker.serve()
    jobs = [Job.completion(f"a {i}", job={"id": f"same-{i}"}) for i in range(20)]
    first = {record.id: record.text for record in client.map(jobs[:12], inbox="groomer")}
    second = {record.id: record.text for record in client.map(jobs, inbox="groomer")}
    assert len(first) == 12
    assert first.items() <= second.items()
    assert worker.num_duplicates == 12


def test_cancel_names_exactly_one_thing(client, raw, keys):
    client.cancel("j1")
    client.cancel(conversation="c1")
    client.cancel(tenant="t1")
    fields = [entry for _, entry in raw.xrange(keys.cancel)]
    assert fields == [{b"id": b"j1"}, {b"conv": b"c1"}, {b"tenant": b"t1"}]
    with pytest.raises(InvalidRequest, match="exactly one"):
        client.cancel("j1", tenant="t1")


# --- outages ----------------------------------------------------------------------------------------------------------


def test_follow_and_map_survive_a_restart_of_the_server(data_dir):
    server = EmbeddedServer(data_dir, persistence=Persistence.EVERYSEC).start()
    try:
        with FakeWorker(server.url, "r") as worker, Client(server.url, namespace="r") as client:
            job_id, job = submit(client, worker)
            job.claim()
            stream = client.follow(job_id)
            job.chunk("before ")
            assert next(stream).text == "before "
            server.stop()
            threading.Timer(0.3, lambda: (server.start(), job.chunk("after"), job.finish())).start()
            assert text_of(stream) == "after"
            worker.serve()

            def jobs():
                for i in range(600):
                    if i == 300:
                        server.stop()
                        server.start()
                    yield Job.completion(f"a {i}", job={"id": f"r{i}"})

            records = {record.id: record for record in client.map(jobs(), max_in_flight=50)}
            assert len(records) == 600
            assert all(record.state is State.DONE for record in records.values())
    finally:
        server.stop()


def test_map_submits_again_what_a_server_without_memory_has_lost(data_dir):
    server = EmbeddedServer(data_dir, persistence=Persistence.NONE).start()
    try:
        with FakeWorker(server.url, "r") as worker, Client(server.url, namespace="r") as client:

            def forget_everything():
                server.stop()
                server.start()
                worker.register()
                worker.serve()

            threading.Timer(0.3, forget_everything).start()
            records = list(client.map(Job.completion(f"a {i}", job={"id": f"r{i}"}) for i in range(40)))
            assert sorted(record.id for record in records) == sorted(f"r{i}" for i in range(40))
            assert worker.num_duplicates == 0
    finally:
        server.stop()


def test_server_on_a_unix_socket_serves_as_well(data_dir, tmp_path):
    with (
        EmbeddedServer(data_dir, persistence=Persistence.NONE, unix_socket=tmp_path / "s") as server,
        FakeWorker(server.url, "u") as worker,
        Client(server.url, namespace="u") as client,
    ):
        worker.serve()
        assert client.run(Job.completion("a b")).text == "b a"


@pytest.mark.parametrize("url", ["http://:secret@host", "redis://:secret@host:port/0", "127.0.0.1:6379"])
def test_url_that_is_none_of_a_server_is_named_without_its_password(url):
    with pytest.raises(ConfigError, match="redis: ") as caught:
        Client(url)
    assert "secret" not in str(caught.value)
