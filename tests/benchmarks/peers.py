"""The in-memory queues that the store is measured against, in a process of their own.

    python tests/benchmarks/peers.py verl-padded 128      -> {"put": groups/s, "get": groups/s, "bytes": per group}
    python tests/benchmarks/peers.py verl-jagged 128
    python tests/benchmarks/peers.py transfer-queue 128

*verl-padded, verl-jagged*: the mechanism of verl's fully asynchronous MessageQueue, written again from its description:
one Ray async actor around a deque; the rollout side cloudpickles every group and puts it; the training side awaits one
sample at a time, loads each, and concatenates. Padded: a TensorDict of int64 ids, masks and positions, padded to the
longest prompt and response. Jagged: nothing padded. Neither says which version sampled which token, as our runs do.

*transfer-queue*: TransferQueue 0.1.11 with its SimpleStorage, by its own key-value interface, 16 groups a put, fetched
in one batch of all of them. One row per answer, as its users have it; beside it one row per group, whose answers lie
behind one another, which is faster but no batch of samples.

Padding and building of TensorDicts before a put are not counted against the peers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TRANSFER_QUEUE = "TransferQueue==0.1.11"
PACKAGES = ROOT / "build" / "peers"
"""Where store.py installs TransferQueue, apart from the environment of the project."""
MAX_PROMPT, MAX_RESPONSE = 200, 8000
PER_PUT = 16


def start_ray() -> Any:
    """A Ray of this process alone."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        os.environ.pop(name, None)
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False,
             object_store_memory=2 * 2**30)
    return ray


class MessageQueue:
    """What the Ray actor runs."""

    def __init__(self, maxlen: int) -> None:
        self._queue: deque[bytes] = deque(maxlen=maxlen)
        self._changed = asyncio.Condition()

    async def put_sample(self, sample: bytes) -> bool:
        async with self._changed:
            self._queue.append(sample)
            self._changed.notify_all()
        return True

    async def get_sample(self) -> bytes:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._queue) > 0)
            return self._queue.popleft()


def padded(group: Any) -> Any:
    """One group as verl carries it: left-padded prompts, right-padded responses, int64."""
    import torch
    from tensordict import TensorDict

    n, prompt_L = len(group.trajectories), group.lease.prompt.token_ids_P
    prompts = np.zeros((n, MAX_PROMPT), np.int64)
    prompts[:, MAX_PROMPT - prompt_L.size:] = prompt_L
    responses, mask = np.zeros((n, MAX_RESPONSE), np.int64), np.zeros((n, MAX_RESPONSE), np.int64)
    logprobs, scores = np.zeros((n, MAX_RESPONSE), np.float32), np.zeros((n, MAX_RESPONSE), np.float32)
    for j, t in enumerate(group.trajectories):
        length = t.token_ids_L.size
        responses[j, :length], mask[j, :length] = t.token_ids_L, t.loss_mask_L
        logprobs[j, :length], scores[j, length - 1] = t.behavior_logprobs_L, t.score.reward
    attention = np.concatenate([(np.arange(MAX_PROMPT) >= MAX_PROMPT - prompt_L.size)[None].repeat(n, 0), mask], 1)
    columns = {"prompts": prompts, "responses": responses, "input_ids": np.concatenate([prompts, responses], 1),
               "attention_mask": attention, "position_ids": attention.cumsum(1).clip(1) - 1, "response_mask": mask,
               "rollout_log_probs": logprobs, "rm_scores": scores}
    return TensorDict({name: torch.from_numpy(value) for name, value in columns.items()}, batch_size=[n])


def flat(group: Any) -> dict[str, np.ndarray]:
    """The facts of a group as flat arrays and offsets."""
    answers = group.trajectories
    lengths = np.array([t.token_ids_L.size for t in answers])
    return {"offsets": np.concatenate([[0], np.cumsum(lengths)]),
            "ids": np.concatenate([t.token_ids_L for t in answers]),
            "logprobs": np.concatenate([t.behavior_logprobs_L for t in answers]),
            "mask": np.concatenate([t.loss_mask_L for t in answers]),
            "version": np.array([t.version_runs.version_R[0] for t in answers]),
            "prompt": group.lease.prompt.token_ids_P, "reward": np.array([t.score.reward for t in answers], np.float32)}


def jagged(group: Any) -> Any:
    """One group as jagged tensors: nothing is padded."""
    import torch
    from tensordict import TensorDict

    facts = flat(group)
    offsets = torch.from_numpy(facts["offsets"])
    columns = {name: torch.nested.nested_tensor_from_jagged(torch.from_numpy(facts[name]), offsets)
               for name in ("ids", "logprobs", "mask")}
    prompt = torch.from_numpy(facts["prompt"])[None].repeat(len(group.trajectories), 1)
    return TensorDict({**columns, "reward": torch.from_numpy(facts["reward"]),
                       "version": torch.from_numpy(facts["version"]),
                       "prompt": torch.nested.as_nested_tensor(list(prompt), layout=torch.jagged)},
                      batch_size=[len(group.trajectories)])


def build_padded(samples: Sequence[Any]) -> Any:
    import torch

    return torch.cat(list(samples))


