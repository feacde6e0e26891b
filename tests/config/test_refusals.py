"""What is refused, in what words, and that nothing is left on disk. Case 63 and issue "First run", Configuration."""

from pathlib import Path

import pytest

from abovemup.config.compose import compose
from abovemup.config.errors import RequestError

NAMES = [
    # overrides, what the message must hold
    ("optimizer.lrr=1", "optimizer.lrr", "optimizer.lr?"),
    ("optimizer=scoin", "optimizer=scoin", "scion"),
    ("optmizer=adam", "optmizer", "optimizer"),
    ("model.widht=3", "model.widht", "model.width"),
    ("lr=0.1", "unknown key lr", "optimizer.lr"),
    ("seed=3", "unknown key seed", "train.seed"),
    ("foo", "foo", "KEY=VALUE"),
    ("paper_main", "KEY=VALUE", "experiment=paper_main"),
    ("scoin", "KEY=VALUE", "optimizer=scion"),
    ("lr", "KEY=VALUE", "optimizer.lr=..."),
    ("optimizer", "KEY=VALUE", "scion_constrained"),
    ("train", "KEY=VALUE", "train.KEY"),
    ("=3", "=3", "KEY=VALUE"),
    ("+optim.rl=1e-3", "optim.rl", "optimizer.lr"),
    ("++optim.rl=1e-3", "optim.rl", "optimizer.lr"),
    ("optim.rl=1e-3", "optim.rl", "optimizer.lr"),
    ("+zzz=1", "zzz", ""),
    ("++zzz=1", "zzz", ""),
    ("~optimizer", "~optimizer", "deleted"),
    ("~optimizer.lr", "~optimizer.lr", "deleted"),
    ("hydra.run.dir=x", "unknown key hydra.run.dir", "mean run.dir?"),
    ("+hydra.verbose=true", "hydra.verbose", ""),
    ("hydra/launcher=basic", "hydra/launcher", ""),
    ("optimizer@x=adam", "optimizer@x", "optimizer"),
    ("optimizer.name=adam", "optimizer.name", "optimizer=..."),
    ("optimizer.roles=3", "section", "hidden"),
    ("optimizer.roles.hidden=3", "section", "norm"),
    ("model={width: 3}", "no such choice", "tiny"),
    ("optimizer=adam,muon", "no such choice", "adam"),
    ("model=_shared", "no such choice", "tiny"),
    ("choices=3", "unknown key choices", ""),
    ("experiment=nope", "experiment=nope", "demo"),
]
TWICE = [
    ("optimizer=adam optimizer=adam", "optimizer is given twice"),
    ("optimizer=adam +optimizer=muon", "optimizer is given twice"),
    ("optimizer.lr=1 optimizer.lr=2", "optimizer.lr is given twice"),
    ("optimizer.lr=1 ++optimizer.lr=2", "optimizer.lr is given twice"),
]
VALUES = [
    ("optimizer.lr=nan", "optimizer.lr=nan", "finite"),
    ("optimizer.lr=inf", "optimizer.lr=inf", "finite"),
    ("optimizer.lr=-inf", "optimizer.lr=-inf", "finite"),
    ("optimizer.lr=1e999", "optimizer.lr", "finite"),
    ("optimizer.args.x=nan", "optimizer.args", "Out of range"),
    ("optimizer.lr=abc", "optimizer.lr=abc", "number"),
    ("optimizer.lr=", "optimizer.lr=", "number"),
    ("optimizer.lr=null", "optimizer.lr=null", "number"),
    ("optimizer.lr=1,2", "optimizer.lr=1,2", "one value"),
    ("optimizer.lr=range(1,3)", "optimizer.lr", "one value"),
    ("optimizer.lr=-1", "optimizer.lr=-1", "above 0"),
    ("optimizer.lr=0", "optimizer.lr=0", "above 0"),
    ("optimizer.momentum=1", "optimizer.momentum=1", "0.99"),
    ("optimizer.momentum=-0.1", "optimizer.momentum=-0.1", "use 0"),
    ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1", "use 0"),
    ("optimizer.clip=0", "optimizer.clip=0", "above 0"),
    ("optimizer.lr_scale.head=0", "optimizer.lr_scale.head=0", "above 0"),
    ("optimizer.roles.hidden.scale=-2", "optimizer.roles.hidden.scale=-2", "above 0"),
    ("optimizer.lr=1e7", "optimizer.lr=1e+07", "1000000"),
    ("optimizer.weight_decay=1e9", "optimizer.weight_decay=1e+09", "1000000"),
    ("optimizer.roles.head.weight_decay=-1", "optimizer.roles.head.weight_decay=-1", "use 0"),
    ("optimizer.roles.head.momentum=1", "optimizer.roles.head.momentum=1", "0.99"),
    ("optimizer.roles.head.norm_control=x", "optimizer.roles.head.norm_control=x", "post_clip"),
    ("optimizer.clip=abc", "optimizer.clip=abc", "number", "null"),
    ("norms.which=abc", "norms.which=abc", "role, all", "list"),
    ("norms.which=[frobenuis]", "norms.which=[frobenuis]", "frobenius?"),
    ("model.width.x=3", "model.width={x: 3}", "integer"),
    ("optimizer.target=nonsense", "optimizer.target=nonsense", "my.module:Cls"),
    ("train.seed=-1", "train.seed=-1", "use 0"),
    ("train.seed=2^63", "train.seed=9223372036854775808", "use 9223372036854775807"),
    ("data.seed=2^63", "data.seed=9223372036854775808", "use 9223372036854775807"),
    ("train.seed=1.5", "train.seed=1.5", "integer"),
    ("train.steps=0", "train.steps=0", "use 1"),
    ("train.batch_size=-4", "train.batch_size=-4", "use 1"),
    ("model.depth=0", "model.depth=0", "use 1"),
    ("model.depth=1e6", "model.depth=1000000", "use 10000"),
    ("model.width=1e7", "model.width=10000000", "use 1048576"),
    ("model.vocab_size=2^40", "model.vocab_size=1099511627776", "use 4194304"),
    ("tokenizer.vocab_size=1e9", "tokenizer.vocab_size=1000000000", "use 4194304"),
    ("eval.tokens=2^60", "eval.tokens=1152921504606846976", "use 1073741824"),
    ("train.batch_size=1e9", "train.batch_size=1000000000", "use 1048576"),
    ("train.threads=2000", "train.threads=2000", "use 1024", "null"),
    ("train.steps=2^41", "train.steps=2199023255552", "use 1099511627776"),
    ("optimizer.msign.steps=1e9", "optimizer.msign.steps=1000000000", "use 1000"),
    ("data.states=1e9", "data.states=1000000000", "use 1048576"),
    ("model.ffn=0/5", "model.ffn=0/5", "above 0"),
    ("model.kv_heads=0/1", "model.kv_heads=0/1", "at most 1"),
    ("model.kv_heads=2/1", "model.kv_heads=2/1", "at most 1"),
    ("model.width=2^20 model.ffn=999/1", "model.ffn=1047527424", "use 16777216"),  # what follows is bounded too
    ("tracking.project=a/b", "tracking.project='a/b'", "W&B"),
    ("tracking.project=", "tracking.project=''", "W&B"),
    ("train.dtype=float16", "train.dtype=float16", "bfloat16"),
    ("train.compile=maybe", "train.compile=maybe", "true or false"),
    ("train.compile=1", "train.compile=1", "true or false"),
    ("model.norm_placement=everywere", "everywere", "everywhere?"),
    ("eval.every=pow3", "eval.every=pow3", "pow2"),
    ("eval.every=-1", "eval.every=-1", "steps"),
    ("checkpoint.keep=0", "checkpoint.keep=0", "use 1"),
    ("tracking.tags=a", "tracking.tags=a", "[a,b]"),
    ("run.name=a/b", "run.name", "run.dir"),
    ("run.name=..", "run.name", "folder"),
    ("data.states=1", "data.states=1", "use 2"),
    ("schedule.final=1.5", "schedule.final=1.5", "use 1"),
    ("schedule.warmup=-3", "schedule.warmup=-3", "use 0"),
    ("schedule=cosine schedule.warmup=null", "schedule.warmup=null", "fraction"),
    ("schedule.warmup=0tok", "schedule.warmup=0tok", "at least 1"),
    ("schedule.warmup=half", "schedule.warmup=half", "fraction"),
]
TOGETHER = [  # both numbers and the nearest valid one
    ("model.heads=3", "model.heads=3", "model.width=64", "2 or 4"),
    ("model.heads=64", "model.heads=64", "model.width=64", "model.heads=32"),
    ("model.head_dim=15", "model.head_dim=15", "model.width=64", "8 or 16"),
    ("model.width=72", "model.head_dim=16", "model.width=72", "64 or 80"),
    ("model.width=64 model.heads=4 model.head_dim=15", "model.head_dim=15", "heads=4", "14 or 16"),
    ("model.kv_heads=3", "model.kv_heads=3", "model.heads=4", "2 or 4"),
    ("model.kv_heads=8", "model.kv_heads=8", "model.heads=4", "use 4"),
    ("train.steps=10 train.tokens=2^20", "train.steps=10", "train.tokens=1048576", "keep one"),
    ("train.steps=512 train.tokens=2^20", "train.steps=512", "train.tokens=1048576", "keep one"),
    ("train.tokens=1e6", "train.tokens=1000000", "16 x 128 = 2048", "999424 or 1001472"),
    ("train.tokens=5", "train.tokens=5", "2048", "use 2048"),
    ("train.steps=null", "train.steps", "train.tokens", "set one"),
    ("train.micro_batch=5", "train.micro_batch=5", "train.batch_size=16", "4 or 8"),
    ("train.micro_batch=32", "train.micro_batch=32", "train.batch_size=16", "use 16"),
    ("model.vocab_size=100", "model.vocab_size=100", "1024", "use 1024"),
    ("data=synthetic model.vocab_size=100", "model.vocab_size=100", "data.states", "257"),
    ("data=synthetic data.branching=500", "data.branching=500", "data.states=256", "use 256"),
    ("tokenizer=byte tokenizer.vocab_size=300", "tokenizer.vocab_size=300", "257", "model.vocab_size"),
    ("tokenizer.vocab_size=100", "tokenizer.vocab_size=100", "257", ""),
    ("tokenizer=hf", "tokenizer=hf", "tokenizer.path", ""),
    ("tokenizer.path=/x", "tokenizer.path=/x", "tokenizer=bpe", "tokenizer=hf"),
    ("data=text", "data=text", "data.path", ""),
    ("data=text data.path=", "data=text", "data.path", ""),
    ("data.path=/x", "data.path=/x", "data=stdlib", "data=text"),
    ("tokenizer=hf tokenizer.vocab_size=300", "tokenizer=hf", "tokenizer.path", ""),
    ("data=hub", "data=hub", "data.repo", ""),
    ("data=hub data.repo=", "data=hub", "data.repo", ""),
    ("data.repo=a/b", "data.repo=a/b", "data=stdlib", "data=hub"),
    ("data=nemotron_cc data.revision=main", "data.revision=main", "data=nemotron_cc", "data=hub"),
    ("data=fineweb data.url=http://x", "data.url=http://x", "data=fineweb", "data=nemotron_cc"),
    ("data.subset=x", "data.subset=x", "data=stdlib", "data=hub"),
    ("model.tie_embeddings=true parameterization=standard", "tie_embeddings", "standard", "above_mup"),
    ("schedule=cosine schedule.warmup=2000", "2000", "1000", "at most 1000"),
    ("schedule.warmup=2^30tok", "524288", "1000", "at most 1000"),
    ("schedule=wsd schedule.warmup=0.5 schedule.decay=0.6", "500 + 600", "1000", "schedule.decay=500"),
    ("schedule.decay=3", "schedule.decay=3", "schedule=constant", "schedule=wsd"),
    ("schedule=cosine schedule.decay=3", "schedule.decay=3", "950", "null"),
    ("eval.tokens=5", "eval.tokens=5", "train.seq_len=128", "use 128"),
]


