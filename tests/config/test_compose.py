"""What a configuration comes to: defaults, presets, what follows from what, and config.yaml."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from abovemup.config import io
from abovemup.config.compose import compose
from abovemup.config.conf import GROUPS, choices, defaults
from abovemup.config.errors import RequestError
from abovemup.config.keys import differences
from abovemup.config.resolve import cores
from abovemup.config.schema import Experiment, Run

PAPER = ("paper_main", "paper_adam", "paper_momentum", "paper_decay", "paper_depth")


def preset(name: str, *overrides: str) -> Experiment:
    return compose([f"experiment={name}", *(["data.path=/corpus"] if name in PAPER else []), *overrides])


def test_the_groups_and_choices_of_the_design() -> None:
    assert {group: set(names) for group, names in choices().items()} == {
        "experiment": {"demo", "post3", *PAPER},
        "model": {
            *("tiny", "pocket", "llama_124m", "proxy_69m"),
            *("width_314m", "width_1300m", "depth_91m", "depth_168m"),
        },
        "parameterization": {"above_mup", "standard", "mup"},
        "optimizer": {"scion", "adam", "adamw", "muon", "scion_constrained", "above_mup", "signsgd"},
        "schedule": {"constant", "cosine", "wsd"},
        "data": {
            *("stdlib", "python", "synthetic", "text", "shards", "hub"),
            *("fineweb", "fineweb_edu", "fineweb2_rus", "fineweb2_tha", "nemotron_cc", "nemotron_cc_v2"),
        },
        "tokenizer": {"bpe", "byte", "llama3", "gpt2", "hf"},
        "tracking": {"wandb", "local"},
        "parallel": {"single", "ddp", "fsdp"},
    }
    assert defaults().keys() == set(GROUPS) - {"experiment"} | {"experiment"}


def test_the_default_run() -> None:
    e = compose([])
    assert {group: e.choices[group] for group in GROUPS} == defaults()
    assert (e.experiment, e.model.name, e.parameterization.name) == ("demo", "tiny", "above_mup")
    assert (e.optimizer.name, e.schedule.name, e.data.name, e.tokenizer.name) == ("scion", "constant", "stdlib", "bpe")
    assert (e.optimizer.momentum, e.tokenizer.vocab_size, e.eval.tokens) == (0.9, 1024, 2**17)
    assert (e.train.batch_size, e.train.seq_len, e.train.steps, e.train.tokens) == (16, 128, 1000, 2_048_000)
    assert (e.eval.every, e.checkpoint.every, e.checkpoint.keep, e.norms.every, e.tracking.every) == (
        *(200, 200, 2),
        *(10, 1),
    )
    m = e.model
    assert (m.width, m.depth, m.heads, m.kv_heads, m.head_dim, m.ffn, m.vocab_size) == (64, 2, 4, 2, 16, 176, 1024)
    assert e.train.threads == 1


@pytest.mark.parametrize(("group", "choice"), [(g, c) for g in ("model", "optimizer") for c in choices()[g]])
def test_every_model_and_optimizer(group: str, choice: str) -> None:
    e = compose([f"{group}={choice}"])
    assert getattr(e, group).name == e.choices[group] == choice
    assert dataclasses.asdict(e.model.base) == {
        "width": e.parameterization.base_width,
        "depth": e.parameterization.base_depth,
        "head_dim": e.parameterization.base_head_dim,
    }


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("proxy_69m", 68_878_336),
        ("width_314m", 314_048_512),
        ("width_1300m", 1_250_426_880),
        ("depth_91m", 91_357_184),
        ("depth_168m", 168_427_520),
    ],
)
def test_the_papers_sizes(model: str, count: int) -> None:
    """PAPER 1.1: 2 V d + L (4 d^2 + 3 d F), with F = 2.75 d exactly."""
    m = compose([f"model={model}"]).model
    assert m.kv_heads * m.head_dim == m.heads * m.head_dim == m.width
    assert 4 * m.ffn == 11 * m.width
    assert 2 * m.vocab_size * m.width + m.depth * (4 * m.width**2 + 3 * m.width * m.ffn) == count


@pytest.mark.parametrize("name", PAPER)
def test_presets_of_the_paper(name: str) -> None:
    e = preset(name)
    assert (e.train.seq_len, e.model.norm_placement, e.model.vocab_size) == (4096, "everywhere", 128_256)
    assert e.model.width == e.parameterization.base_width == 256
    assert e.cannot_match
    assert all(sentence.endswith(".") for sentence in e.cannot_match)
    assert not e.model.gains
    assert not e.model.biases


def test_what_each_preset_is_for() -> None:
    main, adam, momentum, decay, depth = map(preset, PAPER)
    assert (main.optimizer.momentum, main.optimizer.eps, main.schedule.name) == (0.0, 1e-20, "constant")
    assert (main.train.tokens, main.train.steps, main.optimizer.msign.method) == (2**33, 2**14, "newton_schulz")
    assert adam.optimizer.roles.hidden.norm == "adam"
    assert adam.schedule.warmup * adam.train.batch_size * adam.train.seq_len == 2**29
    assert momentum.optimizer.momentum == decay.optimizer.momentum == 0.9
    constant = decay.train.steps - decay.schedule.decay
    assert (decay.schedule.name, decay.schedule.final, constant) == ("wsd", 0.0, momentum.train.steps)
    assert 128 * decay.train.tokens == 171 * 2**33
    shape = (depth.model.heads, depth.model.kv_heads, depth.model.head_dim, depth.parameterization.base_head_dim)
    assert shape == (2, 1, 128, 128)
    assert (depth.parameterization.base_width, depth.parameterization.base_depth, depth.train.steps) == (256, 4, 2048)
    post3 = preset("post3")
    assert post3.model.gains
    assert post3.model.biases
    assert post3.optimizer.name == "above_mup"


def test_what_paper_adam_advises_is_the_papers_decay() -> None:
    """PAPER 3.4: a warmup of 2^29 tokens, constant, then linear to 0 over the last fifth of 1.25 x 2^35 tokens."""
    advice = next(sentence for sentence in preset("paper_adam").cannot_match if "decays" in sentence)
    e = preset("paper_adam", *re.findall(r"\S+=\S+", advice))
    tokens = e.train.batch_size * e.train.seq_len
    assert (e.schedule.name, e.schedule.warmup * tokens, e.schedule.final) == ("wsd", 2**29, 0.0)
    assert e.train.tokens == 5 * e.schedule.decay * tokens == 5 * 2**33


def test_the_tables_of_the_optimizers() -> None:
    def norms(name: str) -> list[str]:
        roles = compose([f"optimizer={name}"]).optimizer.roles
        return [getattr(roles, role).norm for role in ("embedding", "hidden", "head", "gain", "bias")]

    assert norms("scion") == ["one_to_rms", "rms_to_rms", "rms_to_inf", "rms", "rms"]
    assert norms("above_mup") == ["one_to_rms", "rms_to_rms", "rms_to_inf", "max_abs", "rms"]
    assert norms("adam") == norms("adamw") == ["adam"] * 5
    assert norms("muon") == ["adam", "keller_jordan", "adam", "adam", "adam"]
    assert norms("signsgd") == ["max_abs", "sign", "sign", "max_abs", "max_abs"]
    constrained = compose(["optimizer=scion_constrained"]).optimizer
    assert (constrained.roles.hidden.scale, constrained.roles.head.scale, constrained.weight_decay) == (50, 3000, 1)
    assert compose(["optimizer=above_mup"]).optimizer.msign.method == "polar_express"


def test_each_dimension_can_be_set_alone() -> None:
    def shape(*overrides: str) -> tuple[int, ...]:
        m = compose(list(overrides)).model
        return m.width, m.heads, m.kv_heads, m.head_dim, m.ffn

    assert shape("model.width=128") == (128, 8, 4, 16, 352)
    assert shape("model.heads=8") == (64, 8, 4, 8, 176)
    assert shape("model.head_dim=32") == (64, 2, 1, 32, 176)
    assert shape("model.width=128", "model.heads=4") == (128, 4, 2, 32, 352)
    assert shape("model.heads=3", "model.head_dim=16") == (64, 3, 1, 16, 176)  # 48 wide inside, as asked
    assert shape("model.ffn=100") == (64, 4, 2, 16, 100)
    assert shape("model.ffn=8/3") == (64, 4, 2, 16, 171)
    assert shape("model.kv_heads=1") == (64, 4, 1, 16, 176)
    assert shape("model.kv_heads=null") == (64, 4, 4, 16, 176)
    assert shape("model.width=16") == (16, 1, 1, 16, 44)
    assert shape("model.width=66", "model.head_dim=2") == (66, 33, 11, 2, 182)  # 181.5 goes up; 11 divides 33
    assert compose(["model=llama_124m"]).model.ffn == 2048
    assert compose(["model=llama_124m", "model.width=1536"]).model.ffn == 4096


def test_the_vocabulary_follows_the_data(tmp_path: Path) -> None:
    assert compose(["tokenizer.vocab_size=2^12"]).model.vocab_size == 4096
    assert compose(["tokenizer=byte"]).model.vocab_size == 257
    assert compose(["data=synthetic", "data.states=100"]).model.vocab_size == 101
    file = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 7, "content": "<|endoftext|>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        e = compose(["tokenizer=hf", f"tokenizer.path={path}"])
        assert e.tokenizer.vocab_size == e.model.vocab_size == 8


def test_steps_and_tokens_are_what_was_typed() -> None:
    assert compose(["train.tokens=2^20"]).train.steps == 512
    assert compose(["train.steps=3"]).train.tokens == 3 * 2048
    assert preset("paper_main", "train.steps=5").train.tokens == 5 * 2**19
    assert preset("paper_depth", "train.tokens=2^20").train.steps == 8
    assert compose(["train.batch_size=32"]).train.tokens == 1000 * 4096


def test_lengths_of_the_schedule() -> None:
    def lengths(*overrides: str) -> tuple[int, int]:
        s = compose(["train.steps=100", *overrides]).schedule
        return s.warmup, s.decay

    assert lengths("schedule=wsd") == (0, 20)
    assert lengths("schedule=wsd", "schedule.decay=1.0") == (0, 100)
    assert lengths("schedule=wsd", "schedule.decay=1") == (0, 1)
    assert lengths("schedule=wsd", "schedule.warmup=2^14tok", "schedule.decay=0.5") == (8, 50)
    assert lengths("schedule=wsd", "schedule.warmup=2049tok") == (2, 20)
    assert lengths("schedule=cosine") == (5, 95)
    assert lengths("schedule.warmup=1e1") == (10, 0)
    assert lengths("schedule.warmup=100") == (100, 0)


def test_threads() -> None:
    assert compose(["model.width=128"]).train.threads == 1
    assert compose(["model.width=256"]).train.threads == cores()
    assert compose(["model.width=256", "train.threads=3"]).train.threads == 3


@pytest.mark.parametrize("path", ["/a/quality=high/kind=actual", "/a (b)", "~/x", "/é/ü", "/a#b", "/plain", "C:\\x"])
def test_text_that_hydras_grammar_rejects_is_literal(path: str) -> None:
    assert compose(["data=text", f"data.path={path}"]).data.path == path


def test_hydras_grammar_otherwise() -> None:
    e = compose(["tracking.tags=[a, b]", "run.name='x, y'", "optimizer.args={a: 1, b: [2]}", "+optimizer.args.c=3"])
    assert (e.tracking.tags, e.run.name, e.optimizer.args) == (["a", "b"], "x, y", {"a": 1, "b": [2], "c": 3})
    assert compose(["run.name=007"]).run.name == "007"
    assert compose(["train={steps: 3, batch_size: 2}"]) == compose(["train.steps=3", "train.batch_size=2"])
    assert compose(["eval.tokens=${train.seq_len}"]).eval.tokens == 128


def test_another_choice_leaves_out_what_the_preset_set_for_its_own() -> None:
    e = preset("paper_main", "optimizer=muon", "tokenizer=byte")
    assert (e.optimizer, e.tokenizer) == (compose(["optimizer=muon"]).optimizer, compose(["tokenizer=byte"]).tokenizer)
    assert sum("do not apply" in sentence for sentence in e.cannot_match) == 2
    assert preset("paper_main", "optimizer=scion") == preset("paper_main")  # the preset's own choice, said again
    assert preset("paper_decay", "schedule=constant").schedule.decay == 0
    assert preset("post3", "model=pocket").model.gains  # what the preset is for stays


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=pocket", "model.width=128", "optimizer=adamw", "optimizer.lr=0.1", "schedule=wsd", "train.tokens=2^21"],
        ["experiment=paper_adam", "data.path=/é=(~)", "optimizer=muon"],
        ["experiment=post3", "schedule=cosine", "schedule.warmup=0.1", "eval.every=2^16tok", "checkpoint.every=pow2"],
        ["run.name=1e6", "tracking.group=null", "tracking.tags=['1e3', 'null', 'a: b']", "tracking.project='yes'"],
        ["optimizer.lr=0.1", "optimizer.eps=1e-20", "optimizer.clip=1e-300", "optimizer.args={x: 1e-7, y: null}"],
        ["model.heads=8", "data=synthetic", "train.micro_batch=auto"],
    ],
)
def test_config_yaml_holds_everything(overrides: list[str], tmp_path: Path) -> None:
    e = compose(overrides)
    io.save(e, tmp_path / "config.yaml")
    assert io.load(tmp_path / "config.yaml") == e
    assert compose([], config_file=tmp_path / "config.yaml") == e


def test_a_kill_while_config_yaml_is_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = compose([])
    io.save(e, tmp_path / "config.yaml")
    monkeypatch.setattr("os.fsync", lambda _: 1 / 0)  # the last moment before the new one is whole
    with pytest.raises(ZeroDivisionError):
        io.save(compose(["model=pocket"]), tmp_path / "config.yaml")
    assert io.load(tmp_path / "config.yaml") == e


def saved(tmp_path: Path, *overrides: str) -> Path:
    io.save(compose(list(overrides)), tmp_path / "config.yaml")
    return tmp_path / "config.yaml"


def test_a_key_on_top_of_a_file_derives_again_what_followed_and_nothing_else(tmp_path: Path) -> None:
    file = saved(tmp_path, "model.ffn=100", "schedule=wsd", "schedule.warmup=2^14tok", "optimizer.lr=0.3")
    e = compose(["model.width=128", "train.tokens=2^20", "train.batch_size=32"], config_file=file)
    assert (e.model.heads, e.model.kv_heads, e.model.ffn, e.model.head_dim) == (8, 4, 100, 16)
    assert (e.train.steps, e.train.micro_batch) == (256, 32)
    assert (e.schedule.warmup, e.schedule.decay, e.optimizer.lr) == (4, 51, 0.3)
    assert e.train.threads == 1
    changed = {key for key, *_ in differences(compose([], config_file=file), e)}
    assert changed == {
        *("model.width", "model.heads", "model.kv_heads"),
        *("train.tokens", "train.steps", "train.batch_size", "train.micro_batch"),
        *("schedule.warmup", "schedule.decay"),
    }
    assert compose(["model.heads=2"], config_file=file).model.head_dim == 32


def test_the_number_of_threads_is_never_derived_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the last bits of a run: a config that is repeated on another machine keeps it."""
    monkeypatch.setattr("abovemup.config.resolve.cores", lambda: 7)
    file = saved(tmp_path, "model.width=256")
    monkeypatch.setattr("abovemup.config.resolve.cores", lambda: 9)
    assert compose(["model.width=256"]).train.threads == 9
    assert compose(["train.steps=3"], config_file=file).train.threads == 7
    assert compose(["train.threads=null"], config_file=file).train.threads == 9


