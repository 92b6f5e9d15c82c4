"""From tokens to what a reader sees. A mistake here shows half characters, parts of stop strings, or text twice."""

from collections.abc import Sequence

import pytest
from gewell_workers.job_text import JobText, PlainPieces, Span, merge, missing
from hypothesis import given
from hypothesis import strategies as st

from gewell.protocol import Channel, ToolDelta
from gewell.text.parser import Piece
from gewell.text.tokenizer import ByteTokenizer


def new(stops: Sequence[str] = (), *, include_stop: bool = False) -> JobText:
    return JobText(PlainPieces(ByteTokenizer()), stops=stops, include_stop=include_stop)


def shown(spans: Sequence[Span]) -> str:
    return "".join(span.text for span in spans)


def ids_of(spans: Sequence[Span]) -> list[int]:
    return [token for span in spans for token in span.ids]


def test_half_a_character_waits_and_its_ids_do_not():
    text = new()
    first = text.push("é".encode()[:1])
    assert (shown(first), ids_of(first)) == ("", [0xC3])
    assert shown(text.push("é".encode()[1:])) == "é"


def test_stop_string_across_pushes_is_never_shown_in_part():
    text = new(["END"])
    spans = text.push(b"abE") + text.push(b"N")
    assert shown(spans) == "ab"
    spans = text.push(b"Dxyz")
    assert (shown(spans), ids_of(spans)) == ("", [ord("D")])  # what follows the stop is dropped
    assert text.stopped_at == 5
    assert text.push(b"more") == []
    assert text.finish() == []
    assert text.text(Channel.CONTENT) == "ab"


@pytest.mark.parametrize(("min_tokens", "stopped_at"), [(0, 1), (1, 3), (2, 3), (3, 5), (4, 5), (5, None)])
def test_stop_string_counts_from_the_token_after_min_tokens(min_tokens: int, stopped_at: int | None):
    for parts in ([b"xyxyx"], [b"x", b"yx", b"yx"]):  # also what a continuation replays
        text = JobText(PlainPieces(ByteTokenizer()), stops=["x"], min_tokens=min_tokens)
        for part in parts:
            text.push(part)
        assert text.stopped_at == stopped_at


def test_held_back_text_is_released_at_the_end():
    text = new(["END"])
    assert shown(text.push(b"abEN")) == "ab"
    assert shown(text.finish()) == "EN"


def test_hidden_ids_are_recorded_and_not_shown():
    text = new()
    text.push(b"ab")
    assert text.push_hidden([1]) == [Span((1,), Channel.CONTENT, "")]
    assert text.num_ids == 3
    assert text.text(Channel.CONTENT) == "ab"


TOKENS = st.binary(max_size=40).map(list)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3)


@given(st.text("ab<é", max_size=30).map(lambda t: list(t.encode())) | TOKENS, STOPS, st.lists(st.integers(1, 6)))
def test_text_and_stop_do_not_depend_on_the_cuts(ids: list[int], stops: list[str], cuts: list[int]):
    whole = new(stops)
    together = whole.push(ids) + whole.finish()
    parts, spans, rest = new(stops), [], list(ids)
    for cut in [*cuts, len(ids)]:
        spans += parts.push(rest[:cut])
        rest = rest[cut:]
    spans += parts.finish()
    assert shown(spans) == shown(together)
    assert ids_of(spans) == ids_of(together)
    assert parts.stopped_at == whole.stopped_at
    kept = ids[: whole.stopped_at] if whole.stopped_at is not None else ids
    assert ids_of(together) == kept
    assert (shown(merge(spans)), ids_of(merge(spans))) == (shown(spans), ids_of(spans))


@given(st.text("ab<é", max_size=30).map(lambda t: list(t.encode())), STOPS, st.integers(0, 60))
def test_replay_releases_exactly_what_nobody_has_published(ids: list[int], stops: list[str], at: int):
    """A worker dies after `at` tokens; its successor replays them and goes on: together they show the text once."""
    first = new(stops)
    published = shown(first.push(ids[:at]))
    second = new(stops)
    second.push(ids[:at])
    replayed = shown(missing(second, {"content": published}, []))
    went_on = replayed + shown(second.push(ids[at:])) + shown(second.finish())
    whole = new(stops)
    assert published + went_on == shown(whole.push(ids)) + shown(whole.finish())


def test_merge_keeps_channels_apart_and_order():
    reasoning, content, tool = Channel.REASONING, Channel.CONTENT, Channel.TOOL
    delta = ToolDelta(index=0, id="c", name="f", arguments_delta="{}")
    spans = [
        Span((1,), reasoning, "a"),
        Span((2,), content, ""),  # text of neither: joins its neighbour
        Span((3,), reasoning, "b"),
        Span((4,), content, "c"),
        Span((5,), tool, "", delta),
        Span((6,), tool, "", delta),
        Span((7,), content, "d"),
    ]
    assert merge(spans) == [
        Span((1, 2, 3), reasoning, "ab"),
        Span((4,), content, "c"),
        Span((5,), tool, "", delta),
        Span((6,), tool, "", delta),
        Span((7,), content, "d"),
    ]


class Calls:
    """Pieces of a model that calls a tool."""

    def push(self, ids: Sequence[int]) -> list[Piece]:
        call = ToolDelta(index=0, id="c1", name="f", arguments_delta="{}")
        return [Piece(Channel.TOOL, "", call)] if 9 in ids else []

    def finish(self) -> list[Piece]:
        return []


@pytest.mark.parametrize("kept", [[], [{"id": "c1", "name": "f", "arguments": "{}"}]])
def test_tool_call_that_was_published_is_not_published_again(kept: list[dict[str, str]]):
    text = JobText(Calls())
    text.push([1, 9])
    assert text.tool_calls == [{"id": "c1", "name": "f", "arguments": "{}"}]
    assert len(missing(text, {}, kept)) == (0 if kept else 1)