@pytest.mark.parametrize(("typed", "words"), [(row[0], row[1:]) for row in (*NAMES, *TWICE, *VALUES, *TOGETHER)])
def test_refused_in_one_or_two_lines_with_nothing_on_disk(typed: str, words: tuple[str, ...], elsewhere: Path) -> None:
    overrides = [typed] if "{" in typed else typed.split(" ")
    with pytest.raises(RequestError) as refusal:
        compose(overrides)
    message = str(refusal.value)
    assert all(word in message for word in words), message
    assert message.count("\n") <= 1
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("prefix", ["+", "++"])
def test_a_plus_before_a_known_key_is_no_plus(prefix: str) -> None:
    assert compose([f"{prefix}optimizer.lr=2^-3", f"{prefix}model=pocket"]) == compose(
        ["optimizer.lr=2^-3", "model=pocket"]
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("optim: {rl: 1e-3}", "optim.rl"),
        ("optimizer: {lrr: 1e-3}", "optimizer.lrr"),
        ("optimizer: adam", "choices: {optimizer: adam}"),
        ("choices: {optimizer: scoin}", "scion"),
        ("choices: {optimiser: scion}", "optimizer"),
        ("experiment: paper_mian", "paper_main"),
        ("train: {steps: 10, tokens: 2^20}", "keep one"),
        ("optimizer: {lr: .nan}", "finite"),
        ("- a", "keys and values"),
        ("a: [", "not YAML"),
        ("model: {name: 3, width: {x: 1}}", "model.width={x: 1}: expected an integer"),
        ("model: {name: 3, base: {x: 1}}", "mine.yaml: unknown key model.base.x"),
        ("choices: 3", "mine.yaml: choices=3"),
        ("choices: [a]", "mine.yaml: choices="),
        ("derived: 3", "mine.yaml: derived=3"),
        ("cannot_match: 5", "mine.yaml: cannot_match=5"),
        ("train: {steps: 1}\ntrain: {seed: 2}", "train is given twice"),
        ("train: {steps: 1, steps: 2}", "steps is given twice"),
        ("model: &a {x: *a}", "recursive"),
        ("run: {name: 2020-99-01}", "not YAML"),
        ('data: {path: "a\\0b"}', "NUL"),
    ],
)
def test_a_file_is_checked_like_the_command_line(text: str, word: str, elsewhere: Path) -> None:
    file = elsewhere / "mine.yaml"
    file.write_text(text)
    with pytest.raises(RequestError, match=r".") as refusal:
        compose([], config_file=file)
    assert word in str(refusal.value)


