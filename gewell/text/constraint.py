"""Output that must have a form: JSON, a JSON schema, a regex, a choice, a Lark grammar, a tool call.

A `ConstraintSpec` says which; `GrammarCompiler` turns it into a `Grammar` (off the engine's thread; a schema that it
cannot keep is the request's error before any engine time); each row of a batch follows it with its own `GrammarRow`,
which says before every token which ids may come. JSON is written compactly: where a grammar leaves whitespace free,
models fill the rest of their budget with it. No torch: masks are numpy words of 32 ids, least bit first.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gewell.errors import GewellError
from gewell.protocol import ErrorCode
from gewell.request import ConstraintRow
from gewell.structured import MAX_CHOICES, MAX_GRAMMAR_CHARS, ConstraintKind, ConstraintSpec, refused
from gewell.text.tokenizer import Tokenizer

_COMPILED_GRAMMARS = 256  # kept, least recently used dropped
# Applied after whatever the schema asks for by itself ("x-guidance").
_COMPACT_JSON: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":", "lenient": False}


class ConstraintFailed(GewellError):
    """A row left its grammar or the grammar became too complex. Ends the row, nothing else."""


class GrammarCompiler:
    """Compiles specs for one vocabulary and keeps what it compiled. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end_ids: Sequence[int],
        vocab_size: int | None = None,
    ) -> None:
        """
        end_ids     ids that end a row; allowed where the grammar is satisfied
        vocab_size  the width of the model's output head, where it is larger than the vocabulary
        """
        import llguidance

        if not end_ids:
            raise ValueError("a constraint needs an id that ends the row")
        self._tokenizer = tokenizer
        self._end_ids = tuple(end_ids)
        self.vocab_size = max(vocab_size or 0, tokenizer.vocab_size)
        vocabulary = _Vocabulary(tokenizer, end_ids, self.vocab_size)
        self._ll = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), eos_token=list(end_ids))
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_mask_words(self) -> int:
        return -(-self.vocab_size // 32)

    def compile(self, spec: ConstraintSpec) -> "Grammar":
        """Raises InvalidRequest, naming the field, for what cannot be kept to the letter."""
        import llguidance

        source = self._source(spec)
        with self._lock:
            found = self._grammars.get(source)
            if found is not None:
                self._grammars.move_to_end(source)
                return found
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source, self._ll)
        if is_error:
            raise refused(spec.field, messages[0].partition("\n   1 |")[0].strip()[:500])
        matcher = llguidance.LLMatcher(self._ll, source, log_level=0)
        if matcher.is_error():
            raise refused(spec.field, matcher.get_error()[:500])
        grammar = Grammar(matcher, self._tokenizer, self._end_ids, self.num_mask_words)
        with self._lock:
            self._grammars[source] = grammar
            while len(self._grammars) > _COMPILED_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def _source(self, spec: ConstraintSpec) -> str:
        """The grammar in llguidance's own form."""
        from llguidance import LLMatcher

        if spec.kind is ConstraintKind.JSON_OBJECT:
            return _json_grammar({"type": "object"}, spec.field)
        if spec.kind is ConstraintKind.JSON_SCHEMA:
            return _json_grammar(spec.value, spec.field)
        if spec.kind is ConstraintKind.CHOICE:
            return str(LLMatcher.grammar_from_lark(_choice_grammar(spec)))
        if spec.kind is ConstraintKind.TOOL_CALL:
            return str(LLMatcher.grammar_from_lark(self._tool_grammar(spec)))
        if not isinstance(spec.value, str) or not 0 < len(spec.value) <= MAX_GRAMMAR_CHARS:
            raise refused(spec.field, f"must be a text of 1 to {MAX_GRAMMAR_CHARS} characters")
        if spec.kind is ConstraintKind.REGEX:
            return str(LLMatcher.grammar_from_regex(spec.value))
        return str(LLMatcher.grammar_from_lark(spec.value))

    def _tool_grammar(self, spec: ConstraintSpec) -> str:
        """Calls in the model's markers, the arguments as JSON by their schemas (`gewell.text.tool_call` reads both)."""
        begin, end = (self._tokenizer.control_id(name) for name in ("<|tool_call>", "<tool_call|>"))
        if begin is None or end is None:
            raise refused(spec.field, "this model has no tool calls", ErrorCode.UNSUPPORTED)
        rules = []
        for n, tool in enumerate(spec.value):
            function = tool["function"]
            schema = {"type": "object", **(function.get("parameters") or {})}
            _json_grammar(schema, spec.field)  # checks its size
            options = {"x-guidance": _COMPACT_JSON}
            rules.append(f"tool{n}: {json.dumps('call:' + function['name'])} %json {json.dumps(schema | options)}")
        names = " | ".join(f"tool{n}" for n in range(len(rules)))
        repeats = "" if spec.is_single else "+"
        return "\n".join([f"start: (<[{begin}]> call <[{end}]>){repeats}", f"call: {names}", *rules])


class Grammar:
    """A compiled constraint (`gewell.request.Constraint`). Immutable; `row` starts a new sequence under it."""

    def __init__(self, matcher: Any, tokenizer: Tokenizer, end_ids: tuple[int, ...], num_mask_words: int) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._num_mask_words = num_mask_words

    @property
    def num_mask_words(self) -> int:
        return self._num_mask_words

    def row(self, *, thinking: bool = False) -> "GrammarRow":
        """`thinking`: the model may think once, first. Its thought is free but ends no row: an answer follows."""
        open_id = self._tokenizer.control_id("<|channel>") if thinking else None
        close_id = self._tokenizer.control_id("<channel|>") if thinking else None
        return GrammarRow(self._matcher.deep_copy(), self._end_ids, open_id, close_id)


