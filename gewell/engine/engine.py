"""The engine: requests in, token events out. Composes scheduler, cache and a runner; knows no torch and no Redis."""

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gewell.cache.tiers import Tier
from gewell.engine.api import EngineInfo, EngineStats, Event, FinishedEvent, FinishReason, TokensEvent
from gewell.engine.masks import MaskMaker, StepMasks
from gewell.errors import EngineError
from gewell.protocol import ErrorCode
from gewell.request import CacheAnswer, ConstraintRow, EngineRequest, TokenLogprobs
from gewell.scheduler.batch import Scheduler
from gewell.scheduler.fairness import LANE_WEIGHTS
from gewell.scheduler.plan import PrefillChunk, Runner, StepPlan
from gewell.scheduler.request import RequestState, Stage
from gewell.text.constraint import ConstraintFailed

logger = logging.getLogger(__name__)


class _Cancel(NamedTuple):
    request_id: str


class _Finish(NamedTuple):
    request_id: str
    num_output_tokens: int


_Command = EngineRequest | _Cancel | _Finish


class PagedEngine:
    """`gewell.engine.api.Engine` over any runner. Commands of other threads wait in a queue for the next step.

    is_recording_freed   hand freed pages on to the runner, for it to poison; the pool must record them
    on_started           set by the worker: called in the engine thread with the ids of requests that join the batch,
                         before the step that computes them is launched. Who was in the batch when a process dies is
                         a suspect; who waited is not
    """

    def __init__(
        self,
        *,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        is_recording_freed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._scheduler = scheduler
        self._runner = runner
        self._is_recording_freed = is_recording_freed
        self._clock = clock
        self.on_started: Callable[[Sequence[str]], None] | None = None
        self._commands: deque[_Command] = deque()
        self._requests: dict[str, RequestState] = {}
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._num_arrivals = 0
        self._num_constrained = 0  # of `_requests`
        self._masks = MaskMaker()
        self._busy_s = 0.0  # time in which a step was under way
        self._busy_until_s = 0.0
        self._decode_step_s = 0.0  # running mean of steps of decode rows alone
        self._counts = _Counts()
        self._num_checkpoint_pages = 0
        self._pages_counted_at_s = -1.0
        self._stats = EngineStats(num_pages=scheduler.pool.num_pages, num_free_pages=scheduler.pool.num_free_pages)

    # ------------------------------------------------------------------------------------------------- any thread

    @property
    def info(self) -> EngineInfo:
        return self._info

    def add(self, request: EngineRequest) -> None:
        self._commands.append(request)

    def cancel(self, request_id: str) -> None:
        self._commands.append(_Cancel(request_id))

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        self._commands.append(_Finish(request_id, num_output_tokens))

    def has_work(self) -> bool:
        return bool(self._commands or self._requests or self._in_flight)

    def stats(self) -> EngineStats:
        """As of the end of the last step."""
        return self._stats

    # ---------------------------------------------------------------------------------------------- engine thread

    def step(self) -> list[Event]:
        """Take in commands, launch the next step, return what the oldest step under way has found.

        Raises EngineError when the runner fails as a whole: the process should end.
        """
        if not self.has_work():
            return []
        events: list[Event] = []
        self._take_commands(events)
        plan = self._scheduler.plan()
        if plan is not None:
            self._plan_masks(plan)
            # Without a step under way all tokens are known: the masks can be made while the model computes.
            masks = self._masks.start(plan) if plan.masked_rows and not self._in_flight else None
            self._launch(plan)
            if plan.masked_rows:
                self._draw_masked(plan, masks, events)
        if self._in_flight and (plan is None or len(self._in_flight) > self._runner.depth):
            self._collect(events)
        elif plan is None and self._requests:
            raise EngineError(f"{len(self._requests)} requests wait and no step can be planned")
        self._snapshot()
        return events

    def close(self) -> None:
        self._masks.close()
        self._runner.close()

    def _take_commands(self, events: list[Event]) -> None:
        """Requests that an earlier epoch has completed end after all commands: one of these may cut them shorter."""
        complete: list[EngineRequest] = []
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, EngineRequest):
                self._accept(command, events)
                if command.emitted_ids:
                    complete.append(command)
                continue
            req = self._requests.get(command.request_id)
            if req is None:
                continue  # it ended while the command was on its way
            if isinstance(command, _Cancel):
                self._end(req, FinishReason.CANCELLED, events)
            else:
                req.num_output_tokens = min(req.num_output_tokens, command.num_output_tokens)
                self._end(req, FinishReason.STOP, events)
        for request in complete:
            req = self._requests.get(request.request_id)
            ending = None if req is None else _ending(req, request.emitted_ids[-1])
            if req is None or ending is None:
                continue
            if request.score_from is not None:
                req.max_output_tokens = req.num_output_tokens  # its prompt is still to be scored
            else:
                self._end(req, ending.reason, events, stop_token_id=ending.stop_token_id)

    # ------------------------------------------------------------------------------------------------------ coming

    def _accept(self, request: EngineRequest, events: list[Event]) -> None:
        if request.request_id in self._requests:
            logger.warning("request %s is already here; the second one is dropped", request.request_id)
            return
        refusal = self._refusal(request)
        if refusal is not None:
            events.append(_refused(request, *refusal))
            return
        req = self._make_state(request)
        try:
            req.grammar = _grammar(req)
        except ConstraintFailed as error:
            events.append(_refused(request, ErrorCode.CONSTRAINT, str(error)))
            return
        self._requests[request.request_id] = req
        self._num_constrained += req.grammar is not None
        self._scheduler.add(req)

    def _refusal(self, request: EngineRequest) -> tuple[ErrorCode, str] | None:
        num_prompt = len(request.prompt_ids)
        limit = self._info.max_prompt_tokens
        if not num_prompt:
            return ErrorCode.EMPTY_PROMPT, "the prompt has no tokens"
        if num_prompt > limit:
            return ErrorCode.PROMPT_TOO_LONG, (
                f"the prompt has {num_prompt} tokens; this engine takes at most {limit} "
                f"(context {self._info.max_context}, {self._scheduler.pool.num_pages} KV pages)"
            )
        if request.images and self._info.vision is None:
            return ErrorCode.IMAGE_UNSUPPORTED, "this engine reads text alone"
        if request.lane not in LANE_WEIGHTS:
            return ErrorCode.INVALID_REQUEST, f"lane: {request.lane!r} is not one of {', '.join(LANE_WEIGHTS)}"
        if request.score_from is not None and not 1 <= request.score_from <= num_prompt:
            return ErrorCode.INVALID_REQUEST, f"score_from: {request.score_from} is not a position of 1 to {num_prompt}"
        return None

    def _make_state(self, request: EngineRequest) -> RequestState:
        sampling = request.sampling
        tokens = array("i", request.prompt_ids)
        tokens.extend(request.emitted_ids)
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= frozenset(request.eos_token_ids)
        self._num_arrivals += 1
        return RequestState(
            request=request,
            order=self._num_arrivals,
            tokens=tokens,
            num_prompt_tokens=len(request.prompt_ids),
            max_output_tokens=min(sampling.max_tokens, self._info.max_context - len(request.prompt_ids)),
            num_output_tokens=len(request.emitted_ids),
            stop_ids=stop_ids,
            image_runs=tuple((image.start, image.end) for image in request.images),
        )

    # ----------------------------------------------------------------------------------------------------- stepping

    def _launch(self, plan: StepPlan) -> None:
        now = self._clock()
        for req in plan.preempted:
            req.engine_time_s += self._busy_s - req.running_since_s
        for req in plan.joined:
            req.running_since_s = self._busy_s
            if req.started_at_s is None:
                req.started_at_s = now
                self._counts.prompt_tokens += req.num_prompt_tokens
                self._counts.cached_tokens += req.num_cached_tokens
        if plan.joined and self.on_started is not None:
            self.on_started([req.request_id for req in plan.joined])
        if self._is_recording_freed:
            restored = {page for move in plan.transfers if move.target is Tier.GPU for _, page in move.pairs}
            plan.freed_pages = [page for page in self._scheduler.pool.drain_freed() if page not in restored]
        self._counts.planned(plan)
        try:
            self._runner.launch(plan)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"step {plan.step_idx} could not be launched: {error}") from error
        self._in_flight.append((plan, now))

    def _plan_masks(self, plan: StepPlan) -> None:
        if self._num_constrained:
            rows = plan.sampling_rows()
            plan.masked_rows = [i for i, req in enumerate(rows) if req.grammar is not None]

    def _draw_masked(self, plan: StepPlan, masks: StepMasks | None, events: list[Event]) -> None:
        """What may be drawn depends on the tokens of the step before: take those first, while the device computes."""
        while len(self._in_flight) > 1:
            self._collect(events)
        words, failed = (masks or self._masks.start(plan)).result()
        try:
            self._runner.draw(words)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"step {plan.step_idx}: its tokens could not be drawn: {error}") from error
        for req, failure in failed:
            self._end_failed(req, failure, events)

    def _collect(self, events: list[Event]) -> None:
        plan, launched_at_s = self._in_flight.popleft()
        try:
            result = self._runner.collect()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"step {plan.step_idx} failed: {error}") from error
        now = self._clock()
        elapsed = now - max(launched_at_s, self._busy_until_s)
        self._busy_s += elapsed
        self._busy_until_s = now
        self._learn_costs(plan, elapsed)
        rows = plan.sampling_rows()
        if len(result.token_ids) != len(rows):
            raise EngineError(f"step {plan.step_idx}: {len(result.token_ids)} tokens for {len(rows)} rows")
        bad = [rows[i] for i in result.bad_rows] + [plan.chunks[i].req for i in result.bad_chunks]
        for i, scores in result.scores.items():
            _note_scores(plan.chunks[i], scores)
        self._scheduler.complete(plan, bad)
        for req in bad:
            if req.stage is not Stage.FINISHED:
                self._end_broken(req, events)
        logprobs = result.logprobs
        for i, (req, token_id) in enumerate(zip(rows, result.token_ids, strict=True)):
            if req.stage is Stage.FINISHED:
                continue  # ended while the step was under way
            req.tokens.append(token_id)
            req.num_output_tokens += 1
            self._counts.generated_tokens += 1
            if req.first_token_at_s is None:
                req.first_token_at_s = now
            lp = (logprobs[i],) if i in logprobs else None
            events.append(TokensEvent(request_id=req.request_id, token_ids=(token_id,), logprobs=lp))
            if req.grammar is not None and token_id not in req.stop_ids:
                try:
                    req.grammar.advance((token_id,))
                except ConstraintFailed as error:
                    self._end_failed(req, error, events)
                    continue
            self._end_if_complete(req, token_id, events)
        for chunk in plan.chunks:
            if chunk.is_last and not chunk.samples and chunk.req.stage is not Stage.FINISHED:
                if chunk.req.num_output_tokens:  # by an earlier epoch
                    self._end_if_complete(chunk.req, chunk.req.tokens[-1], events)
                else:
                    self._end(chunk.req, FinishReason.LENGTH, events)  # nothing was to be generated

    def _learn_costs(self, plan: StepPlan, elapsed_s: float) -> None:
        """What prefill costs on this device: the time that a step took beyond one of decode rows alone."""
        if not plan.chunks:
            self._decode_step_s += 0.1 * (elapsed_s - self._decode_step_s)
        elif len(plan.chunks) == 1:
            (chunk,) = plan.chunks
            seconds = elapsed_s - (self._decode_step_s if plan.decode_rows else 0.0)
            self._scheduler.prefixes.observe_prefill(chunk.start, chunk.end, seconds)

    # ------------------------------------------------------------------------------------------------------- ending

    def _end(
        self, req: RequestState, reason: FinishReason, events: list[Event], *, stop_token_id: int | None = None
    ) -> None:
        is_completed = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if is_completed:
            self._scheduler.lengths.ended(req)
        self._leave(req, is_completed=is_completed)
        events.append(_finished(req, reason, stop_token_id=stop_token_id))

    def _end_if_complete(self, req: RequestState, last_token_id: int, events: list[Event]) -> None:
        ending = _ending(req, last_token_id)
        if ending is not None:
            self._end(req, ending.reason, events, stop_token_id=ending.stop_token_id)

    def _end_broken(self, req: RequestState, events: list[Event]) -> None:
        message = f"the logits of output token {req.num_output_tokens} were not numbers"
        logger.error("request %s, position %d: %s", req.request_id, req.num_tokens, message)
        self._leave(req, is_completed=False, is_sound=False)
        events.append(_finished(req, FinishReason.ERROR, error_code=ErrorCode.NUMERICS, error_message=message))

    def _end_failed(self, req: RequestState, failure: ConstraintFailed, events: list[Event]) -> None:
        logger.warning("request %s left its grammar at output token %d", req.request_id, req.num_output_tokens)
        self._leave(req, is_completed=False)
        events.append(_finished(req, FinishReason.ERROR, error_code=ErrorCode.CONSTRAINT, error_message=str(failure)))

    def _leave(self, req: RequestState, *, is_completed: bool, is_sound: bool = True) -> None:
        if req.row_idx >= 0:
            req.engine_time_s += self._busy_s - req.running_since_s
        self._scheduler.remove(req, is_completed=is_completed, is_sound=is_sound)
        del self._requests[req.request_id]
        self._num_constrained -= req.grammar is not None

    def _checkpoint_pages(self) -> int:
        """A figure for people, not worth counting in every step."""
        now = self._clock()
        if now - self._pages_counted_at_s > 0.2 or not self.has_work():
            self._pages_counted_at_s = now
            self._num_checkpoint_pages = self._scheduler.prefixes.num_evictable_pages
        return self._num_checkpoint_pages

    def _snapshot(self) -> None:
        scheduler, counts = self._scheduler, self._counts
        self._stats = EngineStats(
            num_steps=counts.num_steps,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            decode_rows_sum=counts.decode_rows_sum,
            num_decode_steps=counts.num_decode_steps,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            computed_tokens=counts.computed_tokens,
            generated_tokens=counts.generated_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_pages=scheduler.pool.num_pages,
            num_free_pages=scheduler.pool.num_free_pages,
            checkpoint_pages=self._checkpoint_pages(),
            num_checkpoints=scheduler.prefixes.num_checkpoints,
            last_step_at_s=self._busy_until_s,
            step_time_s=self._busy_s,
        )


