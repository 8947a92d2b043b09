"""TransferQueue by its key-value interface: rows in the memory of Ray actors. Nothing is ever on a disk.

A rollout is a row of jagged tensors with its transcript as plain objects; what SQL would ask about rides in its tag.
A process beside the one that began it joins the same Ray instance, whose address lies in a file of the folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

os.environ["RAY_AUTH_MODE"] = "token"  # read when Ray is imported
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import torch
import transfer_queue
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

from benchmarks.store.peers import PAYLOAD, Padded, Unsupported, flat

PARTITION = "train"
_TAGS = ("model_version", "stop_reason", "prompt_length", "task_id", "group_id")


class TransferQueuePeer:
    """The default backend, SimpleStorage, with its two storage actors."""

    def __init__(self, folder: Path) -> None:
        address, token = folder / "address", folder / "token"
        self._owner = not address.exists()
        # A token of this folder alone: one that Ray makes in the home folder is not found by the next process.
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        if self._owner:
            token.write_text(secrets.token_hex(32), encoding="utf-8")
            # With fewer processors declared than it has actors it waits for ever and says nothing. The path of a
            # socket may have 107 bytes, which a folder of a test easily exceeds.
            self._scratch = tempfile.mkdtemp(prefix="ray-")
            context = ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=self._scratch)
            address.write_text(context.address_info["address"], encoding="utf-8")
        else:
            ray.init(address.read_text(encoding="utf-8"), log_to_driver=False)
        transfer_queue.init()

    def prepare(self, rows: pa.Table) -> tuple[list[str], TensorDict, list[dict[str, Any]]]:
        """Keys, tensors and tags."""
        count = rows.num_rows
        fields: dict[str, Any] = {}
        for name in PAYLOAD:
            values, starts = flat(rows.column(name))
            tensor = torch.from_numpy(np.array(values))
            fields[name] = torch.nested.nested_tensor_from_jagged(tensor, torch.from_numpy(starts.astype(np.int64)))
        fields["messages"] = NonTensorStack(*rows.column("messages").to_pylist())
        tags = rows.select(_TAGS).to_pylist()
        return rows.column("experience_id").to_pylist(), TensorDict(fields, batch_size=count), tags

    objects = prepare

    def append(self, prepared: tuple[list[str], TensorDict, list[dict[str, Any]]]) -> None:
        """One put."""
        keys, fields, tags = prepared
        transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields, tags=tags)

    append_objects = append

    def score(self, scores: pa.Table) -> None:
        """One more field of the rows; a repeat overwrites it."""
        values = TensorDict({"judge": torch.tensor(scores.column("value").to_numpy())}, batch_size=scores.num_rows)
        keys = scores.column("experience_id").to_pylist()
        transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=values)

    reward = score

    def batch(self, ids: list[str]) -> Padded:
        """One get, padded by torch."""
        found = transfer_queue.kv_batch_get(ids, PARTITION, select_fields=list(PAYLOAD))
        return {name: torch.nested.to_padded_tensor(found[name], 0).numpy() for name in PAYLOAD}

    def group_by(self) -> list[tuple[object, ...]]:
        """Not there."""
        raise Unsupported("no SQL")

    def count(self) -> int:
        """Length of its list of keys."""
        return len(self.ids())

    def ids(self) -> list[str]:
        """Its list of keys."""
        return list(transfer_queue.kv_list(PARTITION).get(PARTITION, {}))

    def keep(self, ids: list[str]) -> None:
        """It trains on whatever it has."""

    def take(self, rows: int, number: int, who: str) -> list[str]:
        """Which rows come next for the task `train`, by its controller; without their payload."""
        client = transfer_queue.get_client()
        found = client.get_meta([PAYLOAD[0]], rows, PARTITION, mode="fetch", task_name="train")
        return [str(one) for one in found.global_indexes]

    def compact(self) -> None:
        """Not there."""
        raise Unsupported("no such operation")

    def close(self) -> None:
        """End the actors where they were begun here."""
        if self._owner:
            transfer_queue.close()
        ray.shutdown()
        if self._owner:
            shutil.rmtree(self._scratch, ignore_errors=True)
