"""`abovemup watch`."""

from typing import Annotated

import typer

from abovemup.cli.options import Json, RunDir
from abovemup.cli.output import print_json


def watch(
    run: RunDir,
    source: Annotated[str, typer.Option("--from", metavar="FIT|SOURCE|paper", help="As of predict.")] = "paper",
    json: Json = False,
) -> None:
    """Compare a run's output norm with that of a run at lr*(B, D), at this token count, batch size and horizon.

    Exit code 0: consistent; 1: too high, too low, or it cannot tell; 3: the run diverged.
    """
    from abovemup.analysis.predict import read_fit, stretched
    from abovemup.analysis.runs import find
    from abovemup.analysis.watch import watch as compare
    from abovemup.config.errors import RequestError

    runs = find(run)
    if len(runs) > 1:
        raise RequestError(f"{run} holds {len(runs)} runs: watch one, such as {runs[0]}.")
    answer = compare(runs[0], read_fit(source))
    if json:
        print_json(answer)
    else:
        print(*answer["sentences"], *stretched(answer["beyond"]), sep="\n")
    raise typer.Exit({"consistent": 0, "diverged": 3}.get(answer["verdict"], 1))
