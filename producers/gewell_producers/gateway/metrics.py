"""The gateway's own numbers, and those of queue and workers as they stand at a scrape."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gewell.protocol import FinalRecord, Lane, WorkerField

_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_WORKER_GAUGES = {
    "decode_rows_mean": (WorkerField.MEAN_DECODE_ROWS, "Mean rows of a decode step since the worker's start"),
    "rows_running": (WorkerField.NUM_RUNNING, "Rows in the batch"),
    "rows_waiting": (WorkerField.NUM_WAITING, "Jobs in the window, tokenised and not running"),
    "pages": (WorkerField.NUM_PAGES, "Pages of the pool"),
    "pages_free": (WorkerField.NUM_FREE_PAGES, "Pages that nothing holds"),
    "checkpoints": (WorkerField.NUM_CHECKPOINTS, "Resume points held"),
    "prompt_tokens": (WorkerField.PROMPT_TOKENS, "Prompt tokens of admitted jobs since the worker's start"),
    "prompt_tokens_cached": (WorkerField.CACHED_TOKENS, "Of those, taken from the cache"),
    "generation_tokens": (WorkerField.GENERATED_TOKENS, "Tokens generated since the worker's start"),
    "preemptions": (WorkerField.NUM_PREEMPTIONS, "Rows put back since the worker's start"),
    "jobs_finished": (WorkerField.NUM_FINISHED, "Jobs finished since the worker's start"),
}


class Metrics:
    """One registry a gateway: two in a process (tests) do not meet."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("gewell_gateway_requests", "Requests answered", ["path", "status"], registry=registry)
        self.disconnects = Counter(
            "gewell_gateway_disconnects", "Callers that left before their answer", registry=registry
        )
        self.in_flight = Gauge("gewell_gateway_in_flight", "Requests being answered", registry=registry)
        self.tokens = Counter("gewell_gateway_tokens", "Tokens of answered jobs", ["kind"], registry=registry)
        self.time_to_first_token = Histogram(
            "gewell_time_to_first_token_seconds", "Enqueued to first token", buckets=_LATENCY_BUCKETS, registry=registry
        )
        self.e2e_latency = Histogram(
            "gewell_e2e_request_latency_seconds", "Enqueued to the end", buckets=_LATENCY_BUCKETS, registry=registry
        )
        self.queue_time = Histogram(
            "gewell_request_queue_time_seconds", "Enqueued to scheduled", buckets=_LATENCY_BUCKETS, registry=registry
        )
        self._queue_depth = Gauge(
            "gewell_queue_depth", "Jobs in a lane, queued and running", ["lane"], registry=registry
        )
        self._redis_up = Gauge("gewell_redis_up", "1: the queue's server answers", registry=registry)
        self._workers = Gauge("gewell_workers", "Workers with a live heartbeat", registry=registry)
        self._of_worker = {
            field: Gauge(f"gewell_worker_{name}", text, ["worker"], registry=registry)
            for name, (field, text) in _WORKER_GAUGES.items()
        }

    def count(self, record: FinalRecord) -> None:
        usage, timing = record.usage, record.timing
        for kind, number in (("prompt", usage.prompt), ("cached", usage.cached), ("generated", usage.completion)):
            self.tokens.labels(kind).inc(number)
        for histogram, value_ms in (
            (self.time_to_first_token, timing.ttft),
            (self.e2e_latency, timing.total),
            (self.queue_time, timing.queue),
        ):
            if value_ms is not None:
                histogram.observe(value_ms / 1000)

    def scrape(self, lanes: Mapping[Lane, int] | None, workers: Mapping[str, Mapping[str, str]]) -> bytes:
        """Prometheus' text format. `lanes` None: the server does not answer."""
        self._redis_up.set(0 if lanes is None else 1)
        self._workers.set(len(workers))
        for lane, depth in (lanes or {}).items():
            self._queue_depth.labels(str(lane)).set(depth)
        for field, gauge in self._of_worker.items():
            gauge.clear()  # a worker that is gone leaves no line behind
            for worker_id, facts in workers.items():
                if field in facts:
                    gauge.labels(worker_id).set(float(facts[field]))
        return generate_latest(self.registry)
