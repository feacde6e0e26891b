"""Text from a trained model."""

import torch

from abovemup.config import io
from abovemup.config.errors import RequestError
from abovemup.config.schema import Experiment
from abovemup.data.corpus import Corpus, open_corpus
from abovemup.model.llama import Llama
from abovemup.model.sample import sample
from abovemup.training import checkpoint
from abovemup.training.lineage import run_folder


def generate(run: str, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The prompt and what the newest whole checkpoint of `run` makes of it. Raises RequestError."""
    folder = run_folder(run)
    exp = io.load(folder / "config.yaml")
    path = checkpoint.choose(folder, None, lambda text: None)
    if path is None:
        raise RequestError(f"{folder} has no whole checkpoint yet. Let it train until its first one.")
    corpus = open_corpus(exp)
    model = Llama(exp.model, exp.parameterization)
    weights = checkpoint.load(path).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return prompt + continuation(model, corpus, exp, prompt, tokens, temperature, seed)


def continuation(
    model: Llama, corpus: Corpus, exp: Experiment, prompt: str, tokens: int, temperature: float, seed: int
) -> str:
    """Text that follows `prompt`, which stands at the start of a document."""
    ids = sample(
        model,
        [corpus.eot, *corpus.encode(prompt)],
        tokens,
        temperature,
        torch.Generator().manual_seed(seed),
        context=exp.train.seq_len,
        vocab=exp.tokenizer.vocab_size,
    )
    return corpus.decode(ids)
