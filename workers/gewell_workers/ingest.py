"""From entries of the jobs streams to requests in the engine: the whole way of a job before its first token.

`take` gets entries that are pending with us, however they came: read, taken over, due, found again after an outage.
What fails half-way (a lost connection) stays pending and unknown to the table, and the sweep takes it again.
"""

import asyncio
import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gewell.engine.api import EngineInfo, EngineRequest
from gewell.errors import InvalidRequest
from gewell.job import Envelope, Job, Kind, parse_job, read_envelope
from gewell.protocol import GROUP, PROTOCOL_VERSION, RESULT_TTL_S, TERMINAL_STATES, ErrorCode, Keys, State
from gewell_workers.cancel import CancelLog
from gewell_workers.claim import Claim, Kept, Known, Taken, Wanted, claim_jobs, look_up, watch
from gewell_workers.clock import ServerClock
from gewell_workers.dead import bury, bury_broken, bury_nameless
from gewell_workers.duplicates import answer_conflict, answer_duplicate
from gewell_workers.engine_thread import EngineThread
from gewell_workers.images import ImagePart, fetch_blobs
from gewell_workers.jobs import HeldJob, JobTable, ParkedJob
from gewell_workers.logs import fault_of
from gewell_workers.messages import EndJob, OpenJob
from gewell_workers.output_link import OutputLink
from gewell_workers.prepare import Preparer, Prompt
from gewell_workers.probation import Probation, Suspect
from gewell_workers.resp import Client, LinkLost, ReplyError, pack

log = logging.getLogger(__name__)

_INLINE_BODY_BYTES = 64 * 1024  # larger bodies are parsed in a thread
_INLINE_PROMPT_BYTES = 2 * 1024  # larger ones are tokenised in a thread; a small one costs less than the way there


@dataclass(slots=True, kw_only=True, eq=False)
class _Draft:
    """One entry on its way in. Exactly one of prompt and ending is set once it is ready to be claimed."""

    taken: Taken
    envelope: Envelope
    job: Job | None = None
    refusal: InvalidRequest | None = None
    known: Known | None = None
    prompt: Prompt | None = None
    ending: EndJob | None = None

    @property
    def must_count_crash(self) -> bool:
        """The worker that had it died while it was in the batch."""
        return self.taken.is_crash and self.known is not None and self.known.started_at_ms is not None

    @property
    def num_crashes(self) -> int:
        assert self.known is not None
        return self.known.crashes + (1 if self.must_count_crash else 0)

    def wanted(self) -> Wanted:
        assert self.known is not None
        return Wanted(taken=self.taken, known=self.known, is_crash=self.must_count_crash)

    def end(
        self, state: State, reason: str, code: str | None = None, message: str = "", field: str | None = None
    ) -> None:
        self.ending = EndJob(
            job_id=self.taken.job_id, state=state, finish_reason=reason, code=code, message=message, field=field
        )