class _Counts:
    """Counters that only grow."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.decode_rows_sum = 0
        self.num_decode_steps = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.generated_tokens = 0

    def planned(self, plan: StepPlan) -> None:
        self.num_steps += 1
        self.computed_tokens += plan.num_prefill_tokens
        if plan.decode_rows:
            self.num_decode_steps += 1
            self.decode_rows_sum += len(plan.decode_rows)


class _Ending(NamedTuple):
    reason: FinishReason
    stop_token_id: int | None = None


def _ending(req: RequestState, last_token_id: int) -> _Ending | None:
    """How a request ends whose newest token is this one; None: it goes on."""
    if last_token_id in req.stop_ids and req.num_output_tokens >= req.request.sampling.min_tokens:
        return _Ending(FinishReason.STOP, last_token_id)
    if req.grammar is not None and req.grammar.is_finished:
        return _Ending(FinishReason.STOP)  # only an end id could follow
    return _Ending(FinishReason.LENGTH) if req.is_complete else None


def _grammar(req: RequestState) -> ConstraintRow | None:
    """A row of the request's grammar that has taken in what earlier epochs generated."""
    request = req.request
    if request.constraint is None:
        return None
    row = request.constraint.row(thinking=request.thinking)
    emitted = request.emitted_ids
    row.advance(emitted[:-1] if emitted and emitted[-1] in req.stop_ids else emitted)
    return row


