"""A tiny engine with real contents: every slot remembers which token, after which prefix, was written there.

Reading checks what a kernel would read: all tokens in full layers, the window in sliding layers. Freed pages are
poisoned. Pages of 4 sliding or 8 full tokens, a window of 6, a slack of 4: small enough to follow by hand.
"""

from array import array
from collections import Counter
from collections.abc import Sequence

from gewell.cache.geometry import KindGeometry, KVGeometry
from gewell.cache.page_pool import PagePool
from gewell.cache.prefix_cache import PrefixCache
from gewell.cache.sequence_pages import HOLE, NO_SLOT, SequencePages, append_decode
from gewell.cache.tiers import Tier
from gewell.request import CacheAnswer, CacheHints, EngineRequest
from gewell.sampling import SamplingParams

GEOMETRY = KVGeometry(
    page_bytes=64,
    sliding=KindGeometry(page_tokens=4, bytes_per_token=16),
    full=KindGeometry(page_tokens=8, bytes_per_token=8),
    sliding_window=6,
    slack_tokens=4,
)
POISON = "poison"


class Running:
    """A request that runs: its tokens, its pages, and where checkpoints are wanted."""

    def __init__(self, request: EngineRequest, ids: list[int], pages: SequencePages, positions: Sequence[int]) -> None:
        self.request = request
        self.ids = ids
        self.pages = pages
        self.positions = list(positions)


