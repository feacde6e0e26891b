"""Text from a run, with the run's own tokenizer and nothing but its newest weights."""

import shutil
from pathlib import Path

import pytest

from abovemup.cli.main import run as command
from abovemup.config.errors import RequestError
from abovemup.training.generate import generate
from tests.data.test_recipe import save
from tests.training.tiny import run, write_text

TEXT = ["data=text", "data.path=text", "tokenizer=bpe", "tokenizer.vocab_size=300", "model.vocab_size=320"]


def test_it_needs_the_run_only(elsewhere: Path) -> None:
    """The data may be edited or gone: the tokenizer that was trained on them is the run's."""
    write_text()
    run(*TEXT, "data.allow_repeat=true", "run.dir=r")
    shutil.rmtree("text")
    text = generate("r", "document 7", 12, 1.0, 0)
    assert text.startswith("document 7")
    assert text == generate("r", "document 7", 12, 1.0, 0)
    assert text != generate("r", "document 7", 12, 1.0, 1)
    shutil.rmtree("r/checkpoints/step_00000006/")
    assert generate("r", "", 3, 0.0, 0)


@pytest.mark.parametrize("where", ["text", "shards"])
def test_a_published_tokenizer_is_kept_too(elsewhere: Path, where: str) -> None:
    write_text()
    save(elsewhere / "hf", "<STOP>", {"eos_token": "<STOP>"})
    sizes = ["tokenizer=hf", "tokenizer.path=hf"]
    if where == "shards":
        assert command(["data", "prepare", "text", "--path", "text", "--out", "shards", *sizes]) == 0
        sizes = []
    run(f"data={where}", f"data.path={where}", *sizes, "model.vocab_size=600", "data.allow_repeat=true", "run.dir=r")
    for gone in elsewhere.iterdir():
        if gone.is_dir() and gone.name != "r":
            shutil.rmtree(gone)
    assert generate("r", "document 7", 12, 1.0, 0).startswith("document 7")


@pytest.mark.parametrize("tie", [False, True])
def test_numbers_of_the_synthetic_source(elsewhere: Path, tie: bool) -> None:
    run(f"model.tie_embeddings={tie}", "run.dir=r")
    words = generate("r", "1 2", 5, 1.0, 0).split()
    assert words[:2] == ["1", "2"]
    assert len(words) == 7


def test_padded_rows_are_never_drawn(elsewhere: Path) -> None:
    run("model.vocab_size=400", "run.dir=r")
    words = generate("r", "1 2", 200, 1e6, 0).split()
    assert {int(word) for word in words if word.isdigit()} <= set(range(256))


def test_documents_that_were_kept_apart_stay_apart(elsewhere: Path) -> None:
    write_text()
    # Hardly trained: any token may come, an end of text too.
    run("data=text", "data.path=text", "tokenizer=byte", "data.pack=document", "optimizer.lr=1e-9", "run.dir=r")
    apart = generate("r", "", 600, 1.0, 0)
    config = Path("r/config.yaml")
    config.write_text(config.read_text().replace("pack: document", "pack: stream"))
    together = generate("r", "", 600, 1.0, 0)
    first, ended, rest = apart.partition("<|endoftext|>")
    assert ended
    assert together.startswith(first + ended)
    assert together != first + ended + rest


def test_another_model_is_refused(elsewhere: Path) -> None:
    run("run.dir=r")
    config = Path("r/config.yaml")
    text = config.read_text()
    for depth in (1, 3):
        config.write_text(text.replace("depth: 2\n  heads", f"depth: {depth}\n  heads"))
        with pytest.raises(RequestError, match=r"does not hold the model of r/config.yaml"):
            generate("r", "1", 1, 1.0, 0)
