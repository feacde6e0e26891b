"""Round trips are lossless, special strings in a text are text, and a BPE is a function of its texts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abovemup.config.errors import RequestError
from abovemup.data import tokenizer as tokenizers
from abovemup.data.tokenizer import END_OF_TEXT, ByteTokenizer, FastTokenizer, cut_text, load_fast, read_hf, train_bpe

CODE = [Path(np.__file__).read_text(), Path(json.__file__).read_text(), Path(os.__file__).read_text()]
TRAINED = train_bpe(CODE, 600)
BPE = load_fast(TRAINED, cuttable=True)
SPACES = load_fast(
    train_bpe(["a  \n\n\n\n  \n\n\n \n \n.\n\n\ta's\n"] * 9, 300), cuttable=True
)  # merges runs of spaces
UTF8 = st.text(alphabet=st.characters(codec="utf-8"))
SPACED = st.text(alphabet=st.sampled_from("ab1 '\n\r\t\x0b\x1c\x85\u2028\u3000.é字🦙"), max_size=60)


@given(st.binary())
def test_bytes_give_back_any_bytes(data: bytes) -> None:
    (ids,) = ByteTokenizer().encode_documents([data])
    assert bytes(ids.tolist()) == data
    assert ByteTokenizer().decode(ids.tolist()) == data.decode("utf-8", "replace")


@given(UTF8 | SPACED)
def test_bpe_gives_back_any_text(text: str) -> None:
    (ids,) = BPE.encode_documents([text.encode()])
    assert BPE.decode(ids.tolist()) == text
    assert BPE.encode(text) == ids.tolist()
    assert BPE.eot not in ids


@given(UTF8 | SPACED, st.integers(0, 80))
def test_bytes_are_counted_wherever_a_window_cuts(text: str, place: int) -> None:
    for tokenizer in (BPE, ByteTokenizer()):
        ids = np.array([*tokenizer.encode(text), tokenizer.eot], np.int64)
        assert tokenizer.count_bytes(ids[:place]) + tokenizer.count_bytes(ids[place:]) == len(text.encode())
    foreign = load_fast(TRAINED, cuttable=False)
    rows = np.array([[*foreign.encode(text), foreign.eot]] * 2, np.int64)
    assert foreign.count_bytes(rows) == 2 * len(text.encode())


def test_awkward_places_of_unicode() -> None:
    text = "\ufeff\u2028\u2029\x85\x00\r\n\r e\u0301 \u202eשלום مرحبا\u200d🧑‍🚀 \U0010ffff \x7f"
    assert BPE.decode(BPE.encode(text)) == text
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


def test_invalid_bytes_are_replacement_characters_to_a_bpe() -> None:
    (ids,) = BPE.encode_documents([b"a\xffb"])
    assert BPE.decode(ids.tolist()) == "a\ufffdb"


@pytest.mark.parametrize("tokenizer", [BPE, ByteTokenizer()])
def test_special_strings_in_a_text_are_text(tokenizer: FastTokenizer | ByteTokenizer) -> None:
    text = f"a {END_OF_TEXT} b{END_OF_TEXT}"
    ids = tokenizer.encode(text)
    assert tokenizer.eot not in ids
    assert tokenizer.eot not in tokenizer.encode_documents([text.encode()])[0]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eot]) == END_OF_TEXT


def test_ids_of_padded_rows_can_be_decoded() -> None:
    assert ByteTokenizer().decode([97, 300, 98]) == "a\ufffdb"
    assert BPE.decode([*BPE.encode("ab"), 5000]).startswith("ab")


def test_sizes() -> None:
    assert (ByteTokenizer.size, ByteTokenizer.eot) == (257, 256)
    assert (BPE.size, BPE.eot) == (600, 599)
    smallest = load_fast(train_bpe(CODE, 257), cuttable=True)
    assert (smallest.size, smallest.eot) == (257, 256)
    few = load_fast(train_bpe(["ab ab"], 1000), cuttable=True)
    assert few.size < 262  # 256 bytes, a handful of merges, end of text
    with pytest.raises(RequestError, match=r"256.*257"):
        train_bpe(CODE, 256)


def test_training_is_a_function_of_the_texts_whatever_the_threads() -> None:
    code = (
        "import json, os, sys, numpy as np\nfrom pathlib import Path\nfrom abovemup.data.tokenizer import train_bpe\n"
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


def save(folder: Path, special: str, config: dict[str, object] | None = None) -> Path:
    from tokenizers import Tokenizer

    inner = Tokenizer.from_str(TRAINED.replace(END_OF_TEXT, special))
    inner.enable_truncation(4)
    inner.enable_padding(length=9)
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(path: Path) -> FastTokenizer:
    text, config, found = read_hf(str(path))
    return load_fast(text, False, config, str(found))


def test_hf_reads_a_file_or_folder_without_truncation_or_padding(tmp_path: Path) -> None:
    folder = save(tmp_path / "hf", "<|end_of_text|>")
    for path in (folder, folder / "tokenizer.json"):
        mine = load(path)
        text = "a longer text <|end_of_text|> than four ids"
        assert mine.encode(text) == BPE.encode(text)
        assert mine.decode([mine.eot]) == "<|end_of_text|>"


def test_hf_end_of_text_is_found_or_asked_for(tmp_path: Path) -> None:
    folder = save(tmp_path / "hf", "<STOP>")
    with pytest.raises(RequestError, match=r"(?s)no end-of-text token.*eos_token"):
        load(folder)
    for named in ("<STOP>", {"content": "<STOP>", "lstrip": False}):
        assert load(save(folder, "<STOP>", {"eos_token": named})).eot == 599


def test_hf_refusals_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"tokenizer\.path"):
        read_hf(None)
    with pytest.raises(RequestError, match=r"nowhere.*No such file"):
        read_hf(str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match=r"tokenizer\.json is not a tokenizer\.json"):
        load(tmp_path)
