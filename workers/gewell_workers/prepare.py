"""A job's body made ready for the engine: checked, rendered, tokenised. Pure functions for ingest's thread pool."""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gewell.engine.api import CacheHints, EngineInfo
from gewell.errors import InvalidRequest
from gewell.job import UNBOUNDED_TOKENS, CacheOptions, Job, Kind
from gewell.protocol import ErrorCode
from gewell.request import Constraint, RequestImage
from gewell.sampling import SamplingParams
from gewell.text.chat import ChatRenderer, load_chat
from gewell.text.constraint import GrammarCompiler
from gewell.text.images import ImageProcessor, PatchSettings
from gewell.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from gewell_workers.images import ImagePart, image_parts, process


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the engine and the output process need of a job's text."""

    ids: Sequence[int]
    sampling: SamplingParams  # max_tokens clamped to the context; the seed is set at the claim
    cache: CacheHints
    message_starts: tuple[int, ...] = ()
    stable_lengths: tuple[int, ...] = ()
    images: tuple[RequestImage, ...] = ()
    end_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    continuations: tuple[tuple[int, ...], ...] = ()
    warnings: tuple[str, ...] = ()


def load_renderer(model_dir: Path | None, template: Path | None = None) -> ChatRenderer:
    """Tokenizer and templates of a model folder. None: no files; ids are bytes (the scripted engine)."""
    tokenizer: Tokenizer = ByteTokenizer() if model_dir is None else load_tokenizer(model_dir)
    return load_chat(model_dir, tokenizer, template)


