"""What is trained on is what the engine will show and expect."""

import pytest
from gewell_training.encode import HISTORY, NOT_LEARNED, SampleEncoder
from gewell_training.tokenizer import WordEncoder

from gewell.eval.tasks.sample import Sample, Split, assistant, user
from gewell.eval.tasks.suite import TASKS, make_sample
from gewell.text.chat import ChatRenderer, built_in_template
from gewell.text.parser import OutputParser
from gewell.text.tokenizer import HFTokenizer


@pytest.fixture
def encoder(tokenizer: HFTokenizer) -> SampleEncoder:
    return SampleEncoder(tokenizer, WordEncoder(tokenizer))


def text_of(tokenizer: HFTokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_what_the_engine_renders_and_answers_what_it_parses(
    task: str, tokenizer: HFTokenizer, encoder: SampleEncoder
) -> None:
    renderer = ChatRenderer(tokenizer, built_in_template(tokenizer))
    count = WordEncoder(tokenizer).count
    for idx in range(40):
        sample = make_sample(task, Split.TRAIN, 3, idx, count=count, num_tokens=400)
        prompt = renderer.render(sample.messages, tools=sample.tools, thinking=sample.thinking).ids
        encoded = encoder(sample)
        assert encoded.ids[: len(prompt)] == prompt
        assert all(group < 0 for group in encoded.group[: len(prompt)])
        assert all(group >= 0 for group in encoded.group[len(prompt) :])
        assert encoded.ids[-1] in renderer.end_ids
        parser = OutputParser(tokenizer, tools=sample.tools)
        pieces = [*parser.push(encoded.ids[len(prompt) :]), *parser.finish()]
        parsed = {
            channel: "".join(p.text for p in pieces if p.channel == channel) for channel in ("content", "reasoning")
        }
        assert parsed == {"content": sample.answer, "reasoning": sample.thought}
        assert [p.tool_delta.name for p in pieces if p.tool_delta] == ([sample.call["name"]] if sample.call else [])


def test_earlier_answers_are_learned_but_for_their_first_token(tokenizer: HFTokenizer, encoder: SampleEncoder) -> None:
    turns = [user("What is 1+2?"), assistant("3 or so"), user("Sure?")]
    encoded = encoder(Sample(task="copy", messages=turns, answer="yes"))
    learned = [i for i, group in zip(encoded.ids, encoded.group, strict=True) if group == HISTORY]
    assert text_of(tokenizer, learned) == " or so<turn|>"
    hidden = [i for i, group in zip(encoded.ids, encoded.group, strict=True) if group == NOT_LEARNED]
    assert text_of(tokenizer, hidden).endswith(
        "<|turn>model\n3\n<|turn>user\nSure?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    )


def test_lines_are_scored_one_by_one(tokenizer: HFTokenizer, encoder: SampleEncoder) -> None:
    sample = make_sample("niah", Split.HELD_OUT, 0, 0, count=WordEncoder(tokenizer).count, num_tokens=1024)
    encoded = encoder(sample)
    lines = [
        text_of(tokenizer, [i for i, group in zip(encoded.ids, encoded.group, strict=True) if group == n])
        for n in range(16)
    ]
    assert "".join(lines) == f"{sample.answer}<turn|>"
    assert [line.rstrip("\n").removesuffix("<turn|>") for line in lines] == sample.answer.split("\n")
