"""`gewell eval`: how well a model answers, measured through the queue."""

import contextlib
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gewell.config import ModelConfig
from gewell.errors import ConfigError
from gewell.eval.divergence import Divergence, LogProbs, summarize
from gewell.eval.questions import Question, file_questions, niah_questions, task_questions
from gewell.eval.report import Report, make_report
from gewell.eval.tasks.sample import CountTokens
from gewell.eval.tasks.suite import NIAH_LENGTHS, TASKS
from gewell.model_store import model_path
from gewell.text.chat import load_chat
from gewell.text.tokenizer import load_tokenizer
from gewell_producers.cli.options import Namespace, Redis, connect
from gewell_producers.client import Client
from gewell_producers.demo.processes import server_and_worker
from gewell_producers.evaluation import answer_positions, ask, next_token_logprobs

app = typer.Typer(help="Measure how well a model answers.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, or name of a stored model.")]
Seed = Annotated[int, typer.Option(help="Another seed asks other questions of the same kind.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write scores and some wrong answers to this file.")]
PngOut = Annotated[Path | None, typer.Option("--png", help="Draw the scores into this file.")]
Least = Annotated[float | None, typer.Option(help="Exit with code 1 when a group's score is below this share.")]


@app.command()
def tasks(
    model: Model,
    names: Annotated[str | None, typer.Option("--tasks", help="Names with commas between; default: all.")] = None,
    data: Annotated[Path | None, typer.Option(help="Your own questions instead: a JSONL file.")] = None,
    num: Annotated[int, typer.Option("-n", min=1, help="Questions of each task.")] = 50,
    seed: Seed = 0,
    least: Least = None,
    json_out: JsonOut = None,
    png: PngOut = None,
    redis: Redis = None,
    ns: Namespace = None,
) -> None:
    """Ask held-out questions of the generated tasks, or those of a file, and score the answers.

    A line of the file is {"prompt" or "messages", "answer", "scorer"?, "image"?, "group"?, "max_tokens"?, "thinking"?};
    scorers are exact, number, contains, lines and json. Without --redis a server and a worker are started for it.
    """
    folder = model_path(model)
    count = _counter(folder)
    if data is not None:
        questions = list(file_questions(data, count=count))
    else:
        chosen = names.split(",") if names else [name for name in TASKS if name != "niah"]
        questions = list(task_questions(chosen, num, count=count, seed=seed))
    _evaluate(model, folder, questions, {"kind": "tasks", "seed": seed}, least, json_out, png, redis, ns)


@app.command()
def niah(
    model: Model,
    lengths: Annotated[str | None, typer.Option(help="Tokens of prompt and answer, with commas between.")] = None,
    num: Annotated[int, typer.Option("-n", min=1, help="Prompts of each length; each asks for 16 values.")] = 8,
    seed: Seed = 0,
    least: Least = None,
    json_out: JsonOut = None,
    png: PngOut = None,
    redis: Redis = None,
    ns: Namespace = None,
) -> None:
    """Ask for 16 values out of long texts of records, some of them overwritten: the share of right values in place.

    What a compressed cache, a quantised model or a restored prefix loses first. Lengths beyond the model's context
    are left out.
    """
    folder = model_path(model)
    wanted = [_length(text) for text in lengths.split(",")] if lengths else NIAH_LENGTHS
    max_context = ModelConfig.from_dir(folder).max_position_embeddings
    questions = list(niah_questions(num, count=_counter(folder), max_context=max_context, lengths=wanted, seed=seed))
    _evaluate(model, folder, questions, {"kind": "niah", "seed": seed}, least, json_out, png, redis, ns)


