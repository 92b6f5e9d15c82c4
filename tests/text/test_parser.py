"""Thoughts that leak into the answer, or text that a failed parse throws away, cannot be repaired by the caller."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gewell.text.parser import OutputParser, Piece
from gewell.text.tokenizer import ByteTokenizer, HFTokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = '<|tool_call>call:weather{city:<|"|>Brno<|"|>,days:<|"|>2<|"|>}<tool_call|>'


def parse(tokenizer: HFTokenizer, text: str, **options: Any) -> tuple[OutputParser, list[tuple[str, str]]]:
    """The parser after all of the text, and what it gave out."""
    parser = OutputParser(tokenizer, call_id_seed="job", **options)
    return parser, joined(parser.push(tokenizer.encode(text, specials=True)) + parser.finish())


def joined(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """(channel, text) with neighbours of one channel joined; a tool call shows as name and arguments."""
    result: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.tool_delta is not None:
            result.append(("tool", f"{piece.tool_delta.name} {piece.tool_delta.arguments_delta}"))
        elif result and result[-1][0] == piece.channel != "tool":
            result[-1] = (piece.channel, result[-1][1] + piece.text)
        else:
            result.append((piece.channel, piece.text))
    return result


def results(tokenizer: HFTokenizer, text: str, **options: Any) -> list[tuple[str, str]]:
    return parse(tokenizer, text, **options)[1]


def test_thought_and_answer_are_told_apart(gemma4: HFTokenizer) -> None:
    text = "<|channel>thought\nFirst.\nSecond 🙂\n<channel|>Hello<turn|>"
    assert results(gemma4, text) == [("reasoning", "First.\nSecond 🙂"), ("content", "Hello")]


def test_text_before_between_and_after_thoughts_is_content(gemma4: HFTokenizer) -> None:
    text = "a<|channel>thought\nx\n<channel|>b<|channel>thought\ny\n<channel|>c"
    assert results(gemma4, text) == [
        ("content", "a"), ("reasoning", "x"), ("content", "b"), ("reasoning", "y"), ("content", "c"),
    ]  # fmt: skip


def test_thought_that_never_closes_is_reasoning_to_the_end(gemma4: HFTokenizer) -> None:
    assert results(gemma4, "<|channel>thought\nstill thinking\n") == [("reasoning", "still thinking\n")]
    assert results(gemma4, "<|channel>thou") == [("reasoning", "thou")]
    assert results(gemma4, "on\n<channel|>Hello", in_thought=True) == [("reasoning", "on"), ("content", "Hello")]


def test_empty_thought_gives_nothing(gemma4: HFTokenizer) -> None:
    assert results(gemma4, "<|channel>thought\n<channel|>Hello") == [("content", "Hello")]
    assert results(gemma4, "<|channel>thought<channel|>Hello") == [("content", "Hello")]


def test_thought_without_a_name_keeps_its_text(gemma4: HFTokenizer) -> None:
    assert results(gemma4, "<|channel>I wonder\n<channel|>x") == [("reasoning", "I wonder"), ("content", "x")]


def test_reasoning_tokens_are_counted(gemma4: HFTokenizer) -> None:
    thought = "<|channel>thought\nabc\n<channel|>"
    parser, _ = parse(gemma4, f"x{thought}yz")
    assert parser.num_reasoning_tokens == len(gemma4.encode(thought, specials=True)) - 1  # the opening token decides


def test_call_is_given_out_whole_typed_and_with_a_repeatable_id(gemma4: HFTokenizer) -> None:
    parser = OutputParser(gemma4, tools=[WEATHER], call_id_seed="job")
    ids = gemma4.encode(f"Wait.{CALL}{CALL}<|tool_response>", specials=True)
    pieces = parser.push(ids) + parser.finish()
    assert pieces[0] == Piece("content", "Wait.")
    deltas = [piece.tool_delta for piece in pieces[1:]]
    assert [(d.index, d.name, json.loads(d.arguments_delta)) for d in deltas if d] == [
        (0, "weather", {"city": "Brno", "days": 2}), (1, "weather", {"city": "Brno", "days": 2}),
    ]  # fmt: skip
    again = OutputParser(gemma4, tools=[WEATHER], call_id_seed="job")
    assert [p.tool_delta for p in again.push(ids)] == [p.tool_delta for p in pieces]
    call_ids = {d.id for d in deltas if d}
    assert len(call_ids) == 2
    other = OutputParser(gemma4, tools=[WEATHER], call_id_seed="other job").push(ids)
    assert not call_ids & {p.tool_delta.id for p in other if p.tool_delta}


def test_what_cannot_be_parsed_comes_back_as_written(gemma4: HFTokenizer) -> None:
    for raw in (
        '<|tool_call>call:weather{city:<|"|>Brno}<tool_call|>',
        '<|tool_call>call:weather{city:<|"|>Br',
        "<|tool_call>nonsense<tool_call|>",
        "<|tool_call>call:weather{city:<|channel>x<channel|>",
    ):
        parser, result = parse(gemma4, f"a{raw}", tools=[WEATHER])
        assert result == [("content", f"a{raw}")]
        assert len(parser.parse_errors) == 1


def test_call_without_tools_is_text(gemma4: HFTokenizer) -> None:
    parser, result = parse(gemma4, CALL)
    assert result == [("content", CALL)]
    assert "no tools" in parser.parse_errors[0]


def test_call_straight_out_of_a_thought(gemma4: HFTokenizer) -> None:
    assert results(gemma4, f"<|channel>thought\nhm{CALL}", tools=[WEATHER]) == [
        ("reasoning", "hm"), ("tool", 'weather {"city":"Brno","days":2}'),
    ]  # fmt: skip


def test_new_call_inside_a_call_loses_neither(gemma4: HFTokenizer) -> None:
    assert results(gemma4, f"<|tool_call>call:wea{CALL}", tools=[WEATHER]) == [
        ("content", "<|tool_call>call:wea"), ("tool", 'weather {"city":"Brno","days":2}'),
    ]  # fmt: skip


def test_stray_control_tokens_are_no_text(gemma4: HFTokenizer) -> None:
    assert results(gemma4, '<channel|>a<tool_call|>b<|"|>c<turn|>') == [("content", "abc")]


def test_marker_names_written_as_text_are_text(gemma4: HFTokenizer) -> None:
    parser = OutputParser(gemma4, tools=[WEATHER])
    text = f"The marker {CALL} and <|channel>thought\n"
    assert joined(parser.push(gemma4.encode(text)) + parser.finish()) == [("content", text)]


def test_vocabulary_without_control_tokens_gives_content_only() -> None:
    parser = OutputParser(ByteTokenizer())
    text = "<|channel>thought\n🙂"
    assert joined(parser.push(text.encode()) + parser.finish()) == [("content", text)]


def test_half_a_character_before_a_marker_is_replaced_in_its_own_channel(gemma4: HFTokenizer) -> None:
    half = gemma4.encode("🙂")[:2]
    ids = [*gemma4.encode("<|channel>thought\n", specials=True), *half, *gemma4.encode("<channel|>ok", specials=True)]
    parser = OutputParser(gemma4)
    assert joined(parser.push(ids)) == [("reasoning", "�"), ("content", "ok")]


MARKERS = [
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>", "<|tool_response>", "thought\n",
    "thought", "\n", "call:weather{", "city:", "}", CALL, "x", "é🙂", ",", '{"a": 1}',
]  # fmt: skip


@given(st.data())
def test_any_cut_gives_the_same_parse(gemma4: HFTokenizer, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(MARKERS), max_size=12)))
    ids = gemma4.encode(text, specials=True)
    if ids and data.draw(st.booleans()):
        del ids[data.draw(st.integers(0, len(ids) - 1))]  # also through the middle of a character
    whole = OutputParser(gemma4, tools=[WEATHER], call_id_seed="job")
    expected = joined(whole.push(ids) + whole.finish())
    edges = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    parser = OutputParser(gemma4, tools=[WEATHER], call_id_seed="job")
    pieces: list[Piece] = []
    for start, end in zip([0, *edges], [*edges, len(ids)], strict=True):
        new = parser.push(ids[start:end])
        assert all(piece.text or piece.tool_delta for piece in new)
        pieces += new
    pieces += parser.finish()
    assert joined(pieces) == expected
    assert parser.parse_errors == whole.parse_errors


@given(st.lists(st.sampled_from(MARKERS), max_size=12))
def test_no_ordinary_text_is_lost(gemma4: HFTokenizer, parts: list[str]) -> None:
    """Every letter comes out in some channel, apart from a channel's name and calls that were understood."""
    text = "".join(parts).replace(CALL, "")
    shown = "".join(t for channel, t in results(gemma4, text, tools=[WEATHER]) if channel != "tool")
    calls = [t for channel, t in results(gemma4, text, tools=[WEATHER]) if channel == "tool"]
    if not calls:
        assert shown.count("x") == text.count("x")
        assert shown.count("🙂") == text.count("🙂")
