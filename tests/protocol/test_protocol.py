"""The contract's shapes: a change here breaks producers in other languages, so the bytes are spelled out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gewell.errors import InvalidRequest
from gewell.protocol import (
    RETRYABLE,
    TERMINAL_STATES,
    Channel,
    Chunk,
    End,
    EntryId,
    ErrorCode,
    ErrorInfo,
    Fence,
    FinalRecord,
    Keys,
    Restart,
    State,
    Timing,
    ToolDelta,
    Usage,
    event_message,
    expand_ids,
    is_valid_id,
    job_entry,
    parse_entry,
    parse_message,
)


def test_names_of_all_keys():
    keys = Keys("ns")
    assert keys.jobs("high") == "ns:jobs:high"
    assert keys.job("a") == "ns:job:a"
    assert keys.out("a") == "ns:out:a"
    assert keys.ev("a") == "ns:ev:a"
    assert keys.res("a") == "ns:res:a"
    assert keys.inbox("r") == "ns:inbox:r"
    assert keys.cancel == "ns:cancel"
    assert keys.cancel_marker("conv", "c") == "ns:cancel:conv:c"
    assert keys.blob("0" * 64) == "ns:blob:" + "0" * 64
    assert keys.worker("w") == "ns:worker:w"
    assert (keys.info, keys.dead, keys.ctl) == ("ns:info", "ns:dead", "ns:ctl")


@pytest.mark.parametrize("bad", ["", "a b", "a*", "a\n", "ä", "x" * 129, "{a}", "a/b", None, 5])
def test_no_id_leaves_its_key_pattern(bad):
    assert not is_valid_id(bad)
    keys = Keys("ns")
    for make in (keys.job, keys.out, keys.ev, keys.res, keys.inbox, keys.worker):
        with pytest.raises(InvalidRequest):
            make(bad)


@given(st.text(max_size=20))
def test_a_key_has_exactly_one_namespace_and_kind(text: str):
    """Whatever the id, the key is read back one way: no id of one kind is a key of another."""
    if is_valid_id(text):
        assert Keys("ns").job(text).split(":", 2) == ["ns", "job", text]


def test_namespace_cannot_be_a_prefix_of_another_namespaces_keys():
    with pytest.raises(InvalidRequest):
        Keys("gewell:job")
    with pytest.raises(InvalidRequest):
        Keys("")


def test_unknown_lane_is_refused():
    with pytest.raises(ValueError, match="urgent"):
        Keys().jobs("urgent")


def test_job_entry_and_groups():
    assert job_entry("a", b"{}") == {"v": "1", "id": "a", "body": b"{}"}
    assert expand_ids("a", 1) == ["a"]
    assert expand_ids("a", 3) == ["a.0", "a.1", "a.2"]


def test_chunk_bytes():
    assert Chunk(ids=(1, 2), text="hé").to_json() == '{"ids":[1,2],"t":"hé","ch":"content"}'.encode()
    delta = ToolDelta(index=0, id="c1", name="f", arguments_delta="{}")
    assert Chunk(ids=(), channel=Channel.TOOL, tool=delta).to_json() == (
        b'{"ids":[],"t":"","ch":"tool","tool":{"index":0,"id":"c1","name":"f","arguments_delta":"{}"}}'
    )


@pytest.mark.parametrize(
    "entry",
    [
        Chunk(ids=(1,), text="a", logprobs=({"id": 1, "t": "a", "b": [97], "lp": -0.5, "top": []},)),
        Chunk(channel=Channel.TOOL, tool=ToolDelta(index=1, id="x", name="f", arguments_delta="{")),
        End(state=State.DONE, finish_reason="stop", usage=Usage(prompt=3, completion=2)),
        End(state=State.ERROR, finish_reason="error", usage=Usage(), error=ErrorInfo(code="internal", message="m")),
    ],
)
def test_entries_and_messages_are_read_back(entry):
    name = "d" if isinstance(entry, Chunk) else "end"
    assert parse_entry({name.encode(): entry.to_json()}) == entry
    assert parse_entry({name: entry.to_json().decode()}) == entry
    message = event_message(EntryId(3, 17), entry.to_json())
    assert message.startswith(b"3-17 {")
    assert parse_message(message) == (EntryId(3, 17), entry)
    assert parse_message(message.decode()) == (EntryId(3, 17), entry)


def test_fence_and_restart():
    assert parse_entry({b"fence": b"1"}) == Fence()
    assert parse_entry({b"restart": Restart(keep=5).to_json()}) == Restart(keep=5)
    with pytest.raises(ValueError, match="none of"):
        parse_entry({b"what": b"?"})


def test_entry_ids_are_ordered_as_the_server_orders_them():
    assert EntryId.parse(b"2-0") > EntryId.parse("1-999")
    assert EntryId(1, 10) > EntryId(1, 9)  # numbers, not text
    assert EntryId(1, 3).is_next_after(EntryId(1, 2))
    assert not EntryId(2, 3).is_next_after(EntryId(1, 2))


def test_record_is_read_back_and_newer_fields_are_ignored():
    record = FinalRecord(
        id="a",
        state=State.ERROR,
        finish_reason="error",
        text="t",
        token_ids=(1, 2),
        usage=Usage(prompt=1, completion=2, cached=3, cache_write=4),
        timing=Timing(queue=1.5, ttft=2.0, itl=None, total=9.0),
        seed=2**63 - 1,
        epoch=2,
        warnings=("w",),
        error=ErrorInfo(code=ErrorCode.NUMERICS, message="m", retryable=True),
        metadata={"row": 1},
    )
    assert FinalRecord.from_json(record.to_json()) == record
    assert FinalRecord.from_dict(record.to_dict() | {"of_version_2": 1}) == record
    least = FinalRecord.from_json(b'{"id":"a","state":"done","finish_reason":"stop"}')
    assert least == FinalRecord(id="a", state=State.DONE, finish_reason="stop")


def test_states_and_codes_are_closed_sets():
    assert {State.DONE, State.ERROR, State.CANCELLED, State.EXPIRED} == TERMINAL_STATES
    assert set(ErrorCode) >= RETRYABLE
    assert ErrorCode.INVALID_REQUEST not in RETRYABLE