@app.command()
def kl(
    model: Model,
    against: Annotated[str | None, typer.Option(help="The model to compare; default: the same one.")] = None,
    options: Annotated[str, typer.Option(help="Options of `gewell up` for MODEL, in quotes.")] = "",
    against_options: Annotated[str, typer.Option(help="Options of `gewell up` for the other run.")] = "",
    num: Annotated[int, typer.Option("-n", min=1, help="Questions of each task.")] = 4,
    positions: Annotated[int, typer.Option(min=1, help="Places in each answer.")] = 8,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Compare next-token distributions of two runs on the answers of the first: another type, format or checkpoint.

    For example `--options "--dtype float32" --against-options "--dtype bfloat16"`. Both models need the same tokenizer.
    """
    console = Console(highlight=False)
    folder, other = model_path(model), model_path(against or model)
    count, tokenizer = _counter(folder), load_tokenizer(folder)
    max_context = ModelConfig.from_dir(folder).max_position_embeddings
    questions = [
        *task_questions([name for name in TASKS if name != "niah"], num, count=count, seed=seed),
        *niah_questions(num, count=count, max_context=max_context, lengths=NIAH_LENGTHS[:2], seed=seed),
    ]
    with console.status(f"answers of {model}"), _own_client(folder, shlex.split(options)) as client:
        places = list(answer_positions(client, questions, load_chat(folder, tokenizer), positions))
        reference = next_token_logprobs(client, places)
    with console.status("the other run"), _own_client(other, shlex.split(against_options)) as client:
        compared = next_token_logprobs(client, places)
    pairs: dict[str, list[tuple[LogProbs, LogProbs]]] = {}
    for place, a, b in zip(places, reference, compared, strict=True):
        pairs.setdefault(place.group, []).append((a, b))
    found = {group: summarize(values) for group, values in pairs.items()}
    found["all"] = summarize([pair for values in pairs.values() for pair in values])
    console.print(_divergence_table(f"{model} {options}", f"{against or model} {against_options}", found))
    if json_out is not None:
        values = {group: asdict(divergence) for group, divergence in found.items()}
        json_out.write_text(
            json.dumps({"model": model, "against": against or model, "groups": values}, indent=1) + "\n"
        )


def _divergence_table(reference: str, other: str, found: dict[str, Divergence]) -> Table:
    table = Table(title=f"{reference.strip()} -> {other.strip()}, KL in nats", box=box.SIMPLE)
    for name in ("", "positions", "mean", "99 %", "most", "same choice, %"):
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name), overflow="fold")
    for group, d in found.items():
        numbers = (f"{d.mean_kl:.2e}", f"{d.p99_kl:.2e}", f"{d.max_kl:.2e}", f"{100 * d.same_choice:.2f}")
        table.add_row(group, str(d.num_positions), *numbers)
    return table


def _evaluate(
    model: str,
    folder: Path,
    questions: Sequence[Question],
    about: dict[str, Any],
    least: float | None,
    json_out: Path | None,
    png: Path | None,
    redis: str | None,
    ns: str | None,
) -> None:
    console = Console(highlight=False)
    if not questions:
        raise ConfigError("questions", 0, "there is nothing to ask: no length fits the model, or the file is empty")
    with _client(folder, redis, ns, console) as client, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("asking", total=len(questions))
        started_s = time.monotonic()
        answered = list(ask(client, questions, lambda num_done: progress.update(bar, completed=num_done)))
        seconds = time.monotonic() - started_s
    num_output = sum(answer.num_output_tokens for _, answer in answered)
    about |= {"seconds": round(seconds, 2), "questions": len(questions), "output_tokens": num_output}
    report = make_report(model, answered, about)
    console.print(_table(report))
    console.print(f"{len(questions)} questions in {seconds:.1f} s, {num_output / max(seconds, 1e-9):.0f} tokens/s")
    if json_out is not None:
        report.write_json(json_out)
    if png is not None:
        report.write_png(png)
    low = [group.name for group in report.groups if least is not None and group.score < least]
    if low:
        console.print(f"below {least:.0%}: {', '.join(low)}")
        raise typer.Exit(1)


def _table(report: Report) -> Table:
    """Where the screen is narrow the names fold; numbers and headers are never cut."""
    table = Table(title=report.model, box=box.SIMPLE)
    for name in ("", "asked", "values", "right, %", "95 % within", "prompt", "cut", "failed"):
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name), overflow="fold")
    for group in report.groups:
        interval = f"{100 * group.low:.1f} - {100 * group.high:.1f}"
        numbers = (str(group.num_values), f"{100 * group.score:.1f}", interval, f"{group.prompt_tokens:.0f}")
        table.add_row(group.name, str(group.num_questions), *numbers, str(group.num_cut_off), str(group.num_errors))
    return table


@contextlib.contextmanager
def _client(folder: Path, redis: str | None, ns: str | None, console: Console) -> Iterator[Client]:
    """A client of the named server; without one, of a server and a worker that live as long as the evaluation."""
    if redis is not None:
        with connect(redis, ns) as client:
            client.require_worker()
            yield client
        return
    with contextlib.ExitStack() as stack:
        with console.status("starting a server and a worker"):
            client = stack.enter_context(_own_client(folder))
        yield client


@contextlib.contextmanager
def _own_client(folder: Path, options: Sequence[str] = ()) -> Iterator[Client]:
    with server_and_worker(str(folder), options=options) as url, Client(url, namespace="gewell") as client:
        yield client


def _counter(folder: Path) -> CountTokens:
    tokenizer = load_tokenizer(folder)
    known: dict[str, int] = {}  # the generators count line by line, and lines come again

    def count(text: str) -> int:
        if text not in known:
            known[text] = len(tokenizer.encode(text))
        return known[text]

    return count


def _length(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 512:
        raise ConfigError("lengths", text, "must be numbers of at least 512 tokens")
    return int(text)