def build_jagged(samples: Sequence[Any]) -> Any:
    """One batch of flat columns and offsets: jagged tensors cannot be concatenated as they are."""
    import torch

    columns = {name: torch.cat([sample[name].values() for sample in samples])
               for name in ("ids", "logprobs", "mask", "prompt")}
    for name in ("ids", "prompt"):
        columns[f"{name}_lengths"] = torch.cat([sample[name].offsets().diff() for sample in samples])
    return columns | {name: torch.cat([sample[name] for sample in samples]) for name in ("reward", "version")}


def verl_queue(groups: Sequence[Any], make: Any, build: Any, rounds: int) -> dict[str, float]:
    """Groups/s, median of rounds: pickle and put every group; then take one by one, load and concatenate.

    One thread builds the batch, as on our side.
    """
    import torch

    torch.set_num_threads(1)
    ray = start_ray()
    queue = ray.remote(MessageQueue).remote(len(groups))
    samples = [make(group) for group in groups]
    put, get, size = [], [], 0
    for _ in range(rounds):
        start, size = time.perf_counter(), 0
        for sample in samples:
            data = ray.cloudpickle.dumps(sample)
            size += len(data)
            ray.get(queue.put_sample.remote(data))
        put.append(time.perf_counter() - start)
        start = time.perf_counter()
        batch = build([ray.cloudpickle.loads(ray.get(queue.get_sample.remote())) for _ in samples])
        get.append(time.perf_counter() - start)
        assert len(batch)
    ray.shutdown()
    return {"put": len(groups) / float(np.median(put)), "get": len(groups) / float(np.median(get)),
            "bytes": size / len(groups)}


def rows_by_answer(groups: Sequence[Any], first: int) -> tuple[list[str], Any]:
    """(keys, TensorDict) with one row per answer."""
    import torch
    from tensordict import TensorDict

    answers = [t for group in groups for t in group.trajectories]
    lists: dict[str, list[Any]] = {
        "ids": [t.token_ids_L for t in answers], "logprobs": [t.behavior_logprobs_L for t in answers],
        "mask": [t.loss_mask_L for t in answers],
        "prompt": [group.lease.prompt.token_ids_P for group in groups for _ in group.trajectories]}
    columns = {name: torch.nested.as_nested_tensor([torch.from_numpy(a) for a in arrays], layout=torch.jagged)
               for name, arrays in lists.items()}
    scalars = {"reward": torch.tensor([t.score.reward for t in answers]),
               "version": torch.tensor([int(t.version_runs.version_R[0]) for t in answers])}
    keys = [f"{first + g}-{j}" for g, group in enumerate(groups) for j in range(len(group.trajectories))]
    return keys, TensorDict({**columns, **scalars}, batch_size=[len(answers)])


def rows_by_group(groups: Sequence[Any], first: int) -> tuple[list[str], Any]:
    """(keys, TensorDict) with one row per group: the tokens of its answers behind one another, and their ends."""
    import torch
    from tensordict import TensorDict

    facts = [flat(group) for group in groups]
    columns = {name: torch.nested.as_nested_tensor([torch.from_numpy(f[name]) for f in facts], layout=torch.jagged)
               for name in facts[0]}
    return [str(first + g) for g in range(len(groups))], TensorDict(columns, batch_size=[len(groups)])


def transfer_queue(groups: Sequence[Any], rounds: int) -> dict[str, float]:
    """Groups/s with one row per answer (`put`, `get`) and with one row per group (`put_by_group`, `get_by_group`)."""
    sys.path.append(str(PACKAGES))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")])
    ray = start_ray()
    import transfer_queue as tq

    tq.init()
    result: dict[str, float] = {}
    for suffix, make in (("", rows_by_answer), ("_by_group", rows_by_group)):
        puts = [make(groups[i:i + PER_PUT], i) for i in range(0, len(groups), PER_PUT)]
        put, get = [], []
        for r in range(rounds):
            partition = f"{make.__name__}-{r}"
            start = time.perf_counter()
            for keys, fields in puts:
                tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields)
            put.append(time.perf_counter() - start)
            every = [key for keys, _ in puts for key in keys]
            start = time.perf_counter()
            batch = tq.kv_batch_get(keys=every, partition_id=partition)
            get.append(time.perf_counter() - start)
            assert batch.batch_size[0] == len(every)
            tq.kv_clear(keys=every, partition_id=partition)
        result[f"put{suffix}"] = len(groups) / float(np.median(put))
        result[f"get{suffix}"] = len(groups) / float(np.median(get))
    tq.close()
    ray.shutdown()
    return result


def main(peer: str, count: int) -> None:
    """Measure one peer and print its figures as the last line."""
    sys.path.insert(0, str(ROOT))
    from tests.builders import long_groups

    groups = long_groups(count)
    if peer == "verl-padded":
        result = verl_queue(groups, padded, build_padded, rounds=3)
    elif peer == "verl-jagged":
        result = verl_queue(groups, jagged, build_jagged, rounds=3)
    else:
        result = transfer_queue(groups, rounds=3)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
