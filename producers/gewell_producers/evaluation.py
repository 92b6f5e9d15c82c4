"""Puts an evaluation's questions through the queue, like any other producer."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gewell.eval.questions import Question
from gewell.eval.report import Answer
from gewell.protocol import FinalRecord, Lane, State
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
