"""Where tokenizers come from: what is trained, published files, folders, packages, the hub; and what is refused."""

import functools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from abovemup.config.compose import compose
from abovemup.config.errors import RequestError
from abovemup.config.schema import Tokenizer
from abovemup.data.recipe import Recipe, load_fast, load_trained, reopen, train_bpe
from abovemup.data.tokenizer import FastTokenizer, TiktokenTokenizer
from abovemup.data.tokenizer import Tokenizer as AnyTokenizer
from tests.data.server import Server, serving
from tests.data.test_tokenizer import BPE, TRAINED, ranks

TEXT = "It's a longer text <|end_of_text|>\x85\u2028\r\n  e\u0301 שלום 🧑‍🚀 than four ids 12345."


def asked(name: Any, path: Path | str | None = None, vocab_size: int = 600) -> Tokenizer:
    return Tokenizer(name=name, vocab_size=vocab_size, path=None if path is None else str(path))


def save(folder: Path, special: str, config: dict[str, object] | None = None) -> Path:
    from tokenizers import Tokenizer

    inner = Tokenizer.from_str(TRAINED.replace("<|endoftext|>", special))
    inner.enable_truncation(4)
    inner.enable_padding(length=9)
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def small_llama3(folder: Path) -> Path:
    """Of 600 ids: 344 ranks."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_text("".join(ranks(TRAINED).splitlines(keepends=True)[:344]))
    return folder / "tokenizer.model"


def kept(recipe: Recipe, folder: Path) -> AnyTokenizer:
    """Through a folder, as those of corpora and runs."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe.keep(folder, TRAINED if recipe.trained else "")
    return reopen(recipe.name, folder)


@pytest.mark.parametrize("name", ["byte", "bpe", "hf", "gpt2", "llama3", "llama3 by json"])
def test_what_a_folder_keeps_needs_nothing_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "gpt2.tiktoken").write_text(ranks(TRAINED))
    path = {
        "hf": save(tmp_path / "hf", "<STOP>", {"eos_token": "<STOP>"}),
        "gpt2": tmp_path / "gpt2.tiktoken",
        "llama3": small_llama3(tmp_path / "l"),
        "llama3 by json": save(tmp_path / "json", "<|end_of_text|>"),
    }.get(name)
    recipe = Recipe(asked(name.split()[0], path, 257 if name == "byte" else 600))
    for made in (tmp_path / "gpt2.tiktoken", *tmp_path.glob("*/*")):
        made.unlink()  # what it came from
    tokenizer = kept(recipe, tmp_path / "kept")
    assert tokenizer.size == recipe.size
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert name in ("byte", "llama3") or tokenizer.encode(TEXT) == BPE.encode(TEXT)
    assert tokenizer.eot not in tokenizer.encode(tokenizer.decode([tokenizer.eot]))
    for file in (tmp_path / "kept").glob("tokenizer.*"):
        file.unlink()
        with pytest.raises(RequestError, match="kept: No such file"):
            reopen(recipe.name, tmp_path / "kept")


def test_hf_reads_a_file_or_folder_without_truncation_or_padding(tmp_path: Path) -> None:
    folder = save(tmp_path / "hf", "<|end_of_text|>")
    for path in (folder, folder / "tokenizer.json"):
        mine = kept(Recipe(asked("hf", path)), tmp_path / "kept")
        assert mine.encode(TEXT) == BPE.encode(TEXT)
        assert mine.decode([mine.eot]) == "<|end_of_text|>"


def test_hf_end_of_text_is_found_or_asked_for(tmp_path: Path) -> None:
    folder = save(tmp_path / "hf", "<STOP>")
    with pytest.raises(RequestError, match=r"(?s)no end-of-text token.*eos_token"):
        Recipe(asked("hf", folder))
    for named in ("<STOP>", {"content": "<STOP>", "lstrip": False}):
        assert kept(Recipe(asked("hf", save(folder, "<STOP>", {"eos_token": named}))), tmp_path / "kept").eot == 599


def test_identity_is_of_the_contents(tmp_path: Path) -> None:
    one, other = save(tmp_path / "one", "</s>"), save(tmp_path / "other", "</s>")
    assert Recipe(asked("hf", one)).identity == Recipe(asked("hf", other)).identity
    save(other, "</s>", {"eos_token": "</s>"})
    assert Recipe(asked("hf", one)).identity != Recipe(asked("hf", other)).identity
    assert Recipe(asked("bpe", vocab_size=300)).identity != Recipe(asked("bpe")).identity


def test_refusals_name_the_path(tmp_path: Path) -> None:
    def refused(name: str, path: Path | None, why: str) -> None:
        with pytest.raises(RequestError, match=why):
            Recipe(asked(name, path))

    refused("hf", None, r"tokenizer\.path")
    refused("hf", tmp_path / "nowhere", r"nowhere.*No such file")
    (tmp_path / "tokenizer.json").write_text("{}")
    refused("hf", tmp_path, r"tokenizer\.json is not a tokenizer\.json")
    (tmp_path / "tokenizer.model").write_bytes(b"\x00\xff")  # a binary, as of SentencePiece
    refused("llama3", tmp_path / "tokenizer.model", "not a text file")
    (tmp_path / "tokenizer.model").write_text("a line of text\n")
    refused("llama3", tmp_path / "tokenizer.model", r"tokenizer\.model holds no ranks of tokenizer=llama3")
    (tmp_path / "gpt2.tiktoken").write_text(ranks(TRAINED)[:-20])
    refused("gpt2", tmp_path / "gpt2.tiktoken", "gpt2.tiktoken holds no ranks|has 599 ids and tokenizer=gpt2 600")
    with pytest.raises(RequestError, match=r"tokenizer\.json has 600 ids and tokenizer=llama3 700.*tokenizer=hf"):
        Recipe(asked("llama3", save(tmp_path / "hf", "</s>"), 700))


