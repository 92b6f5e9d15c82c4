"""Constrained rows in the engine. A mask on the wrong row, or a step late, breaks the program that reads the answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gewell.engine.api import Event, FinishedEvent, FinishReason, TokensEvent
from gewell.engine.build import EngineOptions, build_engine
from gewell.engine.engine import PagedEngine
from gewell.engine.scripted import EOS_ID, build_scripted_engine
from gewell.protocol import ErrorCode
from gewell.request import EngineRequest
from gewell.sampling import SamplingParams
from gewell.structured import ConstraintKind, ConstraintSpec
from gewell.text.constraint import ConstraintFailed, Grammar, GrammarCompiler
from gewell.text.tokenizer import ByteTokenizer

DENSE = Path(__file__).parents[1] / "fixtures" / "gemma4-dense"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 999}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
COMPILER = GrammarCompiler(ByteTokenizer(), end_ids=[EOS_ID])


def grammar(kind: ConstraintKind, value: Any) -> Grammar:
    return COMPILER.compile(ConstraintSpec(kind=kind, value=value))


def request(
    name: str, constraint: Any = None, *, prompt: str = "hello", emitted: Sequence[int] = (), **params: Any
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_ids=list(prompt.encode()),
        sampling=SamplingParams(**{"max_tokens": 60, "seed": 3, **params}),
        emitted_ids=tuple(emitted),
        eos_token_ids=(EOS_ID,),
        constraint=constraint,
    )


class Run:
    def __init__(self, engine: PagedEngine, *requests: EngineRequest) -> None:
        self.tokens: dict[str, list[int]] = {req.request_id: [] for req in requests}
        self.ends: dict[str, FinishedEvent] = {}
        for req in requests:
            engine.add(req)
        while engine.has_work():
            self._take(engine.step())
        engine.close()

    def _take(self, events: list[Event]) -> None:
        for event in events:
            assert event.request_id not in self.ends
            if isinstance(event, TokensEvent):
                self.tokens[event.request_id].extend(event.token_ids)
            else:
                self.ends[event.request_id] = event

    def text(self, name: str) -> str:
        return bytes(token for token in self.tokens[name] if token != EOS_ID).decode()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_pages", [512, 24], ids=["roomy", "rows are preempted"])
def test_constrained_rows_keep_their_form_and_others_their_tokens(depth: int, num_pages: int) -> None:
    def engine() -> PagedEngine:
        return build_scripted_engine(depth=depth, num_pages=num_pages, max_num_seqs=8)

    free = [request(f"free{n}", seed=n) for n in range(3)]
    alone = Run(engine(), *free)
    forms = [
        request("json", grammar(ConstraintKind.JSON_SCHEMA, PERSON)),
        request("regex", grammar(ConstraintKind.REGEX, "[a-c]{3}-[0-9]{4}")),
        request("choice", grammar(ConstraintKind.CHOICE, ["red", "green", "blue"])),
    ]
    mixed = Run(engine(), *(req for pair in zip(free, forms, strict=True) for req in pair))
    assert {name: mixed.tokens[name] for name in alone.tokens} == alone.tokens
    person = json.loads(mixed.text("json"))
    assert set(person) == {"name", "age"}
    assert " " not in mixed.text("json").replace(person["name"], "")  # compact
    letters, digits = mixed.text("regex").split("-")
    assert (len(letters), len(digits)) == (3, 4)
    assert mixed.text("choice") in ("red", "green", "blue")
    for name in ("json", "regex", "choice"):
        assert mixed.ends[name].reason is FinishReason.STOP
        assert mixed.ends[name].is_satisfied is True
    assert mixed.ends["free0"].is_satisfied is None


@pytest.mark.parametrize("depth", [0, 1])
def test_a_continuation_goes_on_where_the_grammar_stood(depth: int) -> None:
    constraint = grammar(ConstraintKind.JSON_SCHEMA, PERSON)
    whole = Run(build_scripted_engine(depth=depth), request("a", constraint)).tokens["a"]
    for cut in (1, len(whole) // 2, len(whole) - 1):
        run = Run(build_scripted_engine(depth=depth), request("a", constraint, emitted=whole[:cut]))
        assert whole[:cut] + run.tokens["a"] == whole
        assert run.ends["a"].is_satisfied is True
    complete = Run(build_scripted_engine(depth=depth), request("a", constraint, emitted=whole))
    assert complete.tokens["a"] == []
    assert complete.ends["a"].reason is FinishReason.STOP


def test_a_row_cut_off_says_so() -> None:
    run = Run(build_scripted_engine(), request("a", grammar(ConstraintKind.JSON_SCHEMA, PERSON), max_tokens=5))
    assert run.ends["a"].reason is FinishReason.LENGTH
    assert run.ends["a"].is_satisfied is False


def test_tokens_of_another_grammar_end_that_row_alone() -> None:
    constraint = grammar(ConstraintKind.JSON_SCHEMA, PERSON)
    run = Run(build_scripted_engine(), request("a", constraint, emitted=b"no json"), request("b", constraint))
    assert run.ends["a"].reason is FinishReason.ERROR
    assert run.ends["a"].error_code == ErrorCode.CONSTRAINT
    assert run.ends["b"].is_satisfied is True


class _Fragile:
    """A grammar whose rows fail at their third token, in `fill` or in `advance`."""

    def __init__(self, where: str) -> None:
        self.num_mask_words = 8
        self.where = where

    def row(self, *, thinking: bool = False) -> "_FragileRow":
        return _FragileRow(self.where)


class _FragileRow:
    is_satisfied = False
    is_finished = False

    def __init__(self, where: str) -> None:
        self._where = where
        self._num_tokens = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        self._num_tokens += len(token_ids)
        if self._where == "advance" and self._num_tokens == 3:
            raise ConstraintFailed("the grammar broke")

    def fill(self, words: Any) -> None:
        words.fill(-1)
        if self._where == "fill" and self._num_tokens == 2:
            raise ConstraintFailed("the grammar broke")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("where", ["fill", "advance"])
def test_a_grammar_that_breaks_ends_its_row_alone(where: str, depth: int) -> None:
    expected = Run(build_scripted_engine(depth=depth), request("free")).tokens["free"]
    choice = grammar(ConstraintKind.CHOICE, ["yes", "no"])
    run = Run(build_scripted_engine(depth=depth), request("a", _Fragile(where)), request("free"), request("c", choice))
    end = run.ends["a"]
    assert (end.reason, end.error_code) == (FinishReason.ERROR, ErrorCode.CONSTRAINT)
    assert end.error_message is not None
    assert "the grammar broke" in end.error_message
    assert run.tokens["free"] == expected
    assert run.text("c") in ("yes", "no")


def test_constrained_rows_of_the_model_beside_greedy_ones() -> None:
    options = EngineOptions(device="cpu", dtype=torch.float32, kv_memory_bytes=1 << 25, poison_freed_pages=True)

    def free() -> EngineRequest:
        return request("free", temperature=0.0, max_tokens=24)

    expected = Run(build_engine(DENSE, options), free()).tokens["free"]
    run = Run(
        build_engine(DENSE, options),
        free(),
        request("json", grammar(ConstraintKind.JSON_SCHEMA, PERSON), temperature=0.0),
        request("biased", grammar(ConstraintKind.REGEX, "[ab]{8}"), temperature=2.0, frequency_penalty=1.0),
    )
    assert run.tokens["free"] == expected
    assert set(json.loads(run.text("json"))) == {"name", "age"}
    assert set(run.text("biased")) <= {"a", "b"}
    assert len(run.text("biased")) == 8
