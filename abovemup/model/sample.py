"""Text out of a model, one token at a time."""

import torch
from torch import nn


@torch.no_grad()
def sample(
    model: nn.Module, prompt_ids: list[int], tokens: int, temperature: float, generator: torch.Generator, context: int
) -> list[int]:
    """`tokens` ids that follow a prompt of at least one id; the prompt is not repeated.

    Only the last `context` ids are seen, and only what has a logit is drawn: no row of the head beyond `Llama.ids`.
    Temperature 0 takes the likeliest id. The draw is made on the CPU with `generator`, so that the global
    random state is untouched.
    """
    device = next(model.parameters()).device
    ids = list(prompt_ids)
    for _ in range(tokens):
        logits = model(torch.tensor([ids[-context:]], device=device))[0, -1].double().cpu()
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            probabilities = (logits / temperature).softmax(dim=-1)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return ids[len(prompt_ids) :]
