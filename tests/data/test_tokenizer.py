"""Round trips are lossless, special strings in a text are text, and a BPE is a function of its texts."""

import json
import os
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from abovemup.data import tokenizer as tokenizers
from abovemup.data.recipe import RANKED, load_fast, load_ranks, train_bpe
from abovemup.data.tokenizer import END_OF_TEXT, ByteTokenizer, FastTokenizer, Tokenizer, cut_text

CODE = [Path(np.__file__).read_text(), Path(json.__file__).read_text(), Path(os.__file__).read_text()]
TRAINED = train_bpe(CODE, 600)
BPE = load_fast(TRAINED, trained=True)
SPACES = load_fast(train_bpe(["a  \n\n\n\n  \n\n\n \n \n.\n\n\ta's\n"] * 9, 300), trained=True)  # merges runs of spaces


def ranks(trained: str) -> str:
    """The same merges as `tiktoken` writes them: a token's bytes in base64, and its rank."""
    shown = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in shown]
    byte = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}
    vocab = sorted(json.loads(trained)["model"]["vocab"].items(), key=lambda item: item[1])
    return "".join(f"{b64encode(bytes(byte[c] for c in name)).decode()} {i}\n" for name, i in vocab)


def with_pattern(trained: str, pattern: str) -> FastTokenizer:
    """The same merges in words that `pattern` cuts, by the `tokenizers` library."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    tokenizer = load_fast(trained, trained=False)
    words = Split(Regex(pattern), "isolated")
    tokenizer.inner.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    return tokenizer


LLAMA3, GPT2 = (load_ranks(name, ranks(TRAINED)) for name in ("llama3", "gpt2"))
TOKENIZERS: dict[str, Tokenizer] = {
    "byte": ByteTokenizer(),
    "bpe": BPE,
    "hf": with_pattern(TRAINED, RANKED["llama3"][0]),
    "llama3": LLAMA3,
    "gpt2": GPT2,
}
every = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
UTF8 = st.text(alphabet=st.characters(codec="utf-8"))
SPACED = st.text(alphabet=st.sampled_from("ab1 '\n\r\t\x0b\x1c\x85\u2028\u3000.é字🦙"), max_size=60)


@given(st.binary())
def test_bytes_give_back_any_bytes(data: bytes) -> None:
    (ids,) = ByteTokenizer().encode_documents([data])
    assert bytes(ids.tolist()) == data
    assert ByteTokenizer().decode(ids.tolist()) == data.decode("utf-8", "replace")


@every
@given(text=UTF8 | SPACED)
def test_any_text_is_given_back(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode_documents([text.encode()])
    assert ids.dtype == np.uint32
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.encode(text) == ids.tolist()
    assert tokenizer.eot not in ids


@every
@given(text=UTF8 | SPACED, place=st.integers(0, 80))
def test_bytes_are_counted_wherever_a_window_cuts(tokenizer: Tokenizer, text: str, place: int) -> None:
    ids = np.array([*tokenizer.encode(text), tokenizer.eot], np.int64)
    if tokenizer is TOKENIZERS["hf"]:  # whose tokens need not be bytes
        assert tokenizer.count_bytes(np.array([ids, ids])) == 2 * len(text.encode())
    else:
        assert tokenizer.count_bytes(ids[:place]) + tokenizer.count_bytes(ids[place:]) == len(text.encode())


@given(UTF8 | SPACED)
def test_two_libraries_agree(text: str) -> None:
    """`tiktoken` from ranks and `tokenizers` from merges, with GPT-2's pattern and with Llama 3's."""
    assert GPT2.encode(text) == BPE.encode(text)
    assert LLAMA3.encode(text) == TOKENIZERS["hf"].encode(text)


@every
def test_awkward_places_of_unicode(tokenizer: Tokenizer) -> None:
    text = "\ufeff\u2028\u2029\x85\x00\r\n\r e\u0301 \u202eשלום مرحبا\u200d🧑‍🚀 \U0010ffff \x7f\ufffe\x1c\x1f"
    (ids,) = tokenizer.encode_documents([text.encode()])
    assert tokenizer.decode(ids.tolist()) == tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"  # what JSON can hold and UTF-8 cannot
    assert [len(ids) for ids in tokenizer.encode_documents([b"", b"", b"a"])] == [0, 0, 1]


@every
def test_invalid_bytes_are_replacement_characters(tokenizer: Tokenizer) -> None:
    for data in (b"a\xffb", b"\xed\xa0\x80", b"\xf0\x9f", b"\xc0\x80\x00"):
        (ids,) = tokenizer.encode_documents([data])
        assert tokenizer.decode(ids.tolist()) == data.decode("utf-8", "replace")


@every
def test_special_strings_in_a_text_are_text(tokenizer: Tokenizer) -> None:
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "</s>", END_OF_TEXT]
    text = f"a {END_OF_TEXT} b" + "".join(special) + END_OF_TEXT
    ids = tokenizer.encode(text)
    assert max(ids) < tokenizer.eot - (tokenizer is LLAMA3)  # all special ids are above the others
    assert tokenizer.encode_documents([text.encode()])[0].tolist() == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eot]) == ("<|end_of_text|>" if tokenizer is LLAMA3 else END_OF_TEXT)


def test_ids_of_padded_rows_can_be_decoded() -> None:
    assert ByteTokenizer().decode([97, 300, 98]) == "a\ufffdb"
    assert BPE.decode([*BPE.encode("ab"), 5000]).startswith("ab")
    assert GPT2.decode([*GPT2.encode("ab"), 600, *GPT2.encode("b")]) == "ab\ufffdb"


def test_sizes() -> None:
    assert (ByteTokenizer.size, ByteTokenizer.eot) == (257, 256)
    assert (BPE.size, BPE.eot) == (GPT2.size, GPT2.eot) == (600, 599)
    assert (LLAMA3.size, LLAMA3.eot) == (599 + 256, 600)
    smallest = load_fast(train_bpe(CODE, 257), trained=True)
    assert (smallest.size, smallest.eot) == (257, 256)
    few = load_fast(train_bpe(["ab ab"], 1000), trained=True)
    assert few.size < 262  # 256 bytes, a handful of merges, end of text


def test_training_is_a_function_of_the_texts_whatever_the_threads() -> None:
    code = (
        "import json, os, sys, numpy as np\nfrom pathlib import Path\nfrom abovemup.data.recipe import train_bpe\n"
        "texts = [Path(m.__file__).read_text() for m in (np, json, os)]\n"
        "sys.stdout.write(train_bpe(texts, 600))"
    )
    for parallel in ("false", "true"):
        env = {**os.environ, "TOKENIZERS_PARALLELISM": parallel, "RAYON_NUM_THREADS": "3"}
        made = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
        assert made == TRAINED


@given(st.text(st.sampled_from("a \n.'s\t"), max_size=40) | SPACED, st.integers(1, 8))
def test_cutting_a_long_text_changes_no_id(text: str, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "CHUNK", chunk)
        pieces = list(cut_text(text))
        (ids,) = SPACES.encode_documents([text.encode()])
    assert "".join(pieces) == text
    assert ids.tolist() == SPACES.encode(text)


def test_a_long_text_is_cut() -> None:
    text = "some words\n" * 15_000
    assert len(list(cut_text(text))) == 3
    assert BPE.encode_documents([text.encode()])[0].tolist() == BPE.encode(text)


@given(st.text(st.sampled_from("ab 1.'\n\t"), max_size=40) | SPACED, st.integers(1, 8))
def test_cutting_is_where_no_match_goes_on(text: str, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "CHUNK", chunk)
        pieces = list(cut_text(text))
        bounded = list(cut_text(text, longest=2 * chunk))
    for pattern, _ in RANKED.values():
        words = regex.compile(pattern.replace("$", r"\Z")).findall
        assert [word for piece in pieces for word in words(piece)] == words(text)
    assert "".join(bounded) == text
    assert all(len(piece) <= 2 * chunk for piece in bounded)


@pytest.mark.parametrize("tokenizer", [LLAMA3, GPT2, BPE], ids=["llama3", "gpt2", "bpe"])
@pytest.mark.parametrize("text", ["a" * 200_000, " " * 1_000_000, "字" * 150_000], ids=["letters", "spaces", "kanji"])
def test_a_very_long_run_of_one_character(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_documents([text.encode()])[0].tolist()) == text
