"""An answer that breaks its schema breaks the caller's program; a constraint silently ignored does so at random."""

import json
import time
from typing import Any

import numpy as np
import pytest

from gewell.errors import InvalidRequest
from gewell.structured import (
    ConstraintKind,
    ConstraintSpec,
    parse_response_format,
    parse_structured_outputs,
    parse_tool_choice,
)
from gewell.text.constraint import (
    ConstraintFailed,
    Grammar,
    GrammarCompiler,
    GrammarRow,
    MaskFiller,
)
from gewell.text.parser import OutputParser
from gewell.text.tokenizer import ByteTokenizer, HFTokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ADD_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": ADD_SCHEMA}}


@pytest.fixture(scope="module")
def compiler(gemma4: HFTokenizer) -> GrammarCompiler:
    end = gemma4.control_id("<turn|>")
    assert end is not None
    return GrammarCompiler(gemma4, end_ids=[1, end], vocab_size=gemma4.vocab_size + 70)


def grammar(compiler: GrammarCompiler, kind: ConstraintKind, value: Any = None) -> Grammar:
    return compiler.compile(ConstraintSpec(kind=kind, value=value))


def is_allowed(words: np.ndarray, token_id: int) -> bool:
    return bool(int(words[token_id // 32]) >> (token_id % 32) & 1)


def follows(compiler: GrammarCompiler, row: GrammarRow, ids: list[int]) -> bool:
    """Whether the row lets these ids pass one by one and is satisfied after them."""
    words = np.zeros(compiler.num_mask_words, np.int32)
    for token_id in ids:
        row.fill(words)
        if not is_allowed(words, token_id):
            return False
        row.advance([token_id])
    return row.is_satisfied


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        (ConstraintKind.JSON_OBJECT, None,
         ['{}', '{"a":[1,{"b":null}]}'], ["[1]", '{"a":}', '{ "a":1}', '{"a": 1}', "{}\n"]),
        (ConstraintKind.JSON_SCHEMA, PERSON,
         ['{"name":"Bo","age":7}', '{"name":"é🙂","age":0,"tags":["a"]}'],
         ['{"name":"Bo"}', '{"name":"Boblong","age":7}', '{"name":"Bo","age":-1}', '{"name":"Bo","age":7,"x":1}',
          '{"name":"Bo","age":7,"tags":["c"]}', '{"name":"Bo",\n"age":7}']),
        (ConstraintKind.REGEX, "[a-c]+/[0-9]{2}", ["abc/12"], ["abc/1", "d/12", "abc/123"]),
        (ConstraintKind.CHOICE, ["yes", 'no "really"\n', "yes please"],
         ["yes", 'no "really"\n', "yes please"], ["maybe", "yes p"]),
        (ConstraintKind.LARK, 'start: "a" digits\ndigits: /[0-9]+/', ["a1", "a12"], ["a", "1"]),
    ],
)  # fmt: skip
def test_exactly_the_language_passes(
    compiler: GrammarCompiler, gemma4: HFTokenizer, kind: ConstraintKind, value: Any, good: list[str], bad: list[str]
) -> None:
    compiled = grammar(compiler, kind, value)
    for text in good:
        assert follows(compiler, compiled.row(), gemma4.encode(text)), text
    for text in bad:
        assert not follows(compiler, compiled.row(), gemma4.encode(text)), text


def test_end_ids_are_allowed_where_the_grammar_is_satisfied_and_nowhere_else(
    compiler: GrammarCompiler, gemma4: HFTokenizer
) -> None:
    row = grammar(compiler, ConstraintKind.LARK, "start: /a+/").row()
    words = np.zeros(compiler.num_mask_words, np.int32)
    end = gemma4.control_id("<turn|>")
    assert end is not None
    row.fill(words)
    assert not is_allowed(words, end)
    row.advance(gemma4.encode("a"))
    row.fill(words)
    assert is_allowed(words, end)
    assert is_allowed(words, 1)
    assert not row.is_finished  # more may follow
    done = grammar(compiler, ConstraintKind.CHOICE, ["a"]).row()
    done.advance(gemma4.encode("a"))
    assert done.is_finished
    done.fill(words)
    assert {i for i in range(compiler.vocab_size) if is_allowed(words, i)} == {1, end}


def test_control_tokens_and_padding_ids_are_never_allowed_in_text(
    compiler: GrammarCompiler, gemma4: HFTokenizer
) -> None:
    row = grammar(compiler, ConstraintKind.REGEX, "(.|\n)*").row()
    words = np.full(compiler.num_mask_words, -1, np.int32)
    row.fill(words)
    allowed = {i for i in range(compiler.vocab_size) if is_allowed(words, i)}
    assert allowed.isdisjoint(gemma4.control_id(name) for name in ("<|turn>", "<|tool_call>", '<|"|>', "<bos>"))
    assert max(allowed) < gemma4.vocab_size
    assert gemma4.encode("é")[0] in allowed


def test_thoughts_are_free_and_the_grammar_begins_behind_them(compiler: GrammarCompiler, gemma4: HFTokenizer) -> None:
    compiled = grammar(compiler, ConstraintKind.JSON_OBJECT)
    thought = gemma4.encode("<|channel>thought\nno JSON [ here\n<channel|>", specials=True)
    answer = gemma4.encode("{}")
    assert follows(compiler, compiled.row(thinking=True), thought + answer)
    assert follows(compiler, compiled.row(thinking=True), answer)
    assert not follows(compiler, compiled.row(thinking=True), answer + thought)
    assert not follows(compiler, compiled.row(), thought + answer)
    unfinished = compiled.row(thinking=True)
    unfinished.advance(thought[:-1])
    assert not unfinished.is_satisfied


def test_a_thought_comes_once_and_is_no_way_around_the_form(compiler: GrammarCompiler, gemma4: HFTokenizer) -> None:
    compiled = grammar(compiler, ConstraintKind.JSON_OBJECT)
    thought = gemma4.encode("<|channel>thought\nhm\n<channel|>", specials=True)
    row, words = compiled.row(thinking=True), np.zeros(compiler.num_mask_words, np.int32)
    end = gemma4.control_id("<turn|>")
    assert end is not None
    row.advance(thought[:-1])
    row.fill(words)
    assert not is_allowed(words, end)
    assert not is_allowed(words, 1)
    assert all(is_allowed(words, token_id) for token_id in (*thought[1:], 0, end + 1))
    assert not follows(compiler, compiled.row(thinking=True), thought + thought)


def test_demanded_tool_call_is_one_that_the_parser_reads(compiler: GrammarCompiler, gemma4: HFTokenizer) -> None:
    spec = parse_tool_choice([TOOL], "required")
    assert spec is not None
    compiled = compiler.compile(spec)
    ids = gemma4.encode('<|tool_call>call:add{"n":12}<tool_call|>', specials=True)
    assert follows(compiler, compiled.row(), ids)
    (piece,) = OutputParser(gemma4, tools=[TOOL]).push(ids)
    assert piece.tool_delta is not None
    assert json.loads(piece.tool_delta.arguments_delta) == {"n": 12}
    for text in ('<|tool_call>call:add{"n":"x"}<tool_call|>', "<|tool_call>call:sub{}<tool_call|>", "Sure"):
        assert not follows(compiler, compiled.row(), gemma4.encode(text, specials=True))


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (ConstraintKind.JSON_SCHEMA, {"not": {}}, "not"),
        (ConstraintKind.JSON_SCHEMA, {"type": "array", "uniqueItems": True}, "uniqueItems"),
        (ConstraintKind.JSON_SCHEMA, {"type": "string", "format": "phone"}, "phone"),
        (ConstraintKind.JSON_SCHEMA, {"type": "strin"}, "strin"),
        (ConstraintKind.JSON_SCHEMA, {"$ref": "https://example.org/schema"}, "example.org"),
        (ConstraintKind.JSON_SCHEMA, {"not": {}, "x-guidance": {"lenient": True}}, "not"),
        (ConstraintKind.JSON_SCHEMA, {"const": float("nan")}, "JSON"),
        (ConstraintKind.JSON_SCHEMA, {"enum": ["x" * 300_000]}, "256000"),
        (ConstraintKind.REGEX, "(a", "unclosed"),
        (ConstraintKind.REGEX, "(?=a)b", "look"),
        (ConstraintKind.REGEX, "", "1 to"),
        (ConstraintKind.LARK, "start: missing", "missing"),
        (ConstraintKind.CHOICE, [], "1 to"),
        (ConstraintKind.CHOICE, ["a", ""], "empty"),
        (ConstraintKind.CHOICE, ["a", 1], "texts"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    compiler: GrammarCompiler, kind: ConstraintKind, value: Any, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        compiler.compile(ConstraintSpec(kind=kind, value=value, field="request.here"))
    assert caught.value.field == "request.here"


def test_schema_cannot_switch_free_whitespace_on(compiler: GrammarCompiler, gemma4: HFTokenizer) -> None:
    compiled = grammar(
        compiler, ConstraintKind.JSON_SCHEMA, {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    )
    assert follows(compiler, compiled.row(), gemma4.encode('{"a":1}'))
    assert not follows(compiler, compiled.row(), gemma4.encode('{ "a":1}'))


def test_leaving_the_grammar_fails_that_row_alone(compiler: GrammarCompiler, gemma4: HFTokenizer) -> None:
    compiled = grammar(compiler, ConstraintKind.JSON_OBJECT)
    lost, fine = compiled.row(), compiled.row()
    with pytest.raises(ConstraintFailed):
        lost.advance(gemma4.encode("x"))
    filler = MaskFiller(2)
    masks = np.zeros((2, compiler.num_mask_words), np.int32)
    failures = filler.start([lost, fine], masks).result()
    filler.close()
    assert isinstance(failures[0], ConstraintFailed)
    assert failures[1] is None
    assert is_allowed(masks[1], gemma4.encode("{")[0])
    assert not is_allowed(masks[1], gemma4.encode("x")[0])


def test_fork_does_not_move_its_origin(compiler: GrammarCompiler, gemma4: HFTokenizer) -> None:
    row = grammar(compiler, ConstraintKind.CHOICE, ["ab"]).row(thinking=True)
    draft = row.fork()
    draft.advance(gemma4.encode("ab"))
    assert draft.is_finished
    assert follows(compiler, row, gemma4.encode("ab"))


def test_masks_of_many_rows_in_parallel_equal_single_ones(compiler: GrammarCompiler, gemma4: HFTokenizer) -> None:
    compiled = grammar(compiler, ConstraintKind.JSON_SCHEMA, PERSON)
    rows, texts = [], ["", "{", '{"name":"', '{"name":"Bo"', '{"name":"Bo","age":1']
    for text in texts * 3:
        row = compiled.row()
        row.advance(gemma4.encode(text))
        rows.append(row)
    masks = np.zeros((len(rows), compiler.num_mask_words), np.int32)
    filler = MaskFiller(2)
    assert filler.start(rows, masks).result() == [None] * len(rows)
    for row, words in zip(rows, masks, strict=True):
        alone = np.zeros_like(words)
        row.fill(alone)
        assert (alone == words).all()
    with pytest.raises(ValueError, match="int32"):
        filler.start(rows, masks[:, ::2])
    assert filler.start([], masks[:0]).result() == []
    filler.close()


def test_same_spec_is_compiled_once(compiler: GrammarCompiler) -> None:
    assert grammar(compiler, ConstraintKind.JSON_SCHEMA, PERSON) is grammar(
        compiler, ConstraintKind.JSON_SCHEMA, PERSON
    )


def test_bytes_can_be_constrained() -> None:
    compiler = GrammarCompiler(ByteTokenizer(), end_ids=[1])
    compiled = grammar(compiler, ConstraintKind.JSON_OBJECT)
    assert follows(compiler, compiled.row(), list('{"é":1}'.encode()))
    with pytest.raises(InvalidRequest, match="no tool calls"):
        grammar(compiler, ConstraintKind.TOOL_CALL, [TOOL])


def test_request_fields_become_specs() -> None:
    assert parse_response_format(None) is parse_response_format({"type": "text"}) is None
    assert parse_structured_outputs({"json": None, "json_object": False}) is parse_tool_choice(None, "auto") is None
    spec = parse_response_format(
        {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    )
    assert spec == ConstraintSpec(
        kind=ConstraintKind.JSON_SCHEMA, value=PERSON, field="request.response_format.json_schema.schema"
    )
    for given, kind in [
        ({"regex": "a"}, "regex"),
        ({"choice": ["a"]}, "choice"),
        ({"grammar": "start: /a/"}, "lark"),
        ({"json": '{"type": "object"}'}, "json_schema"),
        ({"json_object": True}, "json_object"),
    ]:
        spec = parse_structured_outputs(given)
        assert spec is not None
        assert spec.kind == kind
    named = parse_tool_choice([TOOL], {"type": "function", "function": {"name": "add"}})
    assert named is not None
    assert named.value == [TOOL]


@pytest.mark.parametrize(
    "parse",
    [
        lambda: parse_response_format({"type": "yaml"}),
        lambda: parse_response_format({"type": "json_schema"}),
        lambda: parse_structured_outputs({"regex": "a", "choice": ["a"]}),
        lambda: parse_structured_outputs({"regex": 1}),
        lambda: parse_structured_outputs({"structural_tag": {}}),
        lambda: parse_structured_outputs({"json": "{"}),
        lambda: parse_tool_choice(None, "required"),
        lambda: parse_tool_choice([TOOL], {"type": "function", "function": {"name": "sub"}}),
        lambda: parse_tool_choice([TOOL], "sometimes"),
    ],
)
def test_constraint_nobody_knows_is_an_error_not_ignored(parse: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"request\."):
        parse()


def test_masks_of_the_real_vocabulary_are_cheap(real_gemma4: HFTokenizer) -> None:
    compiler = GrammarCompiler(real_gemma4, end_ids=[1, 106, 50])
    row = grammar(compiler, ConstraintKind.JSON_SCHEMA, PERSON).row()
    words = np.zeros(compiler.num_mask_words, np.int32)
    times = []
    for token_id in real_gemma4.encode('{"name":"Bo","age":12345678901234567890}'):
        start = time.perf_counter()
        row.fill(words)
        times.append(time.perf_counter() - start)
        assert is_allowed(words, token_id)
        row.advance([token_id])
    assert row.is_finished
    assert sorted(times)[len(times) // 2] < 0.005  # 50 us on an idle machine
