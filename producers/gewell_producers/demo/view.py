"""What the demo shows: a live display in a terminal, a line per answer anywhere else, and the table at the end."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gewell.protocol import FinalRecord
from gewell_producers.cli.terminal import printable

NUM_SHOWN = 3  # conversations whose text is streamed
NUM_LINES = 4  # newest lines of each


class LineView:
    """A line per answer, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def began(self, conversation: int, title: str) -> None:
        self._print(conversation, title)

    def text(self, conversation: int, label: str, text: str) -> None:
        pass

    def answered(self, conversation: int | None, label: str, text: str, record: FinalRecord) -> None:
        warm = f"the {record.usage.prompt} tokens that all its prompts begin with are computed"
        self._print(conversation, f"{label}: {_in_one_line(text) or warm}")

    def failed(self, conversation: int | None, label: str, why: str) -> None:
        self._print(conversation, f"{label} failed: {why}")

    def _print(self, conversation: int | None, text: str) -> None:
        place = "" if conversation is None else f"[{conversation + 1}] "
        self._console.print(Text(place + printable(text)), soft_wrap=True)


class LiveView:
    """Bars for jobs and tokens, and the text of a few conversations as it is written."""

    def __init__(self, console: Console, num_jobs: int, num_conversations: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._jobs = self._progress.add_task("jobs", total=num_jobs)
        self._titles = [""] * num_conversations
        self._said: list[list[tuple[str, str]]] = [[] for _ in range(num_conversations)]
        self._speaking: list[tuple[str, str] | None] = [None] * num_conversations
        self._num_tokens = 0
        self._num_failed = 0
        self._started_s = time.monotonic()
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=10, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def began(self, conversation: int, title: str) -> None:
        self._titles[conversation] = title

    def text(self, conversation: int, label: str, text: str) -> None:
        speaking = self._speaking[conversation]
        self._speaking[conversation] = (label, (speaking[1] if speaking else "") + text)

    def answered(self, conversation: int | None, label: str, text: str, record: FinalRecord) -> None:
        if conversation is not None:
            self._speaking[conversation] = None
            self._said[conversation].append((label, text))
        self._num_tokens += record.usage.completion
        self._progress.advance(self._jobs)

    def failed(self, conversation: int | None, label: str, why: str) -> None:
        if conversation is not None:
            self._speaking[conversation] = None
            self._said[conversation].append((label, f"failed: {why}"))
        self._num_failed += 1
        self._progress.advance(self._jobs)

    def _render(self) -> Group:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-3)
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        rate = Text(f"{self._num_tokens} tokens answered, {self._num_tokens / elapsed_s:.1f} tokens/s{failed}")
        panels = [self._panel(i) for i in range(min(NUM_SHOWN, len(self._titles)))]
        return Group(self._progress, rate, *panels)

    def _panel(self, conversation: int) -> Panel:
        said = list(self._said[conversation])
        speaking = self._speaking[conversation]
        body = Text()
        for label, text in said[-(NUM_LINES - 1) :]:
            body.append(f"{label}: ", style="bold").append(f"{printable(_in_one_line(text))}\n")
        if speaking is not None:
            body.append(f"{speaking[0]}: ", style="bold cyan").append(printable(_in_one_line(speaking[1]))).append(" ▌")
        return Panel(body, title=self._titles[conversation], title_align="left", padding=(0, 1))


def _in_one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.strip().splitlines())


def summary_table(rows: list[tuple[str, str]]) -> Table:
    """The table at the end: a name and a figure a row."""
    table = Table(title="gewell demo", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, figure in rows:
        table.add_row(name, figure)
    return table
