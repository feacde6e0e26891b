"""How a tokenizer is made: trained here, or of the file of a published one."""

import base64
import functools
import hashlib
import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from abovemup.config import schema
from abovemup.config.errors import RequestError
from abovemup.config.io import write_whole
from abovemup.config.tokenizer_file import read_tokenizer
from abovemup.data.tokenizer import END_OF_TEXT, ByteTokenizer, FastTokenizer, TiktokenTokenizer, Tokenizer

# What published tokenizers call it, base models before chat models.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<EOS>", "[EOS]")
SAMPLE = 4_000_000  # bytes of train documents that a BPE is trained on
SAMPLED = 256  # or all, if there are fewer
# How a text is cut into words (GPT-2's pattern is tiktoken's, Llama 3's of its published tokenizer), and the special
# ids after the ranks.
RANKED = {
    "gpt2": (r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""", [END_OF_TEXT]),
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(254))],
    ),
}


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """A byte-level BPE with GPT-2's pattern as the text of a tokenizer.json: 256 bytes, merges, end of text last.

    The same texts give the same bytes, whatever the number of threads. A small text gives fewer than `vocab_size`
    ids, which are at least 257.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    inner.add_special_tokens([END_OF_TEXT])
    return str(inner.to_str())


def load_fast(text: str, trained: bool, config: str | None = None) -> FastTokenizer:
    """A tokenizer of the text of its tokenizer.json. Raises RequestError when it is none or has no end of text."""
    from tokenizers import Tokenizer

    try:
        inner = Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise RequestError(f"is not a tokenizer.json: {error}") from error
    named = json.loads(config).get("eos_token") if config else None
    named = named.get("content") if isinstance(named, dict) else named
    for name in (*END_NAMES, named):
        if name and (eot := inner.token_to_id(name)) is not None:
            return FastTokenizer(inner, eot, trained)
    raise RequestError(
        f"has no end-of-text token ({', '.join(END_NAMES)}): add one of these, "
        "or name its own as eos_token in a tokenizer_config.json beside it"
    )


def load_ranks(name: str, text: str) -> TiktokenTokenizer:
    """GPT-2's or Llama 3's tokenizer of its ranks: lines of a token in base64 and its rank. Raises RequestError."""
    from tiktoken import Encoding

    pattern, special = RANKED[name]
    try:
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, text.splitlines())}
        ids = {token: len(ranks) + i for i, token in enumerate(special)}
        inner = Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=ids)
        return TiktokenTokenizer(inner, next(ids[end] for end in END_NAMES if end in ids))
    except (ValueError, KeyError) as error:  # KeyError: a rank is missing
        raise RequestError(f"holds no ranks of tokenizer={name}: {error}") from error


def load_trained(text: str) -> Tokenizer:
    """A BPE of `train_bpe`, encoded by `tiktoken`, which is several times faster, where that gives the same ids.

    `tokenizers` joins the neighbours x, y of the earliest merge, `tiktoken` those whose joint xy is the earliest token.
    These differ only for neighbours that make a token t and are not its merge. Before they stood side by side nothing
    was joined across their border, or over their outer ends, so that the bytes of t alone come to the same x, y, and
    stay there: if every token alone is encoded as itself, there are none.
    """
    from tiktoken import Encoding

    fast = load_fast(text, True)
    model, tokenize = json.loads(text)["model"], fast.inner.model.tokenize
    vocab, made = model["vocab"], [model["vocab"][x + y] for x, y in model["merges"]]
    in_order = made == sorted(set(made)) == list(range(256, len(vocab)))
    if not (in_order and all([part.id for part in tokenize(token)] == [i] for token, i in vocab.items())):
        return fast
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that are written as their own character
    others = (b for b in range(256) if b not in plain)
    byte = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
    ranks = {bytes(byte[character] for character in token): i for token, i in vocab.items()}
    inner = Encoding("bpe", pat_str=RANKED["gpt2"][0], mergeable_ranks=ranks, special_tokens={END_OF_TEXT: fast.eot})
    return TiktokenTokenizer(inner, fast.eot)


class Recipe:
    """What makes the tokenizer, known before any text is read: enough to name a corpus."""

    def __init__(self, tokenizer: schema.Tokenizer) -> None:
        """Raises RequestError for a tokenizer that is not there or is none."""
        self.name, self.trained = tokenizer.name, tokenizer.name == "bpe"  # trained: on the text itself
        self.identity: dict[str, Any] = {"name": tokenizer.name}
        self.text, self.config = "", None  # of its file, and of tokenizer_config.json
        if self.trained:
            sample, library = [SAMPLE, SAMPLED], version("tokenizers")
            self.identity |= {"vocab_size": tokenizer.vocab_size, "sample": sample, "tokenizers": library}
            self.size = tokenizer.vocab_size  # asked for: a small text gives fewer
            return
        place = ""
        if self.name != "byte":
            self.text, self.config, place = read_tokenizer(self.name, tokenizer.path)
            self.identity |= {"hash": text_hash(self.text), "config": text_hash(self.config or "")}
        self.size = _load(self.name, self.text, self.config, place).size
        if self.size != tokenizer.vocab_size and self.name in RANKED:
            what = f"has {self.size:,} ids and tokenizer={self.name} {tokenizer.vocab_size:,}"
            raise RequestError(f"{place} {what}: tokenizer=hf reads any tokenizer.json")

    def keep(self, folder: Path, trained: str = "") -> dict[str, str]:
        """Put its file into a folder, from which `reopen` reads it; `trained` is that of one that is trained.

        Returns the file's name and hash, as a manifest has them.
        """
        text = self.text or trained
        file = "" if not text else "tokenizer.json" if text.lstrip()[:1] == "{" else "tokenizer.model"
        for name, content in ((file, text), ("tokenizer_config.json", self.config)):
            if name and content:
                write_whole(folder / name, content)
        return {"hash": text_hash(text), "file": file}


def _load(name: str, text: str, config: str | None, place: str) -> Tokenizer:
    try:
        return _loaded(name, text, config)
    except RequestError as error:
        raise RequestError(f"{place} {error}") from error


@functools.lru_cache(maxsize=1)
def _loaded(name: str, text: str, config: str | None) -> Tokenizer:
    if name == "byte":
        return ByteTokenizer()
    if name == "bpe":
        return load_trained(text)
    if name in RANKED and not text.lstrip().startswith("{"):
        return load_ranks(name, text)
    return load_fast(text, False, config)


def keep_files(corpus: Path, run: Path) -> None:
    """Copy the tokenizer of a corpus into a run's folder: what it comes from may change or go."""
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        if (corpus / name).is_file() and not (run / name).exists():
            write_whole(run / name, (corpus / name).read_text("utf-8"))


def reopen(name: str, folder: Path) -> Tokenizer:
    """The tokenizer whose file is kept in the folder of a corpus or a run. Raises RequestError when it is gone."""
    return _load(name, *(("", None, "") if name == "byte" else read_tokenizer(name, str(folder))))


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
