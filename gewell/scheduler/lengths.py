"""How long answers will be, learned from those that ended: what lets admission be optimistic without being blind."""

from collections import OrderedDict

from gewell.scheduler.request import RequestState

_SMOOTHING = 1 / 16  # weight of the newest answer: a changed prompt template is learned within tens of jobs
_MAX_KEYS = 1024


class OutputLengths:
    """Mean output length of requests alike: same tenant and max_tokens, as the jobs of one pipeline step have."""

    def __init__(self) -> None:
        self._means: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._share = 0.5  # of max_tokens, over all requests: for keys not seen yet

    def expected(self, req: RequestState) -> int:
        """Expected output tokens of all epochs together; at least one more than it has, at most what it may have."""
        mean = self._means.get(self._key(req))
        if mean is None:
            mean = self._share * req.max_output_tokens
        return min(max(round(mean), req.num_output_tokens + 1), req.max_output_tokens)

    def ended(self, req: RequestState) -> None:
        """The request came to its end by itself (not by cancel or error)."""
        key = self._key(req)
        mean = self._means.get(key, float(req.num_output_tokens))
        self._means[key] = mean + _SMOOTHING * (req.num_output_tokens - mean)
        self._means.move_to_end(key)
        if len(self._means) > _MAX_KEYS:
            self._means.popitem(last=False)
        if req.max_output_tokens:
            self._share += _SMOOTHING * (req.num_output_tokens / req.max_output_tokens - self._share)

    @staticmethod
    def _key(req: RequestState) -> tuple[str, int]:
        return req.request.tenant, req.request.sampling.max_tokens
