"""Runs traces through policies in worker processes and lays the results out: rows, a table, a plot."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from rich.table import Table

from gewell.cache.sim.baselines import BASELINES
from gewell.cache.sim.machine import run_trace
from gewell.cache.sim.ours import GewellStore
from gewell.cache.sim.trace import load_trace
from gewell.errors import ConfigError

OURS = "gewell"
POLICIES = (OURS, *BASELINES)
REFERENCE = "clairvoyant"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """The machine and what the policies are told.

    gpu_gib, host_gib   page pools; the GPU's holds running jobs too
    lookahead           waiting jobs that the cache sees
    use_expect          jobs name the job after which their conversation returns (derived from the trace's `after`)
    """

    gpu_gib: float = 64.0
    host_gib: float = 0.0
    lookahead: int = 1024
    width: int = 64
    use_expect: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("gpu_gib", self.gpu_gib, 1),
            ("host_gib", self.host_gib, 0),
            ("lookahead", self.lookahead, 0),
            ("width", self.width, 1),
        ):
            if not value >= least:
                raise ConfigError(name, value, f"at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy on one trace. ratio_to_clairvoyant is None when the clairvoyant was not run or served nothing."""

    trace: str
    policy: str
    jobs: int
    prompt_tokens: int
    served_tokens: int
    host_tokens: int
    width: float
    seconds: float
    ratio_to_clairvoyant: float | None = None

    @property
    def share(self) -> float:
        return self.served_tokens / self.prompt_tokens

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def simulate(
    paths: list[Path],
    policies: list[str],
    options: SimOptions,
    *,
    num_processes: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[Row]:
    """One row for each trace and policy, in the order given. Raises ConfigError for a trace that cannot be used."""
    runs = [(path, policy, at) for path in paths for policy in policies for at in range(_num_stores(policy))]
    rows: dict[tuple[Path, str], Row] = {}
    for path, policy, row in _run_all(runs, options, num_processes):
        best = rows.get((path, policy))
        if best is None or row.served_tokens > best.served_tokens:
            rows[path, policy] = row
        on_done()
    return [_with_ratio(rows[path, policy], rows.get((path, REFERENCE))) for path in paths for policy in policies]


def num_runs(paths: list[Path], policies: list[str]) -> int:
    return len(paths) * sum(_num_stores(policy) for policy in policies)


def _num_stores(policy: str) -> int:
    return 1 if policy == OURS else len(BASELINES[policy])


def _run_all(
    runs: list[tuple[Path, str, int]], options: SimOptions, num_processes: int
) -> Iterator[tuple[Path, str, Row]]:
    if num_processes <= 1 or len(runs) == 1:
        for path, policy, at in runs:
            yield path, policy, run_one(path, policy, at, options)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        pending = {pool.submit(run_one, path, policy, at, options): (path, policy) for path, policy, at in runs}
        try:
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield (*pending.pop(future), future.result())
        finally:
            pool.shutdown(cancel_futures=True)


def run_one(path: Path, policy: str, at: int, options: SimOptions) -> Row:
    """A trace through one store of a policy."""
    trace = load_trace(path)
    gpu_bytes, host_bytes = options.gpu_gib * 2**30, options.host_gib * 2**30
    begin = time.perf_counter()
    if policy == OURS:
        ours = GewellStore(gpu_bytes, host_bytes, lookahead=options.lookahead, use_expect=options.use_expect)
        counts = run_trace(trace, ours, width=options.width)
    else:
        counts = run_trace(trace, BASELINES[policy][at](trace.jobs, gpu_bytes, host_bytes), width=options.width)
    return Row(
        trace=trace.name,
        policy=policy,
        jobs=counts.jobs,
        prompt_tokens=counts.prompt_tokens,
        served_tokens=counts.served_tokens,
        host_tokens=counts.host_tokens,
        width=round(counts.width, 2),
        seconds=round(time.perf_counter() - begin, 3),
    )


def _with_ratio(row: Row, reference: Row | None) -> Row:
    if reference is None or not reference.served_tokens:
        return row
    fields = asdict(row)
    fields["ratio_to_clairvoyant"] = round(row.served_tokens / reference.served_tokens, 5)
    return Row(**fields)


def table(rows: list[Row], policies: list[str], options: SimOptions) -> Table:
    """Served share of prompt tokens in percent; in brackets, percent of the clairvoyant."""
    memory = f"{options.gpu_gib:g} GiB" + (f" + {options.host_gib:g} GiB host" if options.host_gib else "")
    hints = ", with expect" if options.use_expect else ""
    result = Table(title=f"Prompt tokens served from cache, % (of the clairvoyant, %), {memory}{hints}")
    result.add_column("trace", no_wrap=True)
    result.add_column("jobs", justify="right")
    result.add_column("prompt M", justify="right")
    for policy in policies:
        result.add_column(policy, justify="right", no_wrap=True, style="bold" if policy == OURS else None)
    by_trace: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_trace.setdefault(row.trace, {})[row.policy] = row
    for name, found in by_trace.items():
        first = next(iter(found.values()))
        cells = [_cell(found[policy]) for policy in policies]
        result.add_row(name, str(first.jobs), f"{first.prompt_tokens / 1e6:.1f}", *cells)
    if len(by_trace) > 1:
        result.add_section()
        result.add_row("mean", "", "", *[_mean_cell([r for r in rows if r.policy == policy]) for policy in policies])
    return result


def _cell(row: Row) -> str:
    ratio = "" if row.ratio_to_clairvoyant is None else f" ({100 * row.ratio_to_clairvoyant:.1f})"
    return f"{100 * row.share:.1f}{ratio}"


def _mean_cell(rows: list[Row]) -> str:
    ratios = [row.ratio_to_clairvoyant for row in rows if row.ratio_to_clairvoyant is not None]
    ratio = f" ({100 * sum(ratios) / len(ratios):.1f})" if ratios else ""
    return f"{100 * sum(row.share for row in rows) / len(rows):.1f}{ratio}"


def plot(rows: list[Row], policies: list[str], path: Path) -> None:
    """A grouped bar chart of served shares as PNG. Raises ConfigError when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ConfigError(
            "plot", str(path), "needs matplotlib: pip install 'gewell[plots]' (in a checkout: '.[plots]')"
        ) from e
    names = list(dict.fromkeys(row.trace for row in rows))
    share = {(row.trace, row.policy): 100 * row.share for row in rows}
    figure = Figure(figsize=(max(6.0, 1.4 * len(names)), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(policies)
    for i, policy in enumerate(policies):
        heights = [share[name, policy] for name in names]
        axes.bar([x + i * width for x in range(len(names))], heights, width, label=policy)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(names))], names, rotation=25, ha="right")
    axes.set_ylabel("prompt tokens served, %")
    axes.legend(ncols=len(policies), fontsize="small")
    figure.savefig(path, dpi=150)
