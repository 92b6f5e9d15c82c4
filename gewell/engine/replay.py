"""Feeds known token sequences through a model over real pages, in any cut and any company."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gewell.cache.page_pool import PagePool
from gewell.cache.sequence_pages import SequencePages
from gewell.engine.kv_store import KVStore
from gewell.engine.paged_batch import StepRow, forward_batch
from gewell.model.gemma import GemmaModel, Observe


@dataclass(slots=True, kw_only=True)
class Track:
    """One sequence on its way: its tokens, how many of them the model has seen, and the pages they lie in.

    image_runs     [start, end) of tokens that stand for one image each; a step never cuts one
    image_embeds   [tokens in runs, hidden_size], in the order of the runs
    """

    token_ids: Sequence[int]
    sequence: SequencePages
    image_runs: Sequence[tuple[int, int]] = ()
    image_embeds: Tensor | None = None
    are_images_bidirectional: bool = False
    position: int = 0
    last_hidden: Tensor | None = None  # of the token before `position`, where somebody wants it

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.position

    def whole_runs(self, num_tokens: int) -> int:
        """`num_tokens`, or as many more as finish an image run that would be cut."""
        end = self.position + num_tokens
        for start, stop in self.image_runs:
            if start < end < stop:
                end = stop
        return end - self.position

    def visible_end(self, num_tokens: int) -> list[int] | None:
        if not self.are_images_bidirectional or not self.image_runs:
            return None
        ends = list(range(self.position + 1, self.position + num_tokens + 1))
        for start, stop in self.image_runs:
            for i in range(max(start, self.position), min(stop, self.position + num_tokens)):
                ends[i - self.position] = stop
        return ends

    def embeds(self, num_tokens: int) -> tuple[list[int], Tensor | None]:
        """Which of the next tokens are image rows, and their embeddings."""
        if self.image_embeds is None:
            return [], None
        places = [i for start, stop in self.image_runs for i in range(start, stop)]
        inside = [n for n, i in enumerate(places) if self.position <= i < self.position + num_tokens]
        return [places[n] - self.position for n in inside], self.image_embeds[inside]


@dataclass(frozen=True, slots=True)
class Piece:
    """The next `num_tokens` of a track, as one prefill chunk or as a decode row."""

    track: Track
    num_tokens: int
    is_decode: bool = False


class Replay:
    """A model, a pool and its memory. Freed pages are filled with NaN, so that a wrong page table shows."""

    def __init__(self, model: GemmaModel, num_pages: int) -> None:
        self.model = model
        self.geometry = model.kv_plan.geometry
        self.pool = PagePool(num_pages, record_freed=True)
        dtypes = {4: torch.float32, 2: model.dtype}
        self.store = KVStore(
            self.geometry, num_pages, dtype=dtypes[model.kv_plan.dtype_bytes], device=model.device, poison=True
        )

    def new_sequence(self) -> SequencePages:
        return SequencePages(self.pool, self.geometry)

    def step(
        self, pieces: Sequence[Piece], observe: Observe | None = None, slack_tokens: int = 0
    ) -> Iterator[tuple[Track, int, Tensor]]:
        """Run one step; yields (track, position of its first new token, hidden rows) for each piece, decode rows first.

        slack_tokens   keep that many sliding tokens more than the next query reads
        """
        ordered = sorted(pieces, key=lambda piece: not piece.is_decode)
        rows, image_rows, embeds, num_tokens = [], [], [], 0
        for piece in ordered:
            track, count = piece.track, piece.num_tokens
            end = track.sequence.num_tokens + count
            appended = track.sequence.append(count, keep_positions=(end,) if slack_tokens else ())
            if appended is None:
                raise RuntimeError(f"{self.pool.num_free_pages} free pages do not hold {count} more tokens")
            self.store.poison_freed(self.pool.drain_freed())
            self.store.copy(appended.copies)
            rows.append(
                StepRow(
                    sequence=track.sequence,
                    appended=appended,
                    token_ids=track.token_ids[track.position : track.position + count],
                    visible_end=track.visible_end(count),
                    is_decode=piece.is_decode,
                )
            )
            places, part = track.embeds(count)
            if part is not None:
                image_rows += [num_tokens + place for place in places]
                embeds.append(part)
            num_tokens += count
        batch = forward_batch(
            rows,
            self.geometry,
            self.model.device,
            image_rows=torch.tensor(image_rows, dtype=torch.int64, device=self.model.device) if image_rows else None,
            image_embeds=torch.cat(embeds) if image_rows else None,
        )
        hidden = self.model.forward(batch, self.store.pages, observe)
        start = 0
        for piece in ordered:
            position, count = piece.track.position, piece.num_tokens
            piece.track.position += count
            piece.track.sequence.trim(slack_tokens)
            yield piece.track, position, hidden[start : start + count]
            start += count


Schedule = Callable[[int, Track, int], Piece | None]  # (step, track, prompt length) -> what it does in this step


def in_pieces(size: int | None, *, as_decode: bool = False) -> Schedule:
    """Prompt in chunks of `size` (None: whole), then one by one."""

    def next_piece(step: int, track: Track, num_prompt: int) -> Piece:
        left = num_prompt - track.position
        if left <= 0:
            return Piece(track, 1, is_decode=True)
        if as_decode and not _is_at_image(track):
            return Piece(track, 1, is_decode=True)
        return Piece(track, track.whole_runs(min(left, size or left)))

    return next_piece


def in_mixed_pieces(sizes: Sequence[int], first_step: int) -> Schedule:
    """Waits for `first_step`, then takes chunks of the given sizes in turn."""

    def next_piece(step: int, track: Track, num_prompt: int) -> Piece | None:
        if step < first_step:
            return None
        return in_pieces(sizes[(step - first_step) % len(sizes)])(step, track, num_prompt)

    return next_piece


def _is_at_image(track: Track) -> bool:
    return any(start <= track.position < stop for start, stop in track.image_runs)
