"""Score jobs: log-probabilities of several continuations of one prompt, by an engine that scores one sequence each.

Each continuation becomes a request of its own. They share the prompt through the prefix cache like any siblings: the
first computes it, the others wait for that and resume at its last token but one, whose successor is scored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gewell.engine.api import Engine, EngineInfo, EngineStats, Event, FinishedEvent, FinishReason, TokenLogprobs
from gewell.request import EngineRequest


@dataclass(slots=True)
class _Group:
    """A score job in the engine. `parts` are the ids of its requests, `ends` what has come back."""

    request: EngineRequest
    parts: list[str]
    ends: dict[str, FinishedEvent] = field(default_factory=dict)
    has_started: bool = False


class ScoringEngine:
    """An `Engine` that also takes requests with continuations, and ends them with one event that has all scores."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}  # by id of a part
        self.on_started: Callable[[Sequence[str]], None] | None = None
        engine.on_started = self._note_started

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def add(self, request: EngineRequest) -> None:
        if not request.continuations:
            self._engine.add(request)
            return
        # "#" stands in no job's id.
        parts = [f"{request.request_id}#{i}" for i in range(len(request.continuations))]
        for part in parts:
            self._group_of[part] = request.request_id
        self._groups[request.request_id] = _Group(request, parts)
        prompt = [*request.prompt_ids]
        for part, continuation in zip(parts, request.continuations, strict=True):
            self._engine.add(
                replace(
                    request,
                    request_id=part,
                    prompt_ids=[*prompt, *continuation],
                    continuations=(),
                    score_from=len(prompt),
                    stable_lengths=(len(prompt) - 1,) if len(prompt) > 1 else (),
                    conversation_id=None,
                )
            )

    def cancel(self, request_id: str) -> None:
        group = self._groups.get(request_id)
        for part in [request_id] if group is None else group.parts:
            self._engine.cancel(part)

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        self._engine.finish(request_id, num_output_tokens)

    def has_work(self) -> bool:
        return self._engine.has_work()

    def step(self) -> list[Event]:
        events = self._engine.step()
        if not self._group_of:
            return events
        folded = [self._fold(event) for event in events]
        return [event for event in folded if event is not None]

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        self._engine.close()

    def _note_started(self, request_ids: Sequence[str]) -> None:
        if self.on_started is None:
            return
        started = []
        for request_id in request_ids:
            group = self._groups.get(self._group_of.get(request_id, ""))
            if group is None:
                started.append(request_id)
            elif not group.has_started:
                group.has_started = True
                started.append(group.request.request_id)
        if started:
            self.on_started(started)

    def _fold(self, event: Event) -> Event | None:
        """The event itself, or that of its whole job once this was the last part, or None."""
        group = self._groups.get(self._group_of.get(event.request_id, ""))
        if group is None:
            return event
        if not isinstance(event, FinishedEvent):
            raise RuntimeError(f"request {event.request_id}: a score job has generated tokens")
        group.ends[event.request_id] = event
        if event.reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            for part in group.parts:
                if part not in group.ends:
                    self._engine.cancel(part)
        if len(group.ends) < len(group.parts):
            return None
        del self._groups[group.request.request_id]
        for part in group.parts:
            del self._group_of[part]
        return _folded(group)


def _folded(group: _Group) -> FinishedEvent:
    ends = [group.ends[part] for part in group.parts]
    worst = next((end for end in ends if end.reason is FinishReason.ERROR), None)
    worst = worst or next((end for end in ends if end.reason is FinishReason.CANCELLED), None)
    scores: tuple[tuple[TokenLogprobs, ...], ...] | None = None
    if worst is None:
        scores = tuple(end.prompt_logprobs or () for end in ends)
    started = [end.started_at_s for end in ends if end.started_at_s is not None]
    return replace(
        ends[0] if worst is None else worst,
        request_id=group.request.request_id,
        reason=FinishReason.STOP if worst is None else worst.reason,
        num_prompt_tokens=len(group.request.prompt_ids),
        cache=ends[0].cache,
        prompt_logprobs=None,
        scores=scores,
        started_at_s=min(started, default=None),
        engine_time_s=sum(end.engine_time_s for end in ends),
    )
