"""The right answers are right: a wrong one would teach and then reward a wrong model."""

import json
import re
from random import Random

import pytest

from gewell.eval.tasks.numbers import is_held_out
from gewell.eval.tasks.sample import Sample, Split
from gewell.eval.tasks.suite import NIAH_LENGTHS, TASKS, held_out, make_sample
from gewell.eval.tasks.writer_critic import ACCEPTED, random_fields, record_text, remark, with_faults


def count(text: str) -> int:
    """About what a small vocabulary makes of the text: words, digits and signs one by one."""
    return len(re.findall(r" ?[A-Za-z]+|\S|\n", text))


def samples(task: str, split: Split = Split.TRAIN, *, num: int = 60, num_tokens: int = 600) -> list[Sample]:
    return [make_sample(task, split, 7, idx, count=count, num_tokens=num_tokens) for idx in range(num)]


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_is_fixed_by_its_seed_and_differs_between_splits(task: str) -> None:
    assert samples(task) == samples(task)
    assert samples(task) != samples(task, Split.HELD_OUT)
    assert next(held_out(task, 1, count=count)) == make_sample(task, Split.HELD_OUT, 0, 0, count=count)


def values_told(text: str) -> dict[str, str]:
    return {m[1]: m[2] for m in re.finditer(r"^(?:update )?([a-z]+-[a-z]+)=(\d{4})$", text, re.MULTILINE)}


@pytest.mark.parametrize("task", ["records", "niah"])
def test_record_answers_are_the_last_values_told_in_the_order_asked(task: str) -> None:
    for sample in samples(task):
        told = values_told(sample.messages[0]["content"].partition("\n\n")[0])
        asked = re.findall(r"[a-z]+-[a-z]+", sample.messages[-1]["content"].rpartition("\n\n")[2])
        if "=" in sample.answer:
            assert sample.answer == "\n".join(f"{key}={told[key]}" for key in asked)
        else:
            assert sample.answer == told.get(asked[0], "unknown")


def test_records_are_overwritten_and_some_keys_are_unknown() -> None:
    made = samples("records", num=300)
    assert any("\nupdate " in sample.messages[0]["content"] for sample in made)
    assert any(sample.answer == "unknown" for sample in made)


@pytest.mark.parametrize("num_tokens", NIAH_LENGTHS)
def test_torture_fills_its_length_and_asks_for_sixteen_keys(num_tokens: int) -> None:
    sample = make_sample("niah", Split.HELD_OUT, 0, 0, count=count, num_tokens=num_tokens)
    assert len(sample.answer.splitlines()) == 16
    length = count(sample.messages[0]["content"]) + count(sample.answer)
    assert num_tokens - 160 < length < num_tokens


def test_writer_and_critic_with_right_answers_come_to_an_end() -> None:
    rng = Random(5)
    for _ in range(50):
        facts = random_fields(rng, 6)
        record = with_faults(rng, facts, 3)
        for _ in range(3):
            said = re.fullmatch(r"(\w+) should be (.+)", remark(facts, record))
            assert said
            record[said[1]] = said[2]
        assert remark(facts, record) == ACCEPTED
        assert record == facts


def test_critic_names_the_first_fault_and_the_writer_writes_the_record_repaired() -> None:
    for sample in samples("critic"):
        head, record = sample.messages[-1]["content"].rsplit("Record:\n", 1)
        facts_line = (head or sample.messages[1]["content"]).split("\n")[1]
        facts = dict(pair.split("=") for pair in facts_line.split("; "))
        assert sample.answer == remark(facts, dict(line.split(": ") for line in record.split("\n")))
    for sample in samples("writer"):
        record = dict(pair.split("=") for pair in sample.messages[1]["content"].split("\n")[1].split("; "))
        for message in sample.messages[3::2]:
            name, value = message["content"].removeprefix("The critic says: ").split(" should be ")
            record[name] = value
        assert sample.answer == record_text(record)


def test_json_answers_have_the_fields_and_types_of_their_schema() -> None:
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}
    for sample in samples("json"):
        schema = json.loads(sample.messages[0]["content"].rsplit("\n", 1)[1])
        value = json.loads(sample.answer)
        assert list(value) == schema["required"]
        assert all(isinstance(value[name], kinds[field["type"]]) for name, field in schema["properties"].items())


@pytest.mark.parametrize("split", Split)
def test_arithmetic_is_right_and_its_held_out_pairs_are_never_trained_on(split: Split) -> None:
    for sample in samples("arithmetic", split):
        for line in sample.answer.splitlines():
            expression = line.rpartition("=")[0] or sample.messages[-1]["content"].removeprefix("What is ").rstrip("?")
            a, sign, b = re.fullmatch(r"(\d+)([+-])(\d+)", expression).groups()
            assert int(line.rpartition("=")[2]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
            assert is_held_out(int(a), int(b)) == (split is Split.HELD_OUT)


def test_sorted_numbers_are_the_given_ones_in_order() -> None:
    for sample in samples("sort"):
        question, numbers = sample.messages[0]["content"].split("\n")
        expected = sorted(map(int, numbers.split()), reverse="large to small" in question)
        assert list(map(int, sample.answer.split())) == expected


def test_tool_calls_name_an_offered_tool_and_its_required_arguments() -> None:
    calls = [sample for sample in samples("tool") if sample.call]
    assert 10 < len(calls) < 60  # the others answer after the tool
    for sample in calls:
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools or ()}
        assert set(sample.call["arguments"]) == set(offered[sample.call["name"]]["required"])
