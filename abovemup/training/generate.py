"""Text from a trained model."""

import torch

from abovemup.config import io
from abovemup.config.errors import RequestError
from abovemup.data.corpus import Coder, open_coder
from abovemup.model.llama import Llama
from abovemup.model.sample import sample
from abovemup.training import checkpoint
from abovemup.training.lineage import run_folder


def generate(run: str, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The prompt and what the newest whole checkpoint of `run` makes of it. Raises RequestError."""
    folder = run_folder(run)
    exp = io.load(folder / "config.yaml")
    path = checkpoint.choose(folder)
    if path is None:
        raise RequestError(f"{folder} has no whole checkpoint yet. Let it train until its first one.")
    coder = open_coder(exp, folder)
    model = Llama(exp.model, exp.parameterization)
    model.ids, model.eot = coder.size, coder.eot if exp.data.pack == "document" else None
    weights = {name: p.detach() for name, p in model.named_parameters()}
    have, given = ({name: p.shape for name, p in of.items()} for of in (weights, checkpoint.load(path).model))
    if have != given:
        raise RequestError(f"{path} does not hold the model of {folder}/config.yaml.")
    checkpoint.fill(path, {f"model/{name}": p for name, p in weights.items()})
    return write(model, coder, prompt, tokens, temperature, seed, exp.train.seq_len)


def write(model: Llama, coder: Coder, prompt: str, tokens: int, temperature: float, seed: int, context: int) -> str:
    """A document that begins with `prompt`, and `tokens` tokens more; the last `context` tokens are seen."""
    begun = coder.encode(prompt)
    generator = torch.Generator().manual_seed(seed)
    with torch.compiler.set_stance("force_eager"):  # every length would be compiled
        ids = sample(model, [coder.eot, *begun], tokens, temperature, generator, context)
    return coder.decode([*begun, *ids])