def test_an_integer_of_5000_digits() -> None:
    with pytest.raises(RequestError, match="a finite number"):
        compose(["optimizer.lr=" + 5000 * "9"])


def test_a_missing_file(elsewhere: Path) -> None:
    with pytest.raises(RequestError, match="nope"):
        compose([], config_file=elsewhere / "nope.yaml")


def test_a_folder_of_ones_own_that_is_misspelled(elsewhere: Path) -> None:
    (elsewhere / "optimizr").mkdir()
    (elsewhere / "optimizr" / "mine.yaml").write_text("defaults: [scion, _self_]\n")
    with pytest.raises(RequestError, match="optimizer"):
        compose([], config_dir=elsewhere)
    with pytest.raises(RequestError, match="no such folder"):
        compose([], config_dir=elsewhere / "nope")


def test_a_folder_of_ones_own_hides_nothing(elsewhere: Path) -> None:
    (elsewhere / "optimizer").mkdir()
    (elsewhere / "optimizer" / "scion.yaml").write_text("lr: 1\n")
    with pytest.raises(RequestError, match="exists already"):
        compose([], config_dir=elsewhere)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("optimizer/mine.yaml", b"lr: \xff\n", ("optimizer=mine", "utf-8")),
        ("optimizer/mine.yaml", b"defaults: [mine]\n", ("optimizer=mine", "recursion")),
        ("optimizer/mine.yaml", b"defaults: [scion]\nargs: &a {b: *a}\n", ("optimizer=mine", "recursion")),
        ("optimizer/mine.yaml", b"defaults: [nope]\n", ("optimizer/mine", "optimizer/nope")),
        ("optimizer/mine.yaml", b"defaults: 3\n", ("optimizer/mine", "defaults")),
        ("optimizer/mine.yaml", b"defaults: [scion, _self_]\nlr: ${lr\n", ("${lr",)),
        ("optimizer/mine.yaml", b"3\n", ("does not compose",)),
        ("optimizer/mine.yml", b"lr: 1\n", ("optimizer/mine.yml", ".yaml")),
        ("experiment/mine.yaml", b"optimizer: {lr: 5}\n", ("experiment/mine.yaml", "# @package _global_")),
        ("experiment/mine.yaml", b"# @package _global_\ncannot_match: 5\n", ("cannot_match=5", "list")),
    ],
)
def test_a_broken_choice_of_ones_own(name: str, text: bytes, words: tuple[str, ...], elsewhere: Path) -> None:
    file = elsewhere / name
    file.parent.mkdir()
    file.write_bytes(text)
    with pytest.raises(RequestError) as refusal:
        compose([f"{file.parent.name}=mine"], config_dir=elsewhere)
    message = str(refusal.value)
    assert all(word in message for word in words), message
    assert "Config search path" not in message
    assert "\n" not in message


def test_an_unknown_key_in_a_choice_of_ones_own(elsewhere: Path) -> None:
    (elsewhere / "experiment").mkdir()
    (elsewhere / "experiment" / "mine.yaml").write_text("# @package _global_\noptim: {rl: 1e-3}\n")
    with pytest.raises(RequestError, match=r"optim\.rl"):
        compose(["experiment=mine"], config_dir=elsewhere)
