"""The shipped model run by the engine answers right: values far beyond the window survive paging, layouts and reuse.

Random weights cannot show this: a page too few changes their logits a little, and here it makes an answer wrong.
"""

from collections.abc import Sequence

import pytest
import torch
from gewell_kernels.layout import KVLayout

from gewell.engine.api import FinishedEvent, TokensEvent
from gewell.engine.build import EngineOptions, build_engine
from gewell.engine.engine import PagedEngine
from gewell.eval.questions import Question, from_sample
from gewell.eval.scorers import score
from gewell.eval.tasks.sample import Sample, Split, assistant
from gewell.eval.tasks.suite import TASKS, held_out, make_sample
from gewell.model_store import SHIPPED_DIR
from gewell.request import EngineRequest
from gewell.sampling import SamplingParams
from gewell.text.chat import ChatRenderer, load_chat
from gewell.text.parser import OutputParser
from gewell.text.tokenizer import Tokenizer, load_tokenizer

NANO = SHIPPED_DIR / "gewell-nano"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(NANO)


@pytest.fixture(scope="module")
def renderer(tokenizer: Tokenizer) -> ChatRenderer:
    return load_chat(NANO, tokenizer)


class Asker:
    def __init__(self, engine: PagedEngine, tokenizer: Tokenizer, renderer: ChatRenderer) -> None:
        self.engine, self.tokenizer, self.renderer = engine, tokenizer, renderer
        self.num_asked = 0
        self.finished: dict[str, FinishedEvent] = {}

    def ask(self, questions: Sequence[Question]) -> list[float]:
        """All questions at once; the points of each answer."""
        ids: dict[str, list[int]] = {}
        for question in questions:
            name = f"q{self.num_asked}"
            self.num_asked += 1
            ids[name] = []
            self.engine.add(self.request(name, question))
        while self.engine.has_work():
            for event in self.engine.step():
                if isinstance(event, TokensEvent):
                    ids[event.request_id] += event.token_ids
                else:
                    self.finished[event.request_id] = event
        return [self.points(q, ids[name]) for q, name in zip(questions, ids, strict=True)]

    def request(self, name: str, question: Question) -> EngineRequest:
        shape = {"tools": question.tools, "thinking": question.thinking}
        return EngineRequest(
            request_id=name,
            prompt_ids=self.renderer.render(question.messages, **shape).ids,
            stable_lengths=self.renderer.stable_lengths(question.messages, **shape),
            sampling=SamplingParams(temperature=0, max_tokens=question.max_tokens),
            eos_token_ids=self.renderer.end_ids,
        )

    def points(self, question: Question, ids: list[int]) -> float:
        parser = OutputParser(self.tokenizer, tools=question.tools)
        pieces = [*parser.push(ids), *parser.finish()]
        calls = [piece.tool_delta for piece in pieces if piece.tool_delta]
        text = "".join(piece.text for piece in pieces if piece.channel == "content")
        if calls:
            text = f'{{"name": "{calls[0].name}", "arguments": {calls[0].arguments_delta}}}'
        return score(question.scorer, question.expected, text)


def questions_of(task: str, num: int, tokenizer: Tokenizer, num_tokens: int = 300) -> list[Question]:
    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    return [from_sample(s, task, count) for s in held_out(task, num, count=count, num_tokens=num_tokens, seed=3)]


@pytest.mark.parametrize("layout", [KVLayout.V_ONLY, KVLayout.PLAIN])
def test_sixteen_values_of_long_records_are_right_in_each_layout(
    layout: KVLayout, tokenizer: Tokenizer, renderer: ChatRenderer
) -> None:
    options = EngineOptions(device="cpu", dtype=torch.float32, full_layout=layout, poison_freed_pages=True)
    asker = Asker(build_engine(NANO, options), tokenizer, renderer)
    points = asker.ask(questions_of("niah", 1, tokenizer, num_tokens=1200))
    assert points[0] > 0.9


def test_every_skill_is_there_in_bfloat16_with_rows_of_all_kinds_side_by_side(
    tokenizer: Tokenizer, renderer: ChatRenderer
) -> None:
    options = EngineOptions(device="cpu", dtype=torch.bfloat16, poison_freed_pages=True)
    asker = Asker(build_engine(NANO, options), tokenizer, renderer)
    questions = [q for task in TASKS if task != "niah" for q in questions_of(task, 2, tokenizer)]
    points = asker.ask(questions)
    assert sum(points) / len(points) > 0.9


def test_values_are_right_after_the_prefix_was_taken_from_the_cache(
    tokenizer: Tokenizer, renderer: ChatRenderer
) -> None:
    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    engine = build_engine(NANO, EngineOptions(device="cpu", dtype=torch.float32, poison_freed_pages=True))
    asker = Asker(engine, tokenizer, renderer)
    first = make_sample("niah", Split.HELD_OUT, 4, 0, count=count, num_tokens=1024)
    (points,) = asker.ask([from_sample(first, "first", count)])
    assert points > 0.9
    key, _, value = first.answer.splitlines()[5].partition("=")
    follow_up = [*first.messages, assistant(first.answer), {"role": "user", "content": f"What is the value of {key}?"}]
    second = Sample(task="records", messages=follow_up, answer=value)
    (points,) = asker.ask([from_sample(second, "second", count)])
    assert points == 1
    assert asker.finished["q1"].cache.cached_tokens > 600  # the records were not read again
