"""`abovemup explain`: every name has a page, the numbers are those of the config, and a typo is answered."""

import json
from pathlib import Path
from typing import Any

import pytest

from abovemup.cli.main import run
from abovemup.config.conf import choices
from tests.geometry.exponents import exponents

KINDS = ("embedding", "hidden", "head", "gain", "bias", "attention")
LAYERS = ("layers.0.attention.wq", "layers.1.feed_forward", "layers.0", "head", "layers.0.attention_norm")


def pages(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run(["explain", *arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", [*KINDS, *LAYERS, *choices()["parameterization"], *choices()["optimizer"]])
def test_every_name_has_a_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["model.gains=true", "model.biases=true", "model.width=128"]
    assert run(["explain", name, *more]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith(name)
    for page in pages(capsys, name, *more):
        assert all(line in out for line in page["text"])
        assert page["parameters"]
        for row in page["parameters"]:
            assert row["parameter"] in out


def test_above_mup_is_both_unless_one_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert [p["name"] for p in pages(capsys, "above_mup")] == ["parameterization=above_mup", "optimizer=above_mup"]
    [page] = pages(capsys, "above_mup", "optimizer=adam", "model.width=256")
    powers = {row["role"]: (row["init std ~ n^"], row["lr ~ n^"]) for row in page["roles"]}
    assert powers == {"embedding": (0, 0), "hidden": (-0.5, -1), "head": (-1, -1), "gain": (0, 0), "bias": (0, 0)}


@pytest.mark.parametrize("optimizer", ["adam", "muon", "scion", "scion_constrained", "signsgd"])
@pytest.mark.parametrize("parameterization", ["standard", "mup", "above_mup"])
def test_powers_are_the_documented_ones(
    parameterization: str, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [page] = pages(capsys, parameterization, f"optimizer={optimizer}")
    for row in page["roles"]:
        documented = exponents(parameterization, row["role"], row["rule"])
        assert (row["init std ~ n^"], row["lr ~ n^"]) == (documented.init_std, documented.lr), row


def test_the_numbers_are_the_configs(capsys: pytest.CaptureFixture[str]) -> None:
    [page] = pages(capsys, "layers.1.attention.wk", "optimizer=adam", "model.width=256", "parameterization=mup")
    [row] = page["parameters"]
    assert (row["parameter"], row["shape"], row["base"]) == ("layers.1.attention.wk.weight", [128, 256], [32, 64])
    assert (row["rule"], row["lr x"], row["step norm / lr"]) == ("adam", 1 / 4, 64)
    assert row["init std"] == pytest.approx(128**0.5 / 256)
    [page] = pages(capsys, "head", "optimizer=adam", "model.width=256", "parameterization=standard")
    assert page["parameters"][0]["init norm"] == 2
    [page] = pages(capsys, "attention", "model.head_dim=32")
    assert "here 0.125." in page["text"][0]


def test_an_optimizer_of_ones_own_is_explained_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("# Half of Scion.\n# (a note)\ndefaults: [scion, _self_]\n# no\n")
    [page] = pages(capsys, "mine", "--config-dir", str(tmp_path))
    assert page["text"][:2] == ["Half of Scion.", "(a note)"]
    assert page["text"][2].startswith("Each role steps by")


def test_a_model_without_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "gain"]) == 0
    assert "none in this model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "near"),
    [("hedd", "head?"), ("layers.0.attention.wx", "layers.0.attention.w"), ("scoin", "scion?"), ("zzz", "a kind")],
)
def test_a_typo(name: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert name in err
    assert near in err
