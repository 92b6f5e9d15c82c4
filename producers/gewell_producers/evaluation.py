"""Puts an evaluation's questions through the queue, like any other producer."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gewell.errors import JobFailed
from gewell.eval.divergence import LogProbs, spread_positions
from gewell.eval.questions import Question
from gewell.eval.report import Answer
from gewell.job import MAX_LOGPROBS
from gewell.protocol import FinalRecord, Lane, State
from gewell.text.chat import ChatRenderer
from gewell_producers.client import Client
from gewell_producers.job import Job


def question_job(question: Question, lane: Lane = Lane.NORMAL) -> Job:
    """The likeliest answer, one prompt that nobody will continue."""
    request: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": question.max_tokens,
        "chat_template_kwargs": {"enable_thinking": question.thinking},
    }
    if question.tools:
        request["tools"] = list(question.tools)
    return Job.chat(question.messages, job={"lane": lane, "stream": False, "cache": {"one_off": True}}, **request)


def to_answer(record: FinalRecord) -> Answer:
    text = record.text
    if record.tool_calls:
        call = record.tool_calls[0]
        text = json.dumps({"name": call["name"], "arguments": json.loads(call["arguments"])})
    error = None
    if record.state is not State.DONE:
        error = record.error.code if record.error is not None else str(record.state)
    elif record.finish_reason == "length":
        error = "length"
    return Answer(
        text=text,
        error=error,
        num_prompt_tokens=record.usage.prompt,
        num_cached_tokens=record.usage.cached,
        num_output_tokens=record.usage.completion,
    )


def ask(
    client: Client, questions: Sequence[Question], progress: Callable[[int], None] = lambda num_done: None
) -> Iterator[tuple[Question, Answer]]:
    """All questions with their answers, in the questions' order."""
    jobs = [question_job(question) for question in questions]
    records: dict[str, FinalRecord] = {}
    for record in client.map(jobs):
        records[record.id] = record
        progress(len(records))
    for job, question in zip(jobs, questions, strict=True):
        yield question, to_answer(records[job.id])


@dataclass(frozen=True, slots=True)
class Position:
    """A place in an answer: the model is asked for the token after `ids`."""

    group: str
    ids: tuple[int, ...]


def answer_positions(
    client: Client, questions: Sequence[Question], renderer: ChatRenderer, most: int
) -> Iterator[Position]:
    """Up to `most` places in each question's likeliest answer, evenly spread. Raises JobFailed for a failed answer."""
    jobs = [question_job(question) for question in questions]
    for question, record in zip(questions, client.gather(jobs), strict=True):
        if record.state is not State.DONE:
            raise JobFailed(record.id, record.to_dict())
        prompt = renderer.render(question.messages, tools=question.tools, thinking=question.thinking).ids
        for n in spread_positions(len(record.token_ids), most):
            yield Position(question.group, (*prompt, *record.token_ids[:n]))


def next_token_logprobs(client: Client, positions: Sequence[Position]) -> list[LogProbs]:
    """The likeliest tokens at each position. Raises JobFailed."""
    jobs = [
        Job.completion(
            position.ids,
            job={"stream": False},
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=MAX_LOGPROBS,
        )
        for position in positions
    ]
    found: list[LogProbs] = []
    for record in client.gather(jobs):
        if record.state is not State.DONE or not record.logprobs:
            raise JobFailed(record.id, record.to_dict())
        found.append({entry["id"]: entry["lp"] for entry in record.logprobs[0]["top"]})
    return found
