"""`abovemup generate`."""

from typing import Annotated

import typer

from abovemup.cli.options import RunDir


def generate(
    run: RunDir,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What the text starts with.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="How many tokens to add.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0, help="0 takes the likeliest token.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
) -> None:
    """Continue a text with a trained run's newest checkpoint."""
    from abovemup.config.errors import RequestError
    from abovemup.training.generate import generate as text

    if not (temperature == 0 or temperature >= 1e-3):
        raise RequestError(f"--temperature {temperature:g}: use 0 for the likeliest token, or at least 0.001.")
    print(text(run, prompt, tokens, temperature, seed))
