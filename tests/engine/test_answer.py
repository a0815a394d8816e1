"""Stop strings over a stream, whatever the pieces it comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.answer import StopFilter


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    cut = StopFilter(stops)
    text = "".join(cut.feed(piece) for piece in pieces)
    return text + cut.flush(), cut.stopped


def plain(stops: list[str], text: str) -> tuple[str, bool]:
    """The same on the whole text: cut where a stop string first ends, at its earliest begin."""
    for end in range(len(text) + 1):
        found = [at for at in (text[:end].find(stop) for stop in stops if stop) if at >= 0]
        if found:
            return text[: min(found)], True
    return text, False


@given(
    st.lists(st.text("ab", max_size=3), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_any_pieces_give_the_same(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    assert run(stops, list(text)) == plain(stops, text)
    out, stopped = run(stops, pieces)
    assert stopped == plain(stops, text)[1]
    assert out == plain(stops, text)[0] or all(stop not in out for stop in stops if stop)


@pytest.mark.parametrize("pieces", [["one END two"], ["one E", "ND two"], list("one END two")])
def test_a_stop_string_may_span_pieces(pieces: list[str]) -> None:
    assert run(["END"], pieces) == ("one ", True)


def test_what_might_begin_a_stop_is_held_back() -> None:
    cut = StopFilter(["END"])
    assert [cut.feed(piece) for piece in ("xE", "N", "x")] == ["x", "", "ENx"]
    assert cut.feed("EN") == "" and cut.flush() == "EN" and not cut.stopped
