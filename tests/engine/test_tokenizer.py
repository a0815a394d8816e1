"""Text to tokens and back, the file format's lies, and characters that arrive in pieces."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import regex
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from engine import tokenizer as module
from engine.errors import EngineError
from engine.tokenizer import PATTERN, StreamDecoder, Tokenizer, load_tokenizer
from examples.tiny_tokenizer import SPECIAL, main
from tests.reference.tokenizers import LINEAR_SPECIAL, make_tokenizer, slow_encode, tiny_ranks

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SPECIAL_TEXTS = st.lists(st.sampled_from([*SPECIAL.values(), "<|reserved_token_330|>", " a", "中", "\n"])).map("".join)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@given(text=TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode_bytes(tokenizer.encode_text(text)) == text.encode()


@given(text=TEXTS | SPECIAL_TEXTS)
def test_equals_plain_byte_pair_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode_text(text) == slow_encode(text)


@given(text=SPECIAL_TEXTS)
def test_text_never_becomes_special(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    assert all(token < len(tiny_ranks()) for token in ids)
    assert tokenizer.decode_bytes(ids) == text.encode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I'll SAY: don't", ["I'll", " SAY", ":", " don't"]),
        ("camelCase HTTPServer", ["camel", "Case", " HTTPServer"]),
        ("1234567", ["123", "456", "7"]),
        ("mix中文text 日本", ["mix", "中文", "text", " ", "日本"]),
        ("a  b\n\n  c \n", ["a", " ", " b", "\n\n", " ", " c", " \n"]),
        ("x +=\n1", ["x", " +=\n", "1"]),
        ("über naïve e\u0301", ["über", " naïve", " e\u0301"]),
        ("end   ", ["end", "   "]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert regex.findall(PATTERN, text, regex.V1) == words


def test_special_slots(tokenizer: Tokenizer) -> None:
    base = len(tiny_ranks())
    assert tokenizer.vocab == base + 256
    for slot, name in SPECIAL.items():
        assert tokenizer.encode_markup(name) == base + slot
        assert tokenizer.decode_bytes([base + slot]) == name.encode()
    assert tokenizer.encode_markup(f"<|reserved_token_{base + 8}|>") == base + 8
    with pytest.raises(EngineError, match="has no token"):
        tokenizer.encode_markup("<|nothing|>")


def test_end_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    base = len(tiny_ranks())
    assert tokenizer.end_ids == {base + 1, base + 2, base + 9}
    assert make_tokenizer(tmp_path, LINEAR_SPECIAL).end_ids == {base + 1, base + 2, base + 9}


def released_cut(text: str, most_characters: int, most_run: int) -> Iterator[str]:
    """The released rule, character by character: a run's next character beyond the limit begins a new piece."""
    for begin in range(0, len(text), most_characters):
        part, run, piece = text[begin : begin + most_characters], 0, ""
        for at, character in enumerate(part):
            same = at > 0 and character.isspace() == part[at - 1].isspace()
            run = run + 1 if same else 1
            if run > most_run:
                yield piece
                piece, run = "", 1
            piece += character
        yield piece


@given(text=st.text("ab \n\u3000\x1c", max_size=60))
def test_cut(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_CHARACTERS", 17)
        patch.setattr(module, "MOST_RUN", 3)
        assert list(module._cut(text)) == list(released_cut(text, 17, 3))


@pytest.mark.parametrize("unit", ["a", " ", "中", "ab "])
def test_long_text(tokenizer: Tokenizer, unit: str) -> None:
    text = unit * 60_000
    assert tokenizer.decode_bytes(tokenizer.encode_text(text)) == text.encode()


def names(*slots: str) -> str:
    return json.dumps({"added_tokens_decoder": {slot: {"content": "[BOS]"} for slot in slots}})


def damaged(name: str, text: str | None) -> object:
    return pytest.param(name, text, id=f"{name}-{text}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        damaged("tiktoken.model", None),
        damaged("tiktoken.model", "YQ== 0\nYg==\n"),
        damaged("tiktoken.model", "YQ== 0\nY 1\n"),
        damaged("tiktoken.model", "YQ== 0\nYg== 2\n"),
        damaged("tiktoken.model", "YQ== 0\nYQ== 1\n"),
        damaged("tokenizer_config.json", None),
        damaged("tokenizer_config.json", "{"),
        damaged("tokenizer_config.json", "{}"),
        damaged("tokenizer_config.json", '{"added_tokens_decoder": {"320": {}}}'),
        damaged("tokenizer_config.json", names("319")),
        damaged("tokenizer_config.json", names("a")),
        damaged("tokenizer_config.json", names("320", "321")),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, text: str | None) -> None:
    make_tokenizer(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(EngineError, match=name):
        load_tokenizer(tmp_path)


def splits(data: bytes) -> Iterator[list[bytes]]:
    """Every way to cut ``data`` into pieces, or 300 of them where there are more than 4096."""
    places = range(1, len(data))
    if len(data) <= 13:
        cuts = (cut for n in range(len(data)) for cut in itertools.combinations(places, n))
    else:
        rng = random.Random(len(data))
        cuts = (tuple(sorted(rng.sample(places, rng.randrange(len(data))))) for _ in range(300))
    for cut in cuts:
        bounds = [0, *cut, len(data)]
        yield [data[a:b] for a, b in itertools.pairwise(bounds)]


def tokenizer_of(pieces: set[bytes]) -> Tokenizer:
    ranks = {token: rank for rank, token in enumerate(sorted(pieces))}
    return Tokenizer(tiktoken.Encoding("pieces", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}), {})


@pytest.mark.parametrize(
    "data",
    [
        "a😀é".encode(),
        "中文字。".encode(),
        "👩‍👩‍👧 family".encode(),
        "שָׁלוֹם עולם".encode(),
        b"a\xffb",
        b"\xe4\xb8",
        b"\xf0\x9f\x98a\xe4",
        b"",
    ],
)
def test_stream_equals_whole(data: bytes) -> None:
    whole = data.decode("utf-8", "replace")
    every = tokenizer_of({data[a:b] for a in range(len(data)) for b in range(a + 1, len(data) + 1)} | {b"a"})
    for pieces in splits(data) if data else [[]]:
        stream = StreamDecoder(every)
        said = ""
        for piece in pieces:
            said += stream.feed(every.encoding.encode_single_token(piece))
            assert whole.startswith(said), f"{said!r} is not the beginning of {whole!r}"
        assert said + stream.finish() == whole


def test_invalid_byte_does_not_stall_the_stream() -> None:
    every = tokenizer_of({b"a", b"b", b"\xff"})
    stream = StreamDecoder(every)
    assert [stream.feed(every.encoding.encode_single_token(piece)) for piece in (b"a", b"\xff", b"b")] == [
        "a",
        "\ufffd",
        "b",
    ]


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tiny_tokenizer.py", str(tmp_path / "out"), "280", __file__])
    main()
    made = load_tokenizer(tmp_path / "out")
    assert made.vocab == 280 + 256
    assert len(made.encode_text("assert tokenizer")) < len("assert tokenizer")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    vocab = make_tokenizer(tmp_path).vocab
    assert load_tokenizer(tmp_path, vocab).vocab == vocab
    with pytest.raises(EngineError, match=rf"makes {vocab} tokens, the model has {vocab + 1}"):
        load_tokenizer(tmp_path, vocab + 1)
