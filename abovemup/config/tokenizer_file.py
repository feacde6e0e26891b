"""The file that makes a published tokenizer: at `tokenizer.path`, in an installed package, or on the hub."""

import base64
import importlib.util
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from abovemup.config.errors import RequestError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Where Llama 3's is: packages that carry its ranks (looked into, never imported), and a gated hub repository.
PACKAGES = {"llama_models": "llama3/tokenizer.model", "llama_stack": "models/llama/llama3/tokenizer.model"}
LLAMA3 = "meta-llama/Meta-Llama-3-8B"


def read_tokenizer(name: str, path: str | None) -> tuple[str, str | None, str]:
    """The text of the file of a tokenizer, of a tokenizer_config.json beside it, and where it is.

    The file is a tokenizer.json, or ranks as `tiktoken` reads them. Raises RequestError.
    """
    if path:
        names = [] if name == "hf" else ["tokenizer.model"]  # ranks first: four times faster
        file = _given(path, [*names, "tokenizer.json"])
    elif name == "llama3":
        file = _packaged() or _llama3_on_hub()
    elif name == "gpt2":
        return _gpt2_ranks(), None, "tiktoken's r50k_base"
    else:
        raise RequestError("tokenizer=hf needs tokenizer.path=: a tokenizer.json, a folder that holds one, or a hub id")
    beside = file.with_name("tokenizer_config.json")
    try:
        return file.read_text("utf-8"), beside.read_text("utf-8") if beside.exists() else None, str(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise RequestError(f"tokenizer.path={path}: cannot read {file}: {reason}") from error


def vocab_size(path: str | None) -> int:
    """One more than the largest id in the tokenizer.json of tokenizer=hf, added tokens included."""
    text, _, place = read_tokenizer("hf", path)
    try:
        content = json.loads(text)
        vocab = content["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        return 1 + max(int(i) for i in [*ids, *(token["id"] for token in content.get("added_tokens") or [])])
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"tokenizer.path={path}: {place} is not a tokenizer.json.") from error


def of_shards(path: str | None, asked: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer's keys for data=shards: those of its manifest. Raises RequestError if others are `asked` for."""
    if not path:
        raise RequestError("data=shards reads a folder that `abovemup data prepare` made: set data.path.")
    try:
        folder = Path(path).expanduser()
        made = json.loads((folder / "manifest.json").read_text("utf-8"))["tokenizer"]
        file = str(folder / made["file"]) if made["file"] and made["name"] != "bpe" else None
        own = {"name": made["name"], "vocab_size": made["vocab_size"], "path": file}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        why = f"no folder that `abovemup data prepare` made ({getattr(error, 'strerror', None) or error})"
        raise RequestError(f"data.path={path}: {why}.") from error
    for key, value in asked.items():
        if value != own[key]:
            raise RequestError(f"tokenizer.{key}={value}: the tokens of {path} are of {own[key]}. Leave it out.")
    return own


def _given(path: str, names: list[str]) -> Path:
    """The file that tokenizer.path names, in a folder the first of `names`; what exists here wins over the hub."""
    try:
        found = Path(path).expanduser()
        if HUB_ID.fullmatch(path) and not found.exists():
            return _on_hub(path)
        if found.is_dir():
            found = next((found / name for name in names if (found / name).exists()), found / names[0])
        found.stat()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: ~name of nobody
        raise RequestError(f"tokenizer.path={path}: {getattr(error, 'strerror', None) or error}") from error
    except RequestError as error:
        raise RequestError(f"tokenizer.path={path}: no such file or folder, and {error}") from error
    if not found.is_file():
        raise RequestError(f"tokenizer.path={path} is neither a regular file nor a folder")
    return found


def _packaged() -> Path | None:
    for package, name in PACKAGES.items():
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            if (Path(folder) / name).is_file():
                return Path(folder) / name
    return None


def _llama3_on_hub() -> Path:
    try:
        return _on_hub(LLAMA3)
    except RequestError as error:
        raise RequestError(
            "tokenizer=llama3 is not at hand: pip install --no-deps llama-models, or set tokenizer.path to a "
            f"tokenizer.model or tokenizer.json.\n{error}"
        ) from error


def _on_hub(repo: str) -> Path:
    """The tokenizer.json of a repository, and beside it the tokenizer_config.json if any; downloaded once."""
    from huggingface_hub import constants, get_session, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RepositoryNotFoundError

    if isinstance(cached := try_to_load_from_cache(repo, "tokenizer.json"), str):
        return Path(cached)
    try:
        # Asked once: without a network the download would try for 23 s.
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        with suppress(RemoteEntryNotFoundError):
            hf_hub_download(repo, "tokenizer_config.json")
        return Path(hf_hub_download(repo, "tokenizer.json"))
    except GatedRepoError:
        why = "it is gated: accept its terms there and set HF_TOKEN"
    except RepositoryNotFoundError:
        why = "there is none of that name for you: check it, or set HF_TOKEN"
    except Exception as error:  # of the network, by whatever name the library has for it
        why = str(error).split("\n")[0]
    raise RequestError(f"the hub does not give {repo}: {why}")


def _gpt2_ranks() -> str:
    """From tiktoken's cache, or the network: the text of its file."""
    from tiktoken_ext.openai_public import r50k_base  # type: ignore[import-untyped]

    try:
        ranks: dict[bytes, int] = r50k_base()["mergeable_ranks"]
    except (OSError, ValueError) as error:
        raise RequestError(
            "tokenizer=gpt2: r50k_base is not in tiktoken's cache (TIKTOKEN_CACHE_DIR) and could not be fetched: set "
            "tokenizer.path to a gpt2.tiktoken, r50k_base.tiktoken or tokenizer.json"
        ) from error
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
