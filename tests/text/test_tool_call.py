"""Arguments that arrive as strings, with quotes left in or null as "null", break the caller's tool."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gewell.text.tool_call import MAX_DEPTH, QUOTE, ToolCallError, parse_tool_calls

Q = QUOTE


def arguments(text: str, **properties: Any) -> dict[str, Any]:
    tool = {"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    (call,) = parse_tool_calls(f"call:f{text}", [tool])
    assert call.name == "f"
    return call.arguments


def test_own_dialect() -> None:
    text = f"{{city:{Q}Brno, CZ}}{Q},n:-1.5e3,ok:true,no:null,list:[{Q}a{Q},1,[]],o:{{{Q}k k{Q}:{Q}v{Q},x:{{}}}}}}"
    assert arguments(text) == {
        "city": "Brno, CZ}", "n": -1500.0, "ok": True, "no": None, "list": ["a", 1, []], "o": {"k k": "v", "x": {}},
    }  # fmt: skip


def test_json_dialect_also_inside_a_container() -> None:
    assert arguments('{"a": "say \\"hi\\"\\n", "b": [1, null, {"c": false}]}') == {
        "a": 'say "hi"\n', "b": [1, None, {"c": False}],
    }  # fmt: skip
    assert arguments(f'{{a:{Q}x{Q},b:{{"c": "d"}},e:["f"]}}') == {"a": "x", "b": {"c": "d"}, "e": ["f"]}


def test_whole_call_as_json() -> None:
    (call,) = parse_tool_calls('{"name": "g", "arguments": {"x": 1}}')
    assert call == ("g", {"x": 1})


def test_several_calls_in_one_block() -> None:
    assert [c.arguments for c in parse_tool_calls("call:f{a:1}call:f{a:2}")] == [{"a": 1}, {"a": 2}]


def test_string_keeps_whatever_stands_between_its_quotes() -> None:
    body = '{"not": [parsed], \n\\ "x'
    assert arguments(f"{{a:{Q}{body}{Q}}}") == {"a": body}
    assert arguments(f"{{a:{Q}{Q}}}") == {"a": ""}


def test_unquoted_words_are_strings() -> None:
    assert arguments("{mode:very fast,list:[a b,c]}") == {"mode": "very fast", "list": ["a b", "c"]}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "true", "true"),
        ({"type": "STRING"}, f"{Q}12{Q}", "12"),
        ({"type": "integer"}, f"{Q}12{Q}", 12),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, f"{Q}many{Q}", "many"),
        ({"type": "number"}, '"0.5"', 0.5),
        ({"type": "boolean"}, f"{Q}false{Q}", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, f"{Q}null{Q}", None),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "object", "properties": {"x": {"type": "string"}}}, f'{Q}{{"x": 1}}{Q}', {"x": "1"}),
        ({"type": "array", "items": {"type": "string"}}, "[1,two]", ["1", "two"]),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}]}, f"[{Q}1{Q}]", [1]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, f"{{a:{Q}7{Q}}}", {"a": 7}),
        ({}, "12", 12),
        (True, "12", 12),
    ],
)
def test_values_take_the_type_of_their_schema(schema: Any, written: str, value: Any) -> None:
    result = arguments(f"{{x:{written}}}", x=schema)["x"]
    assert result == value
    assert type(result) is type(value)


def test_types_are_found_behind_local_references() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/Point"}}}
    parameters = {
        "type": "object",
        "properties": {
            "at": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
            "loop": {"$ref": "#/$defs/Loop"},
            "gone": {"$ref": "#/$defs/Missing"},
            "many": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
        },
        "$defs": {"Point": point, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 9}},
    }
    tool = {"function": {"name": "f", "parameters": parameters}}
    text = 'call:f{at:{x:"1",next:{x:"2"}},loop:"3",gone:"4",many:[{x:"5"}]}'
    ((_, found),) = parse_tool_calls(text, [tool])
    assert found == {"at": {"x": 1, "next": {"x": 2}}, "loop": "3", "gone": "4", "many": [{"x": 5}]}


@pytest.mark.parametrize(
    "text",
    ["", "   ", "call:f", "f{a:1}", "call:f{a:}", "call:f{a 1}", "call:f{a:1", f"call:f{{a:{Q}x}}", 'call:f{"a": "x}',
     "call:f{a:[1}", "call:f{a:1}}", "call:{a:1}", "call:f{a:1 x:{}}", '{"name": "f"}', "call:f{,}",
     "call:f{a:" + "[" * (MAX_DEPTH + 1)],
)  # fmt: skip
def test_what_is_no_call_is_an_error_not_a_guess(text: str) -> None:
    with pytest.raises(ToolCallError):
        parse_tool_calls(text)


def test_numbers_of_any_length_survive() -> None:
    assert arguments("{a:1e999}") == {"a": "1e999"}  # JSON has no infinity
    assert arguments(f"{{a:{'9' * 5000}}}") == {"a": "9" * 5000}
    assert arguments(f"{{a:{'9' * 40}}}") == {"a": int("9" * 40)}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.text(max_size=8).map(lambda s: s.replace(Q, "")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex("[a-z_]{1,6}", fullmatch=True), inner),
    max_leaves=12,
)


def written(value: Any) -> str:
    """The value as the model writes it."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


@given(st.dictionaries(st.from_regex("[a-z_]{1,6}", fullmatch=True), json_values, max_size=4))
def test_what_was_written_is_read_back(value: dict[str, Any]) -> None:
    assert arguments(written(value)) == value


@given(st.lists(st.sampled_from(["call:f{", "{", "}", "[", "]", ":", ",", '"', "\\", "a", "1", " ", Q]), max_size=30))
def test_garbage_raises_only_our_error(parts: list[str]) -> None:
    with contextlib.suppress(ToolCallError):
        parse_tool_calls("call:f{" + "".join(parts))