def _note_scores(chunk: PrefillChunk, scores: list[TokenLogprobs]) -> None:
    """A preempted request is computed again from its first scored token on: what stands is written over."""
    req = chunk.req
    assert req.request.score_from is not None
    del req.scored[chunk.scored[0] - req.request.score_from :]
    req.scored.extend(scores)


def _finished(
    req: RequestState,
    reason: FinishReason,
    *,
    stop_token_id: int | None = None,
    error_code: str | None = None,
    error_message: str | None = None,
) -> FinishedEvent:
    return FinishedEvent(
        request_id=req.request_id,
        reason=reason,
        num_prompt_tokens=req.num_prompt_tokens,
        num_output_tokens=req.num_output_tokens,
        cache=req.answer,
        stop_token_id=stop_token_id,
        error_code=error_code,
        error_message=error_message,
        prompt_logprobs=None if req.request.score_from is None else tuple(req.scored),
        is_satisfied=None if req.grammar is None else req.grammar.is_satisfied,
        started_at_s=req.started_at_s,
        first_token_at_s=req.first_token_at_s,
        engine_time_s=req.engine_time_s,
    )


def _refused(request: EngineRequest, code: ErrorCode, message: str) -> FinishedEvent:
    return FinishedEvent(
        request_id=request.request_id,
        reason=FinishReason.ERROR,
        num_prompt_tokens=len(request.prompt_ids),
        num_output_tokens=len(request.emitted_ids),
        cache=CacheAnswer(),
        error_code=code,
        error_message=message,
    )