def test_a_name_or_folder_on_top_of_a_file_is_the_runs_whole_place(tmp_path: Path) -> None:
    """A run's config.yaml holds both: neither may drag a new run back into the old run's folder."""
    file = saved(tmp_path, "run.name=old", "run.dir=/runs/old")
    assert compose(["run.name=new"], config_file=file).run == Run(name="new", dir=None)
    assert compose(["run.dir=/new"], config_file=file).run == Run(name=None, dir="/new")
    assert compose(["train.steps=3"], config_file=file).run == Run(name="old", dir="/runs/old")


def test_a_group_on_top_of_a_file_is_composed_again(tmp_path: Path) -> None:
    file = saved(tmp_path, "model=pocket", "optimizer.lr=0.3", "model.width=128", "train.steps=7")
    e = compose(["optimizer=adam"], config_file=file)
    assert e.optimizer == compose(["optimizer=adam"]).optimizer
    assert (e.model, e.train) == (io.load(file).model, io.load(file).train)
    assert e.choices == {**io.load(file).choices, "optimizer": "adam"}
    assert compose(["model=tiny"], config_file=file).model == compose([]).model
    assert compose(["tokenizer=byte"], config_file=file).model.vocab_size == 257


def test_a_file_with_some_keys_is_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("choices: {optimizer: muon}\noptimizer: {lr: 2^-7}\ntrain: {tokens: 2^20}\nmodel: {heads: 8}\n")
    e = compose(["optimizer.momentum=0.5"], config_file=file)
    assert e == compose(
        ["optimizer=muon", "optimizer.lr=2^-7", "train.tokens=2^20", "optimizer.momentum=0.5", "model.heads=8"]
    )
    assert compose(["train.steps=4"], config_file=file).train.tokens == 4 * 2048
    io.save(compose(["optimizer.args={a: 1, b: 2}"]), file)
    assert compose(["optimizer.args.c=3"], config_file=file).optimizer.args == {"a": 1, "b": 2, "c": 3}
    file.write_text("optimizer: {args: {d: 4}}\ntrain:\n")  # an empty section is none
    assert compose([], config_file=file) == compose(["optimizer.args={d: 4}"])


