"""Which ids the constrained rows of a step may draw, computed beside the step by threads of the grammar library."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gewell.request import ConstraintRow
from gewell.scheduler.plan import StepPlan
from gewell.scheduler.request import RequestState, Stage
from gewell.text.constraint import ConstraintFailed, MaskFiller, PendingMasks


class StepMasks:
    """Masks of one step on their way. Rows that have ended meanwhile may draw anything: nobody looks at it."""

    def __init__(self, rows: Sequence[RequestState], words: NDArray[np.int32], running: list[int], filler: MaskFiller):
        self._rows = rows
        self._words = words
        self._running = running
        self._filled = np.empty((len(running), words.shape[1]), dtype=np.int32)
        self._pending: PendingMasks = filler.start([_grammar(rows[i]) for i in running], self._filled)

    def result(self) -> tuple[NDArray[np.int32], list[tuple[RequestState, ConstraintFailed]]]:
        """Wait; the masks, one a row, and the rows whose grammar has failed: their mask allows every id."""
        failures = self._pending.result()
        self._words[self._running] = self._filled
        failed = [
            (self._rows[i], failure) for i, failure in zip(self._running, failures, strict=True) if failure is not None
        ]
        return self._words, failed


class MaskMaker:
    """Starts the masks of steps. Makes its threads when the first constrained request comes."""

    def __init__(self) -> None:
        self._filler: MaskFiller | None = None

    def start(self, plan: StepPlan) -> StepMasks:
        """The tokens of the plan's masked rows must be known, all of them."""
        if self._filler is None:
            self._filler = MaskFiller()
        drawing = plan.sampling_rows()
        rows = [drawing[i] for i in plan.masked_rows]
        num_words = max(row.request.constraint.num_mask_words for row in rows if row.request.constraint is not None)
        words = np.full((len(rows), num_words), -1, dtype=np.int32)
        running = [i for i, row in enumerate(rows) if row.stage is not Stage.FINISHED]
        return StepMasks(rows, words, running, self._filler)

    def close(self) -> None:
        if self._filler is not None:
            self._filler.close()


def _grammar(req: RequestState) -> ConstraintRow:
    assert req.grammar is not None
    return req.grammar
