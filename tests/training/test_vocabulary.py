"""A run with padded rows is the run without them; a run that keeps documents apart, in training and in evaluation."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from abovemup.config.compose import compose
from abovemup.data.corpus import open_corpus
from abovemup.training.trainer import Trainer
from tests.training.tiny import TINY, compiled, rows, run, weights, write_text

DECAY = ["optimizer.lr=0.02", "optimizer.weight_decay=0.1"]
CLIP = ["optimizer.norm_control=post_clip", *DECAY]
TEXT = [o for o in TINY if not o.startswith(("data", "train.seq_len", "eval.tokens"))] + [
    "data=text",
    "data.path=text",
    "tokenizer=byte",
]


@pytest.mark.parametrize(
    "settings",
    [
        ["optimizer=scion"],
        ["optimizer=scion", *CLIP],
        ["optimizer=adamw", *DECAY],
        ["optimizer=muon", "norms.which=[effective_rank,stable_rank,max_abs,frobenius]"],
        ["optimizer=signsgd", "optimizer.lr=0.001", "optimizer.clip=0.5"],
        ["optimizer=above_mup", "model.tie_embeddings=true"],
    ],
)
def test_padded_rows_take_no_part_in_a_run(elsewhere: Path, settings: list[str]) -> None:
    settings = [*settings, "train.steps=3", "eval.every=0", "checkpoint.every=0"]
    run("run.dir=plain", *settings)
    run("run.dir=padded", "model.vocab_size=300", *settings)
    for plain, padded in zip(rows(Path("plain")), rows(Path("padded")), strict=True):
        assert plain.keys() == padded.keys()
        for key, value in plain.items():
            assert padded[key] == pytest.approx(value, rel=1e-4, abs=1e-7), (plain["step"], key)
    for name, weight in weights(Path("padded"), 3).items():
        if name in ("embedding.weight", "head.weight"):
            assert (weight[257:] == 0).all()


def test_the_first_lines_say_what_is_padded(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("model.vocab_size=300", "train.steps=1")
    assert "vocabulary: 257 ids in 300 rows" in capsys.readouterr().out
    run("train.steps=1")
    assert "vocabulary" not in capsys.readouterr().out


def test_a_padded_run_is_resumed(elsewhere: Path) -> None:
    run("run.dir=r", "model.vocab_size=300")
    before = rows(Path("r"))
    run(resume="r@2")
    assert rows(Path("r")) == before


def documents_apart(*overrides: str) -> Trainer:
    write_text()
    exp = compose([*TEXT, "data.pack=document", "train.device=cpu", "train.micro_batch=2", *overrides])
    return Trainer(exp, open_corpus(exp, lambda line: None))


def test_documents_kept_apart_in_training_and_in_evaluation(elsewhere: Path) -> None:
    trainer = documents_apart("train.seq_len=1280", "eval.tokens=2560")
    losses = trainer.evaluate()["val/loss"], trainer.gradients(1)[0]
    trainer.model.eot = None
    windows = trainer.validation, trainer.corpus.batch(0, 4)
    for found, part in zip(losses, windows, strict=True):
        assert (part[:, 1:-1] == 256).any()
        total = 0.0
        for window in part:
            starts = [0, *(i for i in range(1, 1280) if window[i] == 256), 1280]
            for a, b in pairwise(starts):
                with torch.no_grad():
                    logits = trainer.model(window[None, a:b])[0]
                total += F.cross_entropy(logits, window[a + 1 : b + 1], reduction="sum").item()
        assert found == pytest.approx(total / part[:, 1:].numel(), rel=1e-6)
    assert trainer.evaluate()["val/loss"] != pytest.approx(losses[0], rel=1e-5)


def test_packing_is_compiled_once(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compilations = compiled(monkeypatch)
    trainer = documents_apart("train.compile=true", "train.seq_len=32", "eval.tokens=512")
    losses = [trainer.gradients(t)[0] for t in range(1, 6)]
    assert len(compilations) == 1
    for block in trainer.model.layers:
        block._compiled_call_impl = None
    assert [trainer.gradients(t)[0] for t in range(1, 6)] == pytest.approx(losses, abs=1e-6)