def test_choices_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("defaults: [scion, _self_]\nname: mine\nlr: 2^-9\n")
    e = compose(["optimizer=mine", "model=pocket"], config_dir=tmp_path)
    assert (e.optimizer.name, e.optimizer.lr, e.choices["optimizer"]) == ("mine", 2**-9, "mine")
    file = tmp_path / "config.yaml"
    io.save(e, file)
    assert compose([], config_file=file) == e  # a run's own file is whole without the folder
    assert compose(["model=tiny"], config_file=file).optimizer == e.optimizer


def test_differences() -> None:
    a, b = compose([]), compose(["optimizer.lr=0.5", "model=pocket"])
    assert differences(a, a) == []
    assert set(differences(a, b)) == {
        ("optimizer.lr", a.optimizer.lr, 0.5),
        ("model.name", "tiny", "pocket"),
        ("model.depth", 2, 4),
        ("model.base.depth", 2, 4),
        ("parameterization.base_depth", 2, 4),
    }


def test_hydra_is_left_as_it_was_found() -> None:
    from hydra.core.global_hydra import GlobalHydra

    compose([])
    assert not GlobalHydra.instance().is_initialized()


def test_kv_heads_of_the_base_are_never_more_than_its_heads() -> None:
    assert compose(["model=tiny", "model.width=256", "model.kv_heads=8"]).parameterization.base_kv_heads == 4
    assert compose(["model=tiny", "model.width=256", "model.kv_heads=2"]).parameterization.base_kv_heads == 2
    assert compose(["model=tiny", "model.width=256"]).parameterization.base_kv_heads == 2
    with pytest.raises(RequestError, match="4 heads"):
        compose(["model=tiny", "parameterization.base_kv_heads=30"])