class World:
    """Drives a PrefixCache as an engine does, one request at a time, and checks every byte it would read."""

    def __init__(
        self, num_pages: int, num_host_pages: int = 0, geometry: KVGeometry = GEOMETRY, pin_share: float = 0.3
    ) -> None:
        self.geometry = geometry
        self.pool = PagePool(num_pages, record_freed=True)
        self.now_s = 0.0
        self.cache = PrefixCache(
            self.pool, geometry, num_host_pages=num_host_pages, pin_share=pin_share, clock=lambda: self.now_s
        )
        self.bytes: dict[Tier, dict[tuple[int, int, str], object]] = {Tier.GPU: {}, Tier.HOST: {}}
        self.waiting: dict[str, EngineRequest] = {}
        self.known: dict[str, list[int]] = {}  # ids of preempted requests
        self.running: dict[str, Running] = {}
        self.num_requests = 0
        self.num_copies = 0

    # ------------------------------------------------------------------------------------------------ a request's life

    def submit(
        self,
        ids: Sequence[int],
        *,
        conversation_id: str | None = None,
        stable: Sequence[int] = (),
        message_starts: Sequence[int] = (),
        max_tokens: int = 16,
        request_id: str | None = None,
        **hints: object,
    ) -> str:
        self.num_requests += 1
        request = EngineRequest(
            request_id=request_id or f"r{self.num_requests}",
            prompt_ids=array("i", ids),
            sampling=SamplingParams(max_tokens=max_tokens),
            stable_lengths=tuple(stable),
            message_starts=tuple(message_starts),
            conversation_id=conversation_id,
            cache=CacheHints(**hints),
        )
        self.cache.add_waiting(request)
        self.waiting[request.request_id] = request
        return request.request_id

    def start(self, request_id: str) -> int:
        """Start a waiting request; returns the position it resumed from."""
        match = self.cache.match(request_id)
        if match.on_host:
            self.cache.restore(request_id)
            match = self.cache.match(request_id)
        pages = SequencePages(self.pool, self.geometry, match.point)
        positions = self.cache.start(request_id, match.position)
        request = self.waiting.pop(request_id)
        ids = self.known.pop(request_id, list(request.prompt_ids))
        self.running[request_id] = Running(request, ids, pages, positions)
        self._before_step()
        self.check_readable(request_id)
        return match.position

    def compute(self, request_id: str, num_tokens: int | None = None) -> bool:
        """Compute the next tokens of what is known of a running request. False: no room, it was preempted."""
        row = self.running[request_id]
        left = len(row.ids) - row.pages.num_tokens
        num_tokens = left if num_tokens is None else min(left, num_tokens)
        if num_tokens <= 0:
            return True
        begin, end = row.pages.num_tokens, row.pages.num_tokens + num_tokens
        inside = [p for p in row.positions if begin < p <= end]
        missing = row.pages.num_pages_needed(num_tokens, inside) - self.pool.num_free_pages
        if missing > 0:
            self.cache.evict(missing)
        appended = row.pages.append(num_tokens, inside)
        if appended is None:
            self.preempt(request_id)
            return False
        self._before_step()
        self._copy(appended.copies)
        self._write(row, range(begin, end), appended.full_slots, appended.sliding_slots)
        for position in inside:
            self.cache.retain(request_id, row.pages, position)
            row.positions.remove(position)
        row.pages.trim()
        self.check_readable(request_id)
        return True

    def decode(self, request_ids: Sequence[str], token: int) -> None:
        """One more token for each of these running, fully computed requests, as a decode step does it."""
        rows = [self.running[request_id] for request_id in request_ids]
        full: list[int] = []
        sliding: list[int] = []
        copies, num_served, _ = append_decode([row.pages for row in rows], full, sliding)
        self._before_step()
        self._copy(copies)
        for at, row in enumerate(rows[:num_served]):
            row.ids.append(token)
            self._write(row, range(len(row.ids) - 1, len(row.ids)), full[at : at + 1], sliding[at : at + 1])
            self.check_readable(row.request.request_id)

    def preempt(self, request_id: str) -> None:
        row = self.running.pop(request_id)
        self.cache.preempted(request_id, row.pages, row.ids)
        row.pages.release()
        self.known[request_id] = row.ids
        self.waiting[request_id] = row.request

    def finish(self, request_id: str, *, completed: bool = True) -> CacheAnswer:
        row = self.running.pop(request_id)
        answer = self.cache.finished(request_id, row.pages, row.ids, completed=completed)
        row.pages.release()
        return answer

    def cancel(self, request_id: str) -> None:
        if request_id in self.running:
            self.finish(request_id, completed=False)
        else:
            self.cache.drop_waiting(request_id)
            del self.waiting[request_id]
            self.known.pop(request_id, None)

    def run(self, ids: Sequence[int], answer: Sequence[int] = (), **options: object) -> tuple[int, CacheAnswer]:
        """A request from submit to finish; returns what it resumed from and its answer."""
        request_id = self.submit(ids, **options)
        position = self.start(request_id)
        assert self.compute(request_id)
        for token in answer:
            self.running[request_id].ids.append(token)
            assert self.compute(request_id)
        return position, self.finish(request_id)

    # ------------------------------------------------------------------------------------------------ bytes

    def _before_step(self) -> None:
        """What an engine does between a plan and its writes: transfers, then poison, then copies."""
        spared: set[int] = set()
        for source, target, pairs in self.cache.take_transfers():
            for a, b in pairs:
                self._copy_page(self.bytes[source], a, self.bytes[target], b)
                if target is Tier.GPU:
                    spared.add(b)
        for page in self.pool.drain_freed():
            if page not in spared:
                for slot in range(8):
                    for kind in ("full", "sliding"):
                        self.bytes[Tier.GPU][page, slot, kind] = POISON

    @staticmethod
    def _copy_page(source: dict, a: int, target: dict, b: int) -> None:
        for slot in range(8):
            for kind in ("full", "sliding"):
                target[b, slot, kind] = source.get((a, slot, kind))

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = {a for a, _ in copies}, {b for _, b in copies}
        assert not sources & targets
        self.num_copies += len(copies)
        for a, b in copies:
            self._copy_page(self.bytes[Tier.GPU], a, self.bytes[Tier.GPU], b)

    def _write(self, row: Running, positions: range, full: Sequence[int], sliding: Sequence[int]) -> None:
        names = self.names(row)
        for kind, slots, size in (("full", full, 8), ("sliding", sliding, 4)):
            for position, slot in zip(positions, slots, strict=True):
                if slot != NO_SLOT:
                    page, offset = divmod(slot, size)
                    self.bytes[Tier.GPU][page, offset, kind] = names[position]

    def names(self, row: Running) -> list[object]:
        """What stands in the slot of each position: it depends on all tokens before, and on the salt."""
        name: object = row.request.cache.salt
        names = []
        for token in row.ids:
            name = hash((name, token))
            names.append(name)
        return names

    def check_readable(self, request_id: str) -> None:
        """Everything that the next query of this row would read is what its own cold run would have written."""
        row = self.running[request_id]
        names, pages, gpu = self.names(row), row.pages, self.bytes[Tier.GPU]
        for position in range(pages.num_tokens):
            page, offset = pages.full_pages[position // 8], position % 8
            assert gpu[page, offset, "full"] == names[position], (request_id, position)
        for position in range(self.geometry.first_needed(pages.num_tokens), pages.num_tokens):
            page = pages.sliding_pages[(position - pages.sliding_start) // 4]
            assert page != HOLE
            assert gpu[page, position % 4, "sliding"] == names[position], (request_id, position)

    def check_checkpoints(self) -> None:
        """Every checkpoint, in either tier, still holds what was computed for its tokens (once transfers have run)."""
        if self.cache.retention._transfers:
            return
        salts = {id(root): salt for salt, root in self.cache.tree._roots.items()}
        for checkpoint in self.cache.index:
            nodes = list(checkpoint.node.path())[::-1]
            ids = array("i", b"".join(node.key for node in nodes))
            names, name = [], salts[id(nodes[0].parent)]
            for token in ids:
                name = hash((name, token))
                names.append(name)
            num_full = len(checkpoint.full_pages)
            places = []
            if checkpoint.tier is Tier.GPU:
                places.append((Tier.GPU, checkpoint.full_pages, checkpoint.sliding_pages))
            if checkpoint.host_pages is not None:
                places.append((Tier.HOST, checkpoint.host_pages[:num_full], checkpoint.host_pages[num_full:]))
            for tier, full, sliding in places:
                memory = self.bytes[tier]
                for position in range(checkpoint.position):
                    assert memory[full[position // 8], position % 8, "full"] == names[position]
                for position in range(checkpoint.sliding_valid, checkpoint.position):
                    page = sliding[(position - checkpoint.sliding_start) // 4]
                    assert memory[page, position % 4, "sliding"] == names[position]

    def check_references(self) -> None:
        """Each page has exactly the references that live sequences, copies under way and checkpoints hold."""
        held: Counter[int] = Counter()
        cached: Counter[int] = Counter()
        on_host: Counter[int] = Counter()
        for row in self.running.values():
            held.update(row.pages.full_pages)
            held.update(page for page in row.pages.sliding_pages if page != HOLE)
            held.update(row.pages._copy_sources)
        for checkpoint in self.cache.index:
            if checkpoint.tier is Tier.GPU:
                cached.update(checkpoint.full_pages)
                cached.update(checkpoint.sliding_pages)
            on_host.update(checkpoint.host_pages or ())
        for page in range(self.pool.num_pages):
            assert self.pool.ref_cnt(page) == held[page] + cached[page], page
        assert self.pool.num_free_pages == self.pool.num_pages - len(held | cached)
        assert self.pool.num_evictable_pages == sum(page not in held for page in cached)
        host = self.cache.retention.host
        if host is not None:
            for page in range(host.pool.num_pages):
                assert host.pool.ref_cnt(page) == on_host[page], page

    def drain(self) -> None:
        """End everything and give up all checkpoints: nothing may be left."""
        for request_id in [*self.running, *self.waiting]:
            self.cancel(request_id)
        self.cache.evict(self.pool.num_pages)
        for checkpoint in list(self.cache.index):
            self.cache.retention.drop(checkpoint)
        self.check_references()
        assert self.pool.num_free_pages == self.pool.num_pages
        for node in self.cache.tree.nodes():
            assert (node.num_checkpoints, node.num_waiting, node.num_users, node.planned) == (0, 0, 0, None)