class Preparer:
    """Turns parsed jobs into prompts of one model. Safe to use from several threads."""

    def __init__(self, info: EngineInfo, chat: ChatRenderer) -> None:
        self._info = info
        self._chat = chat
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self.images = None if info.vision is None else ImageProcessor(PatchSettings.of_model(info.vision))

    def image_parts(self, job: Job) -> list[ImagePart]:
        """The job's images, whose blobs `prepare` needs. Raises InvalidRequest when this model sees none."""
        parts = image_parts(job.messages or ())
        if parts and self.images is None:
            field = parts[0].field
            raise InvalidRequest(ErrorCode.IMAGE_UNSUPPORTED, f"{field}: this worker reads text only", field)
        return parts

    def prepare(self, job: Job, blobs: Mapping[str, bytes] | None = None) -> Prompt:
        """blobs: bytes of the job's uploaded images by sha256. Raises InvalidRequest for what cannot be done."""
        if job.messages is not None:
            rendered = self._render(job, blobs or {})
        else:
            assert job.prompt is not None
            rendered = _Rendered(ids=self._prompt_ids(job.prompt))
        self._check_length(len(rendered.ids), "request.messages" if job.messages is not None else "request.prompt")
        continuations = tuple(self._continuation(idx, each) for idx, each in enumerate(job.continuations))
        for idx, continuation in enumerate(continuations):
            self._check_length(len(rendered.ids) + len(continuation), f"request.continuations[{idx}]")
        self._check_token_ids(job)
        job = dataclasses.replace(job, sampling=self._with_defaults(job))
        sampling, warnings = self._clamp(job, len(rendered.ids))
        cache, cache_warnings = _cache_hints(job.cache, rendered.message_starts, len(rendered.ids))
        if job.model is not None and job.model != self._info.model:
            warnings += (f"request.model: {job.model[:80]!r} was asked for, {self._info.model!r} is served",)
        return Prompt(
            ids=rendered.ids,
            sampling=sampling,
            cache=cache,
            message_starts=rendered.message_starts,
            stable_lengths=rendered.stable_lengths,
            images=rendered.images,
            end_ids=self.end_ids if job.kind is Kind.CHAT or job.constraint is not None else self._info.eos_token_ids,
            constraint=self._constraint(job),
            continuations=continuations,
            warnings=job.warnings + warnings + cache_warnings,
        )

    def _constraint(self, job: Job) -> Constraint | None:
        """Takes the lexing of a whole vocabulary once, then milliseconds a new grammar: not for the event loop."""
        if job.constraint is None:
            return None
        with self._compiler_lock:
            if self._compiler is None:
                tokenizer, vocab_size = self._chat.tokenizer, self._info.vocab_size
                self._compiler = GrammarCompiler(tokenizer, end_ids=self.end_ids, vocab_size=vocab_size)
        return self._compiler.compile(job.constraint)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """What ends a row: the model's own ids, and its template's, which a base checkpoint's config may lack."""
        return tuple(dict.fromkeys((*self._info.eos_token_ids, *self._chat.end_ids)))

    def _render(self, job: Job, blobs: Mapping[str, bytes]) -> "_Rendered":
        assert job.messages is not None
        parts = self.image_parts(job)
        seen = process(parts, blobs, self.images) if self.images is not None else []
        sizes = [image.num_soft_tokens for image in seen] or None
        rendered = self._chat.render(job.messages, tools=job.tools, thinking=job.thinking, image_tokens=sizes)
        stable = self._chat.stable_lengths(job.messages, tools=job.tools, thinking=job.thinking, image_tokens=sizes)
        return _Rendered(
            ids=rendered.ids,
            message_starts=rendered.message_starts,
            stable_lengths=stable,
            images=tuple(
                RequestImage(
                    start=run.start,
                    end=run.start + run.num_tokens,
                    digest=image.digest,
                    patches=image.patches.tobytes(),
                    grid=image.grid,
                )
                for run, image in zip(rendered.images if seen else (), seen, strict=True)
            ),
        )

    def _prompt_ids(self, prompt: str | tuple[int, ...]) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._chat.render_text(prompt)
        self._check_in_vocabulary("request.prompt", prompt)
        return prompt

    def _continuation(self, idx: int, given: str | tuple[int, ...]) -> tuple[int, ...]:
        """Tokenised by itself: its tokens do not depend on the prompt's end."""
        if isinstance(given, str):
            return tuple(self._chat.tokenizer.encode(given))
        self._check_in_vocabulary(f"request.continuations[{idx}]", given)
        return given

    def _check_in_vocabulary(self, field: str, ids: Sequence[int]) -> None:
        for idx, token_id in enumerate(ids):
            if token_id >= self._info.vocab_size:
                raise _bad(f"{field}[{idx}]", token_id, f"below the vocabulary's {self._info.vocab_size}")

    def _check_length(self, num_tokens: int, field: str) -> None:
        if num_tokens == 0:
            raise InvalidRequest(ErrorCode.EMPTY_PROMPT, f"{field}: no tokens", field)
        limit = min(self._info.max_context - 1, self._info.max_prompt_tokens)
        if num_tokens > limit:
            raise InvalidRequest(
                ErrorCode.PROMPT_TOO_LONG,
                f"{field}: {num_tokens} tokens, at most {limit} fit (context {self._info.max_context}, "
                f"memory for a prompt of {self._info.max_prompt_tokens})",
                field,
            )

    def _check_token_ids(self, job: Job) -> None:
        for name, ids in (("stop_token_ids", job.sampling.stop_token_ids), ("logit_bias", job.sampling.logit_bias)):
            for token_id in ids:
                if token_id >= self._info.vocab_size:
                    raise _bad(f"request.{name}", token_id, f"below the vocabulary's {self._info.vocab_size}")

    def _with_defaults(self, job: Job) -> SamplingParams:
        """What the request left out as the model's publisher advises."""
        advised = {name: getattr(self._info.sampling, name) for name in sorted(job.left_out)}
        given = {name: value for name, value in advised.items() if value is not None}
        return dataclasses.replace(job.sampling, **given) if given else job.sampling

    def _clamp(self, job: Job, num_prompt_tokens: int) -> tuple[SamplingParams, tuple[str, ...]]:
        """`max_tokens` is a limit, not a demand: what does not fit the context is cut off, and said."""
        if job.kind in (Kind.WARM, Kind.SCORE):
            return dataclasses.replace(job.sampling, max_tokens=0, min_tokens=0), ()
        room = self._info.max_context - num_prompt_tokens
        wanted = job.sampling.max_tokens
        if wanted <= room:
            return job.sampling, ()
        sampling = dataclasses.replace(job.sampling, max_tokens=room, min_tokens=min(job.sampling.min_tokens, room))
        if wanted == UNBOUNDED_TOKENS:
            return sampling, ()
        return sampling, (f"request.max_tokens: {wanted} clamped to {room}, what the context leaves",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    ids: Sequence[int]
    message_starts: tuple[int, ...] = ()
    stable_lengths: tuple[int, ...] = ()
    images: tuple[RequestImage, ...] = ()


def _cache_hints(
    options: CacheOptions, message_starts: tuple[int, ...], num_tokens: int
) -> tuple[CacheHints, tuple[str, ...]]:
    """Message indexes become token positions: a breakpoint after message i lies where message i + 1 begins."""
    positions, unknown, warnings = [], [], []
    for message_idx in options.breakpoints:
        if message_idx >= len(message_starts):
            unknown.append(message_idx)
            num_messages = len(message_starts)
            warnings.append(f"cache.breakpoints: {message_idx} is no index into {num_messages} messages, ignored")
        elif message_idx + 1 < len(message_starts):
            positions.append(message_starts[message_idx + 1])
        else:
            positions.append(num_tokens)
    hints = CacheHints(
        mode=options.mode,
        priority=options.priority,
        ttl_s=options.ttl_s,
        pin=options.pin,
        one_off=options.one_off,
        release=options.release,
        expect_after=options.expect_after,
        salt=options.salt,
        breakpoints=tuple(sorted(set(positions))),
        unknown_breakpoints=tuple(sorted(set(unknown))),
    )
    return hints, tuple(warnings)


def _bad(field: str, value: object, limit: str) -> InvalidRequest:
    return InvalidRequest(ErrorCode.INVALID_REQUEST, f"{field}: {value!r} is not {limit}", field)