class Ingest:
    def __init__(
        self,
        client: Client,
        keys: Keys,
        *,
        worker_id: str,
        info: EngineInfo,
        preparer: Preparer,
        table: JobTable,
        engine: EngineThread,
        output: OutputLink,
        clock: ServerClock,
        cancels: CancelLog,
        probation: Probation,
        max_parked: int,
    ) -> None:
        self._client = client
        self._keys = keys
        self._worker_id = worker_id
        self._info = info
        self._preparer = preparer
        self._table = table
        self._engine = engine
        self._output = output
        self._clock = clock
        self._cancels = cancels
        self._probation = probation
        self._max_parked = max_parked
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")
        self._lock = asyncio.Lock()  # one batch at a time: WATCH belongs to the connection

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def take(self, entries: Sequence[Taken]) -> None:
        """Bring entries in, in their order. Raises LinkLost or ReplyError; what was not done is then still pending."""
        async with self._lock:
            new = [taken for taken in entries if taken.entry not in self._table.entries]
            for taken in new:
                self._table.entries.add(taken.entry)
            try:
                await self._take(new)
            except (LinkLost, ReplyError):
                raise
            except Exception as error:
                log.error("taking %d jobs in failed, now one by one: %s", len(new), fault_of(error))
                await self._take_each(new)
            finally:
                for taken in new:
                    if not self._is_busy_with(taken):
                        self._table.entries.discard(taken.entry)

    async def _take_each(self, entries: Sequence[Taken]) -> None:
        """Give up what breaks the intake: left pending, it would be taken over and end one worker after the other."""
        for taken in entries:
            jobs = self._keys.jobs(taken.lane)
            await self._client.call("UNWATCH")
            stands = await self._client.call("XRANGE", jobs, taken.entry_id, taken.entry_id)
            if self._is_busy_with(taken) or not stands:
                continue
            try:
                await self._take([taken])
            except (LinkLost, ReplyError):
                raise
            except Exception as error:
                log.error("job %s: taking it in failed, it is given up: %s", taken.job_id, fault_of(error))
                await self._client.call("UNWATCH")
                await bury_broken(self._client, self._keys, taken)

    def _is_busy_with(self, taken: Taken) -> bool:
        held = self._table.held.get(taken.job_id)
        if held is not None and held.taken.entry == taken.entry:
            return True
        return taken.entry in self._table.parked or taken.entry in self._probation.waiting

    async def _take(self, entries: Sequence[Taken]) -> None:
        nameless = [taken for taken in entries if not taken.job_id]
        if nameless:
            await bury_nameless(self._client, self._keys, nameless)
        drafts = [await self._parse(taken) for taken in entries if taken.job_id]
        await self._look_up(drafts)
        others = [draft for draft in drafts if await self._is_someone_elses(draft)]
        drafts = [draft for draft in drafts if draft not in others and not self._park(draft)]
        for draft in drafts:
            self._judge(draft)
        drafts = [draft for draft in drafts if not self._suspect(draft)]
        await asyncio.gather(*(self._prepare(draft) for draft in drafts if draft.ending is None))
        await bury(self._client, self._keys, [(draft.taken, draft.ending) for draft in drafts if draft.ending])
        if others:  # their transactions have ended our watch
            await self._watch_again(drafts)
        claims = await claim_jobs(
            self._client,
            self._keys,
            [draft.wanted() for draft in drafts],
            worker_id=self._worker_id,
            fingerprint=self._info.fingerprint,
            now_ms=self._clock.now_ms(),
        )
        for draft, claim in zip(drafts, claims, strict=True):
            if claim is not None:
                self._admit(draft, claim)

    async def _watch_again(self, drafts: Sequence[_Draft]) -> None:
        seen = await watch(self._client, self._keys, [draft.taken for draft in drafts])
        for draft, known in zip(drafts, seen, strict=True):
            assert draft.known is not None
            draft.known = dataclasses.replace(known, is_cancelled=draft.known.is_cancelled)

    async def _parse(self, taken: Taken) -> _Draft:
        if len(taken.body) <= _INLINE_BODY_BYTES:
            return _draft(taken)
        return await asyncio.get_running_loop().run_in_executor(self._threads, _draft, taken)

    async def _look_up(self, drafts: Sequence[_Draft]) -> None:
        known = await look_up(
            self._client,
            self._keys,
            [
                (
                    draft.taken,
                    draft.envelope.digest,
                    draft.job.conversation_id if draft.job else None,
                    draft.job.tenant if draft.job else None,
                    draft.job.seed if draft.job else None,
                )
                for draft in drafts
            ],
        )
        for draft, one in zip(drafts, known, strict=True):
            draft.known = one

    async def _is_someone_elses(self, draft: _Draft) -> bool:
        """Duplicates and id conflicts are answered here; an entry whose job is over is only removed."""
        known, taken = draft.known, draft.taken
        assert known is not None
        if known.entry == taken.entry:
            if known.state not in TERMINAL_STATES:
                return False
            jobs = self._keys.jobs(taken.lane)
            await self._client.batch([pack("XACK", jobs, GROUP, taken.entry_id), pack("XDEL", jobs, taken.entry_id)])
        elif known.digest == draft.envelope.digest:
            await answer_duplicate(self._client, self._keys, taken, draft.envelope.reply_to)
        else:
            await answer_conflict(self._client, self._keys, taken, draft.envelope)
        return True

    def _park(self, draft: _Draft) -> bool:
        job, known = draft.job, draft.known
        assert known is not None
        if job is None or job.not_before_ms is None or known.is_cancelled:
            return False
        if job.not_before_ms <= self._clock.now_ms() or len(self._table.parked) >= self._max_parked:
            return False
        self._table.parked[draft.taken.entry] = ParkedJob(
            lane=draft.taken.lane,
            entry_id=draft.taken.entry_id,
            job_id=draft.taken.job_id,
            conversation_id=job.conversation_id,
            tenant=job.tenant,
            due_ms=job.not_before_ms,
        )
        return True

    def _suspect(self, draft: _Draft) -> bool:
        """Hold a job back that was in the batch of a worker that died, until its trial."""
        taken, job, known = draft.taken, draft.job, draft.known
        assert known is not None
        if draft.ending is not None or job is None or taken.is_trial or known.started_at_ms is None:
            return False
        if not taken.is_crash:
            return False
        suspect = Suspect(
            lane=taken.lane,
            entry_id=taken.entry_id,
            job_id=taken.job_id,
            conversation_id=job.conversation_id,
            tenant=job.tenant,
            started_at_ms=known.started_at_ms,
            must_be_alone=draft.num_crashes >= job.max_crashes,
        )
        self._probation.add(suspect)
        return True

    def _judge(self, draft: _Draft) -> None:
        """Ends that need no prompt."""
        job, known = draft.job, draft.known
        assert known is not None
        if known.is_cancelled:
            draft.end(State.CANCELLED, "cancelled")
        elif draft.refusal is not None:
            error = draft.refusal
            draft.end(State.ERROR, "error", error.code, error.message, error.field)
        elif job is not None and draft.num_crashes > job.max_crashes:
            crashes, limit = draft.num_crashes, job.max_crashes
            message = f"{crashes} workers died with this job running, max_crashes is {limit}"
            draft.end(State.ERROR, "error", ErrorCode.CRASHED, message)
        elif job is not None and job.deadline_ms is not None and job.deadline_ms <= self._clock.now_ms():
            message = "deadline_ms passed before the job was started"
            draft.end(State.EXPIRED, "cancelled", ErrorCode.DEADLINE, message, "deadline_ms")

    async def _prepare(self, draft: _Draft) -> None:
        assert draft.job is not None
        try:
            parts = self._preparer.image_parts(draft.job)
            is_small = not parts and draft.job.constraint is None and len(draft.taken.body) <= _INLINE_PROMPT_BYTES
            if is_small:
                draft.prompt = self._preparer.prepare(draft.job)
            else:
                blobs = await self._blobs(parts)
                loop = asyncio.get_running_loop()
                draft.prompt = await loop.run_in_executor(self._threads, self._preparer.prepare, draft.job, blobs)
        except InvalidRequest as error:
            draft.end(State.ERROR, "error", error.code, error.message, error.field)
        except (LinkLost, ReplyError):
            raise
        except Exception as error:  # one job's fault must not stop the intake
            log.error("job %s: preparing it failed: %s", draft.taken.job_id, fault_of(error))
            draft.end(State.ERROR, "error", ErrorCode.INTERNAL, "preparing the prompt failed; the worker's log has it")

    async def _blobs(self, parts: Sequence[ImagePart]) -> dict[str, bytes]:
        if not parts or self._preparer.images is None:
            return {}
        return await fetch_blobs(self._client, self._keys, parts, self._preparer.images.limits)

    def _admit(self, draft: _Draft, claim: Claim) -> None:
        """The job is ours: open its stream in the output process, then give it to the engine or end it."""
        taken, job, prompt = draft.taken, draft.job, draft.prompt
        if draft.ending is None and not claim.same_model:
            draft.end(State.ERROR, "error", ErrorCode.RESTART_IMPOSSIBLE, "tokens of another model or weights are out")
        if draft.ending is None and self._cancels.covers(taken, job):
            draft.end(State.CANCELLED, "cancelled")  # the cancel came while the prompt was made ready
        held = HeldJob(
            taken=taken,
            epoch=claim.epoch,
            num_tokens=len(prompt.ids) if prompt else 0,
            conversation_id=job.conversation_id if job else None,
            tenant=job.tenant if job else None,
            deadline_ms=job.deadline_ms if job else None,
            is_ending=draft.ending is not None,
        )
        self._table.hold(held)
        try:
            opened = self._open_job(draft, claim)
            request = None if draft.ending is not None else self._request(draft, claim)
            self._output.open(opened)
        except Exception as error:  # a fault of ours with this one job; all others go on
            log.error("job %s: it could not be handed on: %s", taken.job_id, fault_of(error))
            held.is_ending = True
            draft.end(State.ERROR, "error", ErrorCode.INTERNAL, "the job could not be handed on; see the worker's log")
            self._output.open(self._open_job(draft, Claim(epoch=claim.epoch, kept=Kept(), same_model=True)))
        if draft.ending is not None:
            self._output.end(draft.ending)
        elif request is not None:
            self._engine.add(request)

    def _request(self, draft: _Draft, claim: Claim) -> EngineRequest:
        taken, job, prompt = draft.taken, draft.job, draft.prompt
        assert job is not None
        assert prompt is not None
        assert draft.known is not None
        return EngineRequest(
            request_id=taken.job_id,
            prompt_ids=prompt.ids,
            sampling=dataclasses.replace(prompt.sampling, seed=draft.known.seed),
            emitted_ids=tuple(claim.kept.ids),
            stable_lengths=prompt.stable_lengths,
            message_starts=prompt.message_starts,
            conversation_id=job.conversation_id,
            cache=prompt.cache,
            tenant=job.tenant,
            lane=taken.lane,
            enqueued_at_ms=taken.enqueued_at_ms,
            deadline_ms=job.deadline_ms,
            eos_token_ids=prompt.end_ids,
            images=prompt.images,
            constraint=prompt.constraint,
            thinking=job.thinking and job.kind is Kind.CHAT,
            score_from=None if job.prompt_logprobs is None else 1,
            num_score_top=_num_score_top(job),
            continuations=prompt.continuations,
        )

    def _open_job(self, draft: _Draft, claim: Claim) -> OpenJob:
        job, prompt, envelope, known = draft.job, draft.prompt, draft.envelope, draft.known
        assert known is not None
        sampling = prompt.sampling if prompt else None
        kept = claim.kept
        return OpenJob(
            job_id=draft.taken.job_id,
            epoch=claim.epoch,
            lane=draft.taken.lane,
            entry_id=draft.taken.entry_id,
            kept_ids=kept.ids,
            kept_ends_with_stop_id=prompt is not None and _ends_with_stop_id(prompt, kept.ids),
            kept_text=kept.text,
            kept_tools=kept.tools,
            kept_logprobs=kept.logprobs,
            is_chat=job is not None and job.kind is Kind.CHAT,
            tools=list(job.tools) if job and job.tools else None,
            stop=list(sampling.stop) if sampling else [],
            include_stop=sampling.include_stop if sampling else False,
            min_tokens=sampling.min_tokens if sampling else 0,
            ends_loops=job is not None and job.ends_loops,
            first_prompt_id=prompt.ids[0] if prompt and job and job.prompt_logprobs is not None else None,
            wants_logprobs=sampling is not None and sampling.logprobs is not None,
            stream=job.stream if job else True,
            reply_to=envelope.reply_to,
            result_ttl_s=envelope.result_ttl_s or RESULT_TTL_S,
            seed=known.seed,
            crashes=draft.num_crashes,
            num_prompt_tokens=len(prompt.ids) if prompt else 0,
            enqueued_at_ms=draft.taken.enqueued_at_ms,
            clock_offset_ms=self._clock.offset_ms,
            warnings=list(prompt.warnings if prompt else job.warnings if job else ()),
            metadata=envelope.metadata,
            traceparent=envelope.traceparent,
        )


