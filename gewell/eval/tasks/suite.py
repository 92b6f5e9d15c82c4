"""All tasks by name, and samples of them by seed and index."""

from collections.abc import Iterator

from gewell.eval.tasks.numbers import make_arithmetic, make_copy, make_sort
from gewell.eval.tasks.recall import make_recall
from gewell.eval.tasks.records import make_records, make_torture
from gewell.eval.tasks.sample import CountTokens, Make, Request, Sample, Split, sample_rng
from gewell.eval.tasks.smalltalk import make_smalltalk
from gewell.eval.tasks.structured import make_json
from gewell.eval.tasks.tool_use import make_tool
from gewell.eval.tasks.writer_critic import make_critic, make_writer

TASKS: dict[str, Make] = {
    "records": make_records,
    "niah": make_torture,
    "recall": make_recall,
    "writer": make_writer,
    "critic": make_critic,
    "json": make_json,
    "arithmetic": make_arithmetic,
    "sort": make_sort,
    "copy": make_copy,
    "tool": make_tool,
    "smalltalk": make_smalltalk,
}

NIAH_LENGTHS = (1024, 2048, 4096, 8192)  # tokens of prompt and answer together


def make_sample(task: str, split: Split, seed: int, idx: int, *, count: CountTokens, num_tokens: int = 300) -> Sample:
    """The sample with this index: always the same one for the same arguments and tokenizer."""
    return TASKS[task](Request(sample_rng(task, split, seed, idx), split, num_tokens, count))


def held_out(
    task: str, num_samples: int, *, count: CountTokens, num_tokens: int = 300, seed: int = 0
) -> Iterator[Sample]:
    for idx in range(num_samples):
        yield make_sample(task, Split.HELD_OUT, seed, idx, count=count, num_tokens=num_tokens)
