"""Sampling parameters of one request: what the engine needs to draw tokens and to end a row. No torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Values are checked where a job is parsed (`gewell.job`), not here.

    Filters act in the order temperature, top_k, top_p, min_p, on float32 logits after the soft-cap.
    The draw is Gumbel-argmax with counter-based noise keyed by (seed, position, token id): the same
    seed and the same logits give the same token on every device.
    """

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 0 <= seed < 2**63
    max_tokens: int = 256
    min_tokens: int = 0  # neither stop ids nor stop texts end the row before this many tokens
    ignore_eos: bool = False  # the model's own end ids do not stop; stop_token_ids still do
    stop: tuple[str, ...] = ()  # looked for in visible text, by the output process
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep a matched stop string in the text
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best alternatives'
    logit_bias: dict[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