def _num_score_top(job: Job) -> int:
    """Alternatives to each scored token; of a continuation at least the best, to tell whether it was that."""
    return max(1, job.sampling.logprobs or 0) if job.kind is Kind.SCORE else job.prompt_logprobs or 0


def _ends_with_stop_id(prompt: Prompt, ids: Sequence[int]) -> bool:
    """Whether the last token that stands is one that ended the row: it is recorded and not shown."""
    sampling = prompt.sampling
    if not ids or len(ids) <= sampling.min_tokens:
        return False
    is_eos = ids[-1] in prompt.end_ids and not sampling.ignore_eos
    return is_eos or ids[-1] in sampling.stop_token_ids


def _draft(taken: Taken) -> _Draft:
    try:
        if taken.version != str(PROTOCOL_VERSION):
            message = f"v: {taken.version[:80]!r} is not {PROTOCOL_VERSION}, the one version that this worker serves"
            raise InvalidRequest(ErrorCode.UNSUPPORTED, message, "v")
        job = parse_job(taken.body)
    except InvalidRequest as error:
        return _Draft(taken=taken, envelope=read_envelope(taken.body), refusal=error)
    except Exception as error:  # a body that kills its reader would come back and kill every worker
        log.error("job %s: reading its body failed: %s", taken.job_id, fault_of(error))
        refusal = InvalidRequest(ErrorCode.INTERNAL, "reading the body failed; the worker's log has it")
        return _Draft(taken=taken, envelope=Envelope(digest=hashlib.sha256(taken.body).hexdigest()), refusal=refusal)
    envelope = Envelope(
        digest=job.digest,
        reply_to=job.reply_to,
        result_ttl_s=job.result_ttl_s,
        metadata=job.metadata,
        traceparent=job.traceparent,
    )
    return _Draft(taken=taken, envelope=envelope, job=job)
