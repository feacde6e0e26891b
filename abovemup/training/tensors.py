"""The tensors of a checkpoint: each rank writes what it holds, and reads what it is to hold, in any layout."""

import errno
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import filesystem, metadata

from abovemup.config.errors import RequestError

# What is in a .metadata, besides dtypes. No BytesStorageMetadata: what one stands for would be unpickled unchecked.
KNOWN = {("torch", "Size"), ("torch.serialization", "_get_layout"), (filesystem.__name__, "_StorageInfo")}
KNOWN |= {(metadata.__name__, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata")}
KNOWN |= {(metadata.__name__, name) for name in ("TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")}

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # where it is not asked for


def write(tensors: dict[str, Tensor], folder: Path, complete: Callable[[], None], group: ProcessGroup | None) -> None:
    """Write into a new `folder`; when all ranks of `group` (None: no other) have, the first one calls `complete`.

    What one of them raises meanwhile, all raise.
    """
    try:
        dcp.save(tensors, storage_writer=Writer(folder, complete), process_group=group, no_dist=group is None)
    except dcp.CheckpointException as told:
        error = next(iter(told.failures.values()))[0]
        if isinstance(error, RuntimeError) and "unexpected pos" in str(error):  # what torch says of a short write
            error = OSError(errno.ENOSPC, "the checkpoint could not be written whole", str(folder))
        raise error from told


def read(tensors: dict[str, Tensor], folder: Path) -> None:
    """Read into `tensors`, of a sharded one what is here. Raises RequestError when the folder does not hold them."""
    try:
        dcp.load(tensors, storage_reader=Reader(folder), no_dist=True)  # each rank on its own
    except (Exception, dcp.CheckpointException) as told:
        reason = str(told).strip().rpartition("\n")[2]
        raise RequestError(f"{folder} cannot be read: {reason}") from told


class Writer(dcp.FileSystemWriter):
    def __init__(self, folder: Path, complete: Callable[[], None]) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # copying ahead, a thread would use the first GPU
        self.complete = complete

    def storage_meta(self) -> None:
        """Nothing: it would be where the folder was, and a random number."""

    def finish(self, metadata: metadata.Metadata, results: Any) -> None:
        super().finish(metadata, results)
        self.complete()


class Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with (folder / ".metadata").open("rb") as file:
            self.metadata = Unpickler(file).load()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self.metadata


class Unpickler(pickle.Unpickler):
    """A pickle can call anything; this one makes what a .metadata is made of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a .metadata")
