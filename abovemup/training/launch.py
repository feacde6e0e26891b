"""Several processes of one command, started by torch's elastic launcher."""

import logging
import sys
from tempfile import TemporaryDirectory
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from abovemup.config.errors import RunFailed

LAST_CHECKPOINT = 120  # seconds that the processes have to end after a signal, or after one of them


def launch(nproc: int, arguments: list[str]) -> int:
    """`abovemup ARGUMENTS` in `nproc` processes of this machine; the exit code of the one that ended first.

    4 for one that was killed; 128 + its number for a signal to this process, which passes it on.
    """
    logging.disable()  # what the launcher would say of each signal; this process has nothing else to say
    with TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(logs),
            shutdown_timeout=LAST_CHECKPOINT,
        )
        try:
            elastic_launch(config, sys.executable)("-P", "-m", "abovemup", *arguments)
        except SignalException as end:
            return 128 + int(end.sigval)
        except ChildFailedError as failed:
            rank, first = failed.get_first_failure()
            said = any(failure.exitcode == 4 for failure in failed.failures.values())
            if first.exitcode < 0 and not said:
                raise RunFailed(f"rank {rank} was ended by signal {-first.exitcode}") from None
            return first.exitcode if first.exitcode > 0 else 4
    return 0
