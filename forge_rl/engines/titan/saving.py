"""Writes training state and Hugging Face exports in a thread, from copies in host memory, while training continues."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from forge_rl.engines.platform import device_threads
from forge_rl.engines.titan.adapter_export import AdapterExport
from forge_rl.engines.titan.blocks import Block, SavePlanner, copied, training_state
from forge_rl.engines.titan.export import Export
from forge_rl.engines.titan.host_memory import HostCopy
from forge_rl.engines.titan.index import TensorWriter
from forge_rl.engines.titan.loading import cause_of
from forge_rl.engines.titan.shards import names_of
from forge_rl.errors import CheckpointError
from forge_rl.runtime.far_files import Folder
from forge_rl.weights.names import VALUE_HEAD, Names, SameNames


class CheckpointWriter:
    """Saves an engine's state; all ranks make the same calls in the same order.

        saved = saver.save(model, optimizer, {"updates": 3}, folder, source=source, dtype=torch.bfloat16)
        ...  # the model may change
        saved.result()

    Until they are written, host memory holds a copy of this rank's shards, 12 bytes per parameter, and a second copy of
    the tensors being written, up to four.
    """

    def __init__(self) -> None:
        self._thread = device_threads("save", 1)
        self._group: dist.ProcessGroup | None = None
        self._last: Future[None] | None = None

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        counts: Mapping[str, int],
        folder: Folder,
        *,
        source: Path,
        dtype: torch.dtype,
    ) -> Future[None]:
        """Copy the state, and start writing `folder/training` and `folder/model`, which exist and are empty.

        Waits for an earlier save first. Any number of ranks, in any layout, can read the result. Frozen weights are
        written without optimizer state. If the model has adapters, only these are written, to `folder/model` in PEFT's
        format.

        Args:
            counts: counts to save with the state, by name.
            source: Hugging Face folder that config and tokenizer are copied from.
            dtype: dtype of the export; the training state is in float32.

        Returns:
            A future, done once all ranks have written; raises CheckpointError if one failed.
        """
        # At most one copy of the state is in host memory.
        if self._last is not None:
            wait_for([self._last])
        if self._group is None:
            self._group = dist.new_group(backend="gloo")  # its own, as training uses the default one meanwhile
        state = copied(training_state(model, optimizer, counts))
        # The copies are asynchronous: training must not change weights that are still being copied.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        names = names_of(model)
        adapters = None if getattr(model, "adapters", None) is None else AdapterExport.of(model)
        self._last = self._thread.submit(self._write, state, folder, source, dtype, names, adapters)
        return self._last

    def _write(
        self,
        state: dict[str, Block],
        folder: Folder,
        source: Path,
        dtype: torch.dtype,
        names: Names | SameNames,
        adapters: AdapterExport | None,
    ) -> None:
        training, copies = folder / "training", dict[str, HostCopy]()

        def write_state() -> None:
            dcp.save(state, storage_writer=TensorWriter(training), planner=SavePlanner(), process_group=self._group)
            if dist.get_world_size() == 1:  # of several ranks, each has a part of every weight
                copies.update(
                    {name: cast(HostCopy, block.values) for name, block in state.items() if name.startswith("model.")}
                )
            # Drop the moments' copies early: the export needs the weights alone.
            state.clear()

        def export() -> None:
            if adapters is not None:
                if dist.get_rank() == 0:
                    adapters.write(training, source, folder / "model")
                return
            exporter = Export(training, source, dtype, names.parts, valued=names.head == VALUE_HEAD, copies=copies)
            exporter.write(folder / "model", rank=dist.get_rank(), ranks=dist.get_world_size())

        hint = "free space, or choose another --out"
        self._on_all_ranks("the training state", training, write_state, hint)
        hint += f"; put the run's model back to {source} if it has moved"
        self._on_all_ranks("the model", folder / "model", export, hint)

    def _on_all_ranks(self, subject: str, folder: Folder, work: Callable[[], None], hint: str) -> None:
        """Call a function on all ranks; a failure on one raises on all."""
        failed = ""
        try:
            work()
        except (Exception, CheckpointException) as error:
            failed = cause_of(error)
            if isinstance(folder, Path):
                with contextlib.suppress(OSError):
                    failed += f" ({shutil.disk_usage(folder).free / 1e9:.2f} GB are free there)"
        # Even a failing rank must join this collective, or the others would wait for it.
        causes = [failed] * dist.get_world_size()
        dist.all_gather_object(causes, failed, group=self._group)
        if failed := next(filter(None, causes), ""):
            raise CheckpointError(
                f"{subject} in {folder} cannot be written: {failed}",
                hint=f"{hint}; earlier checkpoints are as they were",
            )