# ---- where Llama 3 is found ----


def test_llama3_is_found_in_an_installed_package_that_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_llama3(tmp_path / "llama_models" / "llama3")
    (tmp_path / "llama_models" / "__init__.py").write_text("raise ImportError('it needs what is not installed')")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = Recipe(asked("llama3"))
    assert (recipe.text, recipe.size, kept(recipe, tmp_path / "kept").eot) == (model.read_text(), 600, 345)
    assert "llama_models" not in sys.modules
    assert Recipe(asked("llama3", model.parent)).identity == recipe.identity


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    from huggingface_hub import constants

    monkeypatch.setattr("abovemup.config.tokenizer_file.PACKAGES", {})
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


def test_a_hub_id_is_fetched_once_and_what_exists_here_wins(hub: Server, tmp_path: Path) -> None:
    hub.commit("org/name", save(tmp_path / "repository", "<STOP>", {"eos_token": "<STOP>"}))
    e = compose(["tokenizer=hf", "tokenizer.path=org/name"])
    assert e.model.vocab_size == 600
    assert kept(Recipe(e.tokenizer), tmp_path / "one").eot == 599
    requests = len(hub.requests)
    assert kept(Recipe(e.tokenizer), tmp_path / "one").encode(TEXT) == BPE.encode(TEXT)
    assert len(hub.requests) == requests
    (tmp_path / "org").mkdir()
    save(tmp_path / "org/name", "</s>")
    assert kept(Recipe(e.tokenizer), tmp_path / "two").decode([599]) == "</s>"


def test_llama3_comes_from_the_hub_last_and_says_what_it_needs(hub: Server, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"(?s)pip install --no-deps llama-models.*HF_TOKEN"):
        Recipe(asked("llama3"))
    repo = "meta-llama/Meta-Llama-3-8B"
    hub.commit(repo, save(tmp_path / "repository", "<|end_of_text|>"))
    hub.gated.add(repo)
    with pytest.raises(RequestError, match=r"(?s)llama-models.*tokenizer\.path.*gated.*terms.*HF_TOKEN"):
        Recipe(asked("llama3"))
    hub.gated.clear()
    assert kept(Recipe(asked("llama3")), tmp_path / "kept").encode(TEXT) == BPE.encode(TEXT)


def test_without_a_network_it_fails_at_once(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits"))
    for name, path, why in (("llama3", None, "pip install --no-deps llama-models"), ("hf", "a/b", "no such file or")):
        with pytest.raises(RequestError, match=why) as refusal:
            Recipe(asked(name, path))
        assert len(str(refusal.value).splitlines()) <= 2


# ---- the real ones ----


def test_the_real_llama3(tmp_path: Path) -> None:
    """Where it is installed, or ABOVEMUP_TEST_LLAMA3 names its tokenizer.model (or a folder)."""
    path = os.environ.get("ABOVEMUP_TEST_LLAMA3") or None
    if path is None and find_spec("llama_models") is None:
        pytest.skip("no llama-models, and ABOVEMUP_TEST_LLAMA3 is not set")
    recipe = Recipe(replace(compose(["tokenizer=llama3"]).tokenizer, path=path))
    tokenizer = kept(recipe, tmp_path)
    assert (tokenizer.size, tokenizer.eot) == (128256, 128001)
    assert tokenizer.encode("This is a test sentence.") == [2028, 374, 264, 1296, 11914, 13]  # the package's own test
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert max(tokenizer.encode(TEXT)) < 128000
    if path and (beside := Path(path).with_name("tokenizer.json")).exists() and path.endswith("tokenizer.model"):
        fast = load_fast(beside.read_text("utf-8"), trained=False)
        assert fast.encode(TEXT) == tokenizer.encode(TEXT)


@settings(deadline=None)  # the first trains
@given(text=st.text(max_size=300))
@example(text="the theory then  \n\n  '  \u2028 \U0001f999\x00 <|endoftext|> " + "ab" * 300)
def test_a_bpe_of_ours_by_two_libraries(text: str) -> None:
    trained = _trained()
    ours, slow = load_trained(trained), load_fast(trained, trained=True)
    assert isinstance(ours, TiktokenTokenizer)
    data = [text.encode("utf-8", "replace"), b"\xff\xfe " + text.encode("utf-8", "replace")]
    for mine, theirs in zip(ours.encode_documents(data), slow.encode_documents(data), strict=True):
        assert mine.tolist() == theirs.tolist()
        assert ours.decode(mine.tolist()) == slow.decode(theirs.tolist())
    assert ours.encode(text) == slow.encode(text)
    assert (ours.size, ours.eot) == (slow.size, slow.eot)


@functools.cache
def _trained() -> str:
    return train_bpe([Path(json.__file__).read_text(), Path(functools.__file__).read_text()] * 2, 700)


def test_merges_that_two_libraries_read_differently_stay_with_their_own() -> None:
    """ab is joined before bc: of "abc" comes (ab, c), which is no merge, though abc is a token."""
    content = json.loads(train_bpe(["ab"], 257))
    content["model"]["merges"] = [["a", "b"], ["b", "c"], ["a", "bc"]]
    content["model"]["vocab"] |= {"ab": 256, "bc": 257, "abc": 258}
    content["added_tokens"][0]["id"] = 259
    slow = load_trained(json.dumps(content))
    assert isinstance(slow, FastTokenizer)
    assert [ids.tolist() for ids in slow.encode_documents([b"abc"])] == [[256, slow.encode("c")[0]]]
    content["model"]["merges"][2] = ["ab", "c"]
    assert isinstance(load_trained(json.dumps(content)), TiktokenTokenizer)