class GrammarRow:
    """Where one sequence stands in its grammar. Used by one thread at a time."""

    def __init__(
        self, matcher: Any, end_ids: tuple[int, ...], thought_open_id: int | None, thought_close_id: int | None
    ) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._open_id = thought_open_id
        self._close_id = thought_close_id
        self._in_thought = False
        self._may_think = thought_open_id is not None and thought_close_id is not None

    def advance(self, token_ids: Sequence[int]) -> None:
        """The sequence went on by these tokens. Raises ConstraintFailed when they are not in the grammar."""
        for token_id in token_ids:
            if self._in_thought:
                self._in_thought = token_id != self._close_id
            elif self._may_think and token_id == self._open_id:
                self._in_thought, self._may_think = True, False  # where the answer is unlikely, models think for ever
            else:
                self._may_think = False  # the answer has begun
                if not self._matcher.consume_token(token_id):
                    raise ConstraintFailed(f"token {token_id} is not in the grammar: {self._matcher.get_error()[:300]}")

    def fill(self, words: NDArray[np.int32]) -> None:
        """Set the bits of the ids that may come next, clear all others. words [num_mask_words] int32, contiguous."""
        if self._in_thought:
            words.fill(-1)
            for end_id in self._end_ids:
                words[end_id // 32] &= ~_bit(end_id)
            return
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise ConstraintFailed(self._matcher.get_error()[:300])
        if self._may_think and self._open_id is not None:
            words[self._open_id // 32] |= _bit(self._open_id)

    @property
    def is_satisfied(self) -> bool:
        """Whether the sequence so far is complete under the grammar; False of one that was cut off."""
        return not self._in_thought and bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end id can follow."""
        return not self._in_thought and bool(self._matcher.is_stopped())

    def fork(self) -> "GrammarRow":
        """An independent row at the same place, for tokens that may be taken back."""
        other = GrammarRow(self._matcher.deep_copy(), self._end_ids, self._open_id, self._close_id)
        other._in_thought, other._may_think = self._in_thought, self._may_think
        return other


def _bit(token_id: int) -> np.int32:
    """The id's bit in its word of a mask."""
    return np.uint32(1 << token_id % 32).astype(np.int32)


class MaskFiller:
    """Computes the masks of many rows beside the engine's thread.

    The engine starts it as soon as a step's tokens are known and takes the result where the next step samples: what
    lies between runs at the same time (the grammar library lets go of Python's lock).
    """

    def __init__(self, num_threads: int = 2) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")

    def start(self, rows: Sequence[ConstraintRow], masks: NDArray[np.int32]) -> "PendingMasks":
        """Fill masks [len(rows), num_mask_words], int32, contiguous; rows and masks are ours until `result`."""
        if masks.dtype != np.int32 or not masks.flags.c_contiguous or masks.shape[0] != len(rows):
            raise ValueError(f"masks are {masks.dtype} {masks.shape} for {len(rows)} rows, not contiguous int32")
        share = -(-len(rows) // self._num_threads) or 1
        starts = range(0, len(rows), share)
        return PendingMasks([self._pool.submit(_fill, rows[n : n + share], masks[n : n + share]) for n in starts])

    def close(self) -> None:
        self._pool.shutdown()


class PendingMasks:
    """Masks on their way."""

    def __init__(self, shares: "Sequence[Future[list[ConstraintFailed | None]]]") -> None:
        self._shares = shares

    def result(self) -> list[ConstraintFailed | None]:
        """Wait; then the failure of each row. A failed row's mask allows every id: the row has to end anyway."""
        return [failure for share in self._shares for failure in share.result()]


def _fill(rows: Sequence[ConstraintRow], masks: NDArray[np.int32]) -> list[ConstraintFailed | None]:
    failures: list[ConstraintFailed | None] = []
    for row, words in zip(rows, masks, strict=True):
        try:
            row.fill(words)
            failures.append(None)
        except ConstraintFailed as e:
            words.fill(-1)
            failures.append(e)
    return failures


class _Vocabulary:
    """What llguidance asks of a tokenizer. Ids of a padded output head have no bytes and are never allowed."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        ids = range(vocab_size)
        self.eos_token_id = end_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_control(i) or i in end_ids]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _json_grammar(schema: Any, field: str) -> str:
    from llguidance import LLMatcher

    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise refused(field, f"is not JSON: {e}") from e
    if len(text) > MAX_GRAMMAR_CHARS:
        raise refused(field, f"has {len(text)} characters as JSON, at most {MAX_GRAMMAR_CHARS} are allowed")
    return str(LLMatcher.grammar_from_json_schema(text, overrides=_COMPACT_JSON))


def _choice_grammar(spec: ConstraintSpec) -> str:
    choices = spec.value
    if not isinstance(choices, list) or not 0 < len(choices) <= MAX_CHOICES:
        raise refused(spec.field, f"must be a list of 1 to {MAX_CHOICES} texts")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise refused(spec.field, "must hold texts, none empty")
    if sum(map(len, choices)) > MAX_GRAMMAR_CHARS:
        raise refused(spec.field, f"has over {MAX_GRAMMAR_CHARS} characters")
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)
