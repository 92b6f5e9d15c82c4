"""The OpenAI-compatible gateway: HTTP in, jobs out. It holds no state: whatever matters stands in Redis."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gewell.errors import InvalidRequest, QueueError
from gewell.protocol import MAX_BODY_BYTES, Chunk, EntryId, ErrorCode, FinalRecord, InfoField, State
from gewell_producers.async_client import AsyncClient
from gewell_producers.connection import Patience
from gewell_producers.gateway import problems, shapes
from gewell_producers.gateway.access import Access
from gewell_producers.gateway.calls import Call, chat_call, completion_call, parse_body
from gewell_producers.gateway.metrics import Metrics
from gewell_producers.gateway.problems import Problem
from gewell_producers.gateway.shapes import ChunkShaper
from gewell_producers.gateway.streaming import (
    DONE,
    KEEP_ALIVE_S,
    Disconnected,
    EventStream,
    event,
    merge,
    unless_disconnected,
)
from gewell_producers.gateway.vocabulary import Vocabulary
from gewell_producers.settings import default_namespace, default_url

INFO_TTL_S = 2.0
# A request does not wait for room: its caller is told to come back.
GATEWAY_PATIENCE = Patience(connect_s=1.0, reconnect_s=10.0, no_worker_s=60.0, queue_full_s=0.0)

# Of which choice, at which entry of its stream, what. The record comes last and has no entry.
Delivered: TypeAlias = tuple[int, EntryId | None, Chunk | FinalRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """served_names  further model names that are accepted; any_model: all of them
    model_folder  vocabulary for /tokenize; None: the served model's, if it is stored here
    """

    url: str = field(default_factory=default_url)
    namespace: str = field(default_factory=default_namespace)
    access: Access = field(default_factory=Access)
    served_names: tuple[str, ...] = ()
    any_model: bool = False
    model_folder: Path | None = None
    keep_alive_s: float = KEEP_ALIVE_S
    patience: Patience = GATEWAY_PATIENCE


class Gateway:
    """The handlers. One client for all requests; facts about the worker are looked up every two seconds at most."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._client: AsyncClient | None = None
        self._info: dict[str, str] = {}
        self._num_workers = 0
        self._looked_at_s = -INFO_TTL_S
        self._started_at = int(time.time())
        self._vocabulary = Vocabulary(settings.model_folder)
        self.metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        settings = self._settings
        self._client = AsyncClient(settings.url, namespace=settings.namespace, patience=settings.patience)
        try:
            yield
        finally:
            await self._client.close()

    @property
    def client(self) -> AsyncClient:
        assert self._client is not None, "the application has not been started"
        return self._client

    # --- answers ------------------------------------------------------------------------------------------------------

    async def chat_completions(self, request: Request) -> ASGIApp:
        return await self._complete(request, is_chat=True)

    async def completions(self, request: Request) -> ASGIApp:
        return await self._complete(request, is_chat=False)

    async def _complete(self, request: Request, *, is_chat: bool) -> ASGIApp:
        access = self._settings.access
        caller = access.caller(request.headers.get("authorization"))
        body = parse_body(await _read(request))
        model = await self._served_model(body.get("model"))
        call = (chat_call if is_chat else completion_call)(body, request.headers, caller)
        with contextlib.ExitStack() as place:
            place.enter_context(access.admit(caller))
            place.enter_context(self.metrics.in_flight.track_inprogress())
            if call.is_stream:
                events, first = await self._open_stream(request, call, model, is_chat=is_chat)
                return EventStream(
                    first,
                    events,
                    keep_alive_s=self._settings.keep_alive_s,
                    on_disconnect=lambda: self._left(call),
                    on_close=place.pop_all().close,  # the stream holds the place until its end
                )
            records = await self._finish(request, call)
        shape = shapes.chat_completion if is_chat else shapes.text_completion
        return _json(shape(call, records))

    async def _finish(self, request: Request, call: Call) -> list[FinalRecord]:
        """All records of a call. Raises Problem for the first one that is no answer."""

        async def work() -> list[FinalRecord]:
            await self._submit(call)
            records = await asyncio.gather(*(self._record(job.id) for job in call.jobs))
            await self._check_ids(call)
            return records

        try:
            records = await unless_disconnected(request, work())
        except Disconnected:
            await self._left(call)
            raise
        for record in records:
            if record.state is not State.DONE:
                raise problems.of_record(record)
        return records

    async def _submit(self, call: Call) -> None:
        await self._check_ids(call)
        await self.client.submit_many(call.jobs)

    async def _check_ids(self, call: Call) -> None:
        """An id that the caller chose must not belong to another request: its answer would be handed out as ours."""
        for job, digest in zip(call.jobs, call.digests, strict=False):
            if await self.client.digest(job.id) not in (None, digest):
                message = f"the id or idempotency key of {job.id} was used for another request"
                raise Problem(status=409, message=message, code=ErrorCode.ID_CONFLICT)

    async def _record(self, job_id: str) -> FinalRecord:
        async with self.client.follow(job_id) as stream:
            record = await stream.record()
        self.metrics.count(record)
        return record

    async def _open_stream(
        self, request: Request, call: Call, model: str, *, is_chat: bool
    ) -> tuple[AsyncGenerator[bytes], "asyncio.Future[bytes]"]:
        """Waits a while for a first event, so that a refusal gets its status; from then on errors are events."""
        await self._submit(call)
        after = request.headers.get("last-event-id") if len(call.jobs) == 1 else None
        shapers = [ChunkShaper(call=call, index=i, is_chat=is_chat, model=model) for i in range(len(call.jobs))]
        begins = asyncio.Event()  # set: the status line is decided
        events = self._events(call, shapers, _entry(after), begins)
        first = asyncio.ensure_future(anext(events))
        try:
            await unless_disconnected(request, asyncio.wait({first}, timeout=self._settings.keep_alive_s))
            begins.set()
            if first.done():
                first.result()  # raises what there is to refuse
        except BaseException as error:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await events.aclose()
            if isinstance(error, Disconnected):
                await self._left(call)
            raise
        return events, first

    async def _events(
        self, call: Call, shapers: Sequence[ChunkShaper], after: EntryId | None, begins: asyncio.Event
    ) -> AsyncGenerator[bytes]:
        """All choices' events as they come. Raises before `begins` is set; later an error is an event, and the last."""
        has_begun = False
        records: list[FinalRecord] = []
        follows = [self._follow(i, job.id, after) for i, job in enumerate(call.jobs)]
        merged = follows[0] if len(follows) == 1 else merge(follows)
        try:
            async for index, entry_id, item in merged:
                if not has_begun:
                    await self._check_ids(call)
                shaper = shapers[index]
                if isinstance(item, FinalRecord):
                    records.append(item)
                    if item.state is not State.DONE:
                        raise problems.of_record(item)
                    data: bytes | None = shaper.finish(item.finish_reason)
                else:
                    data = shaper.chunk(item)
                if shaper.needs_opening and after is None:
                    yield event(shaper.opening())
                if data is not None:
                    yield event(data, str(entry_id) if len(call.jobs) == 1 and entry_id is not None else None)
                has_begun = True
        except (Problem, QueueError) as error:
            if not has_begun and not begins.is_set():
                raise
            problem = error if isinstance(error, Problem) else problems.of_queue(error)
            yield event(orjson.dumps(problem.body))
            return
        finally:
            await merged.aclose()
        if call.include_usage:
            yield event(shapers[0].usage([record.usage for record in records]))
        yield DONE

    async def _follow(self, index: int, job_id: str, after: EntryId | None) -> AsyncGenerator[Delivered]:
        async with self.client.follow(job_id, after=after) as stream:
            async for chunk in stream:
                yield index, stream.last, chunk
            record = await stream.record()
        self.metrics.count(record)
        yield index, None, record

    async def _left(self, call: Call) -> None:
        """The caller has gone. Its jobs are cancelled unless it asked for something else."""
        self.metrics.disconnects.inc()
        if call.cancels_on_disconnect:
            for job in call.jobs:
                await self.client.cancel(job.id)

    # --- facts --------------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        self._settings.access.caller(request.headers.get("authorization"))
        await self._look()
        names = [name for name in (self._info.get(InfoField.MODEL), *self._settings.served_names) if name]
        return _json({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        self._settings.access.caller(request.headers.get("authorization"))
        name = request.path_params["name"]
        await self._served_model(name)
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        context = self._info.get(InfoField.MAX_CONTEXT)
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "gewell",
            "root": self._info.get(InfoField.MODEL),
            "max_model_len": None if context is None else int(context),
        }

    async def tokenize(self, request: Request) -> Response:
        model, body = await self._body_for_vocabulary(request)
        tokens = await self._vocabulary.tokenize(model, body)
        context = self._info.get(InfoField.MAX_CONTEXT)
        return _json({"count": len(tokens), "max_model_len": context and int(context), "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        model, body = await self._body_for_vocabulary(request)
        return _json({"prompt": await self._vocabulary.detokenize(model, body)})

    async def _body_for_vocabulary(self, request: Request) -> tuple[str, dict[str, Any]]:
        self._settings.access.caller(request.headers.get("authorization"))
        body = parse_body(await _read(request))
        return await self._served_model(body.get("model")), body

    async def health(self, _request: Request) -> Response:
        """200 while a worker makes progress: its heartbeat stops when it has work and takes no step."""
        workers = await self.client.workers()
        status = "ok" if workers else "no worker"
        return _json({"status": status, "workers": len(workers)}, status=200 if workers else 503)

    async def version(self, _request: Request) -> Response:
        return _json({"version": version("gewell")})

    async def scrape(self, _request: Request) -> Response:
        try:
            lanes, workers = await self.client.queue_lengths(), await self.client.worker_facts()
        except QueueError:
            lanes, workers = None, {}
        return Response(self.metrics.scrape(lanes, workers), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at_s >= INFO_TTL_S:
            self._info, self._num_workers = await self.client.info(), len(await self.client.workers())
            self._looked_at_s = now

    async def _served_model(self, asked: object) -> str:
        """The name that answers carry. Raises NoWorker, or Problem 404 for a model that is not served."""
        await self._look()
        if not self._num_workers:
            self._looked_at_s = -INFO_TTL_S  # one that starts now is seen by the next request
            await self.client.require_worker()
        served = self._info.get(InfoField.MODEL, "")
        known = {served, *self._settings.served_names, None}
        if not isinstance(asked, str | None):
            raise InvalidRequest(ErrorCode.INVALID_REQUEST, f"model: {asked!r} is not a text", "model")
        if asked not in known and not self._settings.any_model:
            message = f"model {asked!r} is not served here; served: {', '.join(sorted(filter(None, known)))}"
            raise Problem(status=404, message=message, code="model_not_found", param="model")
        return served


def create_app(settings: GatewaySettings) -> Starlette:
    """The ASGI application."""
    gateway = Gateway(settings)
    routes = [
        Route("/v1/chat/completions", gateway.chat_completions, methods=["POST"]),
        Route("/v1/completions", gateway.completions, methods=["POST"]),
        Route("/v1/models", gateway.models),
        Route("/v1/models/{name:path}", gateway.model),
        Route("/tokenize", gateway.tokenize, methods=["POST"]),
        Route("/detokenize", gateway.detokenize, methods=["POST"]),
        Route("/health", gateway.health),
        Route("/version", gateway.version),
        Route("/metrics", gateway.scrape),
    ]
    handlers: dict[Any, Any] = {
        Problem: _on_problem,
        InvalidRequest: lambda request, error: _on_problem(request, problems.of_request(error)),
        QueueError: lambda request, error: _on_problem(request, problems.of_queue(error)),
        Disconnected: lambda request, error: Response(status_code=499),
        HTTPException: _on_http,
    }
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=gateway.lifespan)
    app.add_middleware(CountRequests, metrics=gateway.metrics, paths={route.path for route in routes})
    return app


class CountRequests:
    """Counts answers by path and status. Plain ASGI: a stream passes through untouched."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"  # no label from a caller's pen

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)


def _on_problem(_request: Request, problem: Problem) -> Response:
    return _json(problem.body, status=problem.status, headers=problem.headers)


def _on_http(request: Request, error: HTTPException) -> Response:
    problem = Problem(status=error.status_code, message=error.detail, code=error.detail.lower().replace(" ", "_"))
    return _on_problem(request, problem)


async def _read(request: Request) -> bytes:
    """The body, given up as soon as it is known to be too large."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            break
    return bytes(raw)


def _entry(text: str | None) -> EntryId | None:
    if text is None:
        return None
    try:
        return EntryId.parse(text)
    except ValueError as error:
        message = f"Last-Event-ID: {text[:40]!r} is not an id of ours"
        raise Problem(status=400, message=message, code="invalid_request") from error


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(data), status_code=status, headers=headers, media_type="application/json")
