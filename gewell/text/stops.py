"""Stop strings in streamed text."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a growing text and never releases a part of one.

    The stop that is *complete* first wins; of several that end at the same character the longest. So the answer does
    not depend on how the text was cut into pushes. After a match everything further is dropped.

    >>> matcher = StopMatcher(["\\n\\n"])
    >>> matcher.push("one\\n"), matcher.push("two\\n"), matcher.push("\\nthree")
    (('one', None), ('\\ntwo', None), ('', '\\n\\n'))
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: a matched stop is part of the released text. Empty stops are ignored."""
        self._stops = tuple(sorted({stop for stop in stops if stop}, key=len, reverse=True))
        self._include_stop = include_stop
        self._prefixes = {stop[:n] for stop in self._stops for n in range(1, len(stop))}
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._longest_prefix = max((len(stop) - 1 for stop in self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, can_match: bool = True) -> tuple[str, str | None]:
        """Text that can be shown now, and the stop string if this push completed one.

        can_match   False: what is completed by this push is text like any other, now and later; one that only begins
                    here may still be completed by a later push
        """
        if self.matched is not None:
            return "", None
        if not self._stops:
            return text, None
        num_old = len(self._held)
        text = self._held + text
        if self._first_chars.isdisjoint(text):  # nearly always
            return text, None
        found = self._find(text, num_old) if can_match else None
        if found is not None:
            start, stop = found
            self.matched, self._held = stop, ""
            return text[: start + len(stop) if self._include_stop else start], stop
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The text still held back; the sequence has ended without completing a stop."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str, num_old: int) -> tuple[int, str] | None:
        """The first stop that ends beyond the first `num_old` characters, which an earlier push has looked at."""
        best: tuple[int, str] | None = None
        best_end = len(text) + 1
        for stop in self._stops:  # longest first: at equal ends the first one found stays
            start = text.find(stop, max(0, num_old + 1 - len(stop)), best_end - 1)
            if start >= 0:
                best, best_end = (start, stop), start + len(stop)
        return best

    def _num_held(self, text: str) -> int:
        for n in range(min(self._longest_prefix, len(text)), 0, -1):
            if text[-n:] in self._prefixes:
                return n
        return 0
