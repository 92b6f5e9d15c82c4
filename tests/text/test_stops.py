"""A stop string that leaks by one character breaks every client that parses the answer."""

from hypothesis import given
from hypothesis import strategies as st

from gewell.text.stops import StopMatcher

stops_of_ab = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def run(stops: list[str], parts: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop)
    text = "".join(matcher.push(part)[0] for part in parts)
    return text + matcher.flush(), matcher.matched


def first_match(stops: list[str], text: str) -> tuple[str, str | None]:
    """By definition: read character by character; the first moment at which some stop is complete."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_longest_possible_prefix_is_held_back() -> None:
    matcher = StopMatcher(["</answer>", "<end>"])
    assert matcher.push("text </ans") == ("text ", None)
    assert matcher.push("X<") == ("</ansX", None)
    assert matcher.push("end>tail") == ("", "<end>")
    assert matcher.push("more") == ("", None)
    assert matcher.flush() == ""


def test_held_text_is_released_when_the_sequence_ends() -> None:
    assert run(["stop"], ["no st"]) == ("no st", None)


def test_matched_stop_is_kept_on_request() -> None:
    assert run(["\n\n"], ["one\n", "\ntwo"], include_stop=True) == ("one\n\n", "\n\n")
    assert run(["\n\n"], ["one\n", "\ntwo"]) == ("one", "\n\n")


def test_stop_that_is_complete_first_wins_and_then_the_longest() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")
    assert run(["c", "bc"], ["abc"]) == ("a", "bc")


def test_stop_that_is_complete_before_it_may_match_is_text_for_good() -> None:
    matcher = StopMatcher(["ab", "xabc"])
    assert matcher.push("1xab", can_match=False) == ("1", None)  # held back as the start of xabc
    assert matcher.push("d") == ("xabd", None)
    assert matcher.push("ab") == ("", "ab")


def test_stop_that_begins_before_it_may_match_is_found_when_it_is_complete() -> None:
    matcher = StopMatcher(["aaa"])
    assert matcher.push("aaaa", can_match=False) == ("aa", None)
    assert matcher.push("a") == ("", "aaa")


@given(stops_of_ab, st.text("abc", max_size=12), st.integers(0, 12))
def test_the_first_stop_that_ends_late_enough_is_the_one(stops: list[str], text: str, least: int) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(char, can_match=idx >= least)[0] for idx, char in enumerate(text)) + matcher.flush()
    expected = (text, None)
    for end in range(len(text), least, -1):
        if done := [stop for stop in stops if text[:end].endswith(stop)]:
            expected = (text[: end - len(max(done, key=len))], max(done, key=len))
    assert (shown, matcher.matched) == expected


def test_without_stops_text_passes_at_once() -> None:
    assert StopMatcher([]).push("text") == ("text", None)
    assert StopMatcher([""]).push("text") == ("text", None)


@given(stops_of_ab, st.lists(st.text("abc", max_size=4), max_size=8))
def test_any_cut_finds_what_reading_character_by_character_finds(stops: list[str], parts: list[str]) -> None:
    assert run(stops, parts) == first_match(stops, "".join(parts))


@given(stops_of_ab, st.lists(st.text("abc", max_size=4), max_size=8))
def test_shown_text_is_never_taken_back_and_only_a_possible_stop_waits(stops: list[str], parts: list[str]) -> None:
    final, _ = first_match(stops, "".join(parts))
    matcher = StopMatcher(stops)
    shown = read = ""
    for part in parts:
        shown += matcher.push(part)[0]
        read += part
        assert final.startswith(shown)
        if matcher.matched is None:
            waiting = read[len(shown) :]
            assert waiting == "" or any(stop.startswith(waiting) for stop in stops)
