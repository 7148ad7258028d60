"""A million prompts: seconds until a start has them, and what they add to memory.

One Parquet file of 10^6 rows in verl's shape (a chat of one message of 200 bytes, `reward_model`, `extra_info`), a
byte-level BPE tokenizer with a chat template as Qwen's. A fresh process does what a start does with prompts before
anything is started: read, check, find those over the limit, digest, duplicates, and lease the first. Nothing of it is
cached, so every start takes this long; `cold` means that the file is not in the page cache either (the file system is
asked to drop it). Tokens of all rows are not counted at the start (docs/data.md section 5): what that would take is
measured on a part of them and printed beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS = 1_000_000
VOCABULARY = 4096
TOKENIZED = 20_000
"""Rows whose tokens are all counted, for the comparison."""
LIMIT = 512
LEASES = 1000
TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
            "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
NAMES = ("Natalia", "Weng", "Betty", "Julie", "James", "Albert", "Ken", "Alexis", "Tobias", "Randy")
THINGS = ("apples", "clips", "stamps", "marbles", "tickets", "cookies", "pencils", "books", "eggs", "flowers")


def figures() -> Iterator[dict[str, Any]]:
    from tests.benchmarks.measure import figure

    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        directory = Path(name)
        write_parquet(directory / "prompts.parquet", ROWS)
        write_tokenizer(directory / "model")
        megabytes = (directory / "prompts.parquet").stat().st_size / 1e6
        runs: dict[str, dict[str, Any]] = {}
        for state in ("cold", "warm"):
            if state == "cold":
                drop_from_page_cache(directory / "prompts.parquet")
            done = subprocess.run([sys.executable, __file__, str(directory)], capture_output=True, text=True,
                                  timeout=600, check=False, env={**os.environ, "TMPDIR": name})
            assert done.returncode == 0, done.stderr[-2000:]
            runs[state] = json.loads(done.stdout.splitlines()[-1])
        for state, found in runs.items():
            yield figure(f"prompts/start_1e6_rows/{state}", found["start_s"], "s", "<= 10", rows=ROWS,
                         file_mb=round(megabytes), imports_and_tokenizer_s=round(found["imports_s"], 1))
        worst = max(runs.values(), key=lambda found: found["peak_mb"])
        yield figure("prompts/memory_1e6_rows", worst["peak_mb"], "MB", "<= 500",
                     anonymous=round(worst["anonymous_mb"]), mapped_file=round(worst["mapped_mb"]))
        yield figure("prompts/lease", 1e6 * runs["warm"]["lease_s"], "us", tokens=round(runs["warm"]["tokens"], 1))
        yield figure("prompts/tokenize_1e6_rows", runs["warm"]["tokenize_s"] * ROWS / TOKENIZED, "s",
                     measured_on=TOKENIZED, note="not part of a start of more than 20000 rows")


def drop_from_page_cache(path: Path) -> None:
    """Ask for it; what is dirty is written first."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# -- what is measured, in a process of its own


def measure(directory: Path) -> dict[str, Any]:
    """Figures of one start."""
    begun = time.perf_counter()
    from rl_core.config import Config
    from rl_core.rollout.data_warnings import warnings_of
    from rl_core.rollout.prompts import PromptSource, load_tokenizer

    settings = {"data": {"train": str(directory / "prompts.parquet"), "validation": None, "max_prompt_tokens": LIMIT}}
    config = Config.model_validate(settings)
    tokenizer = load_tokenizer(directory / "model")
    tokenizer(["warm"], add_special_tokens=False)
    imports_s = time.perf_counter() - begun
    before = resident()
    begun = time.perf_counter()
    source = PromptSource(config, tokenizer, vocab_size=VOCABULARY)
    warnings = warnings_of(source, source.held_out)
    digest = source.digest
    source.at(0, 0)
    start_s = time.perf_counter() - begun
    after = resident()
    assert len(source) == ROWS and digest and not warnings and not source.exact.all()
    begun = time.perf_counter()
    tokens = [len(source.at(0, position).token_ids_P) for position in range(LEASES)]
    lease_s = (time.perf_counter() - begun) / LEASES
    few = Config.model_validate({"data": {**settings["data"], "max_samples": TOKENIZED}})
    begun = time.perf_counter()
    assert PromptSource(few, tokenizer, vocab_size=VOCABULARY).exact.all()
    tokenize_s = time.perf_counter() - begun
    return {"start_s": start_s, "imports_s": imports_s, "peak_mb": after["VmHWM"] - before["VmRSS"], "lease_s": lease_s,
            "anonymous_mb": after["RssAnon"] - before["RssAnon"], "mapped_mb": after["RssFile"] - before["RssFile"],
            "tokens": sum(tokens) / LEASES, "tokenize_s": tokenize_s}


def resident() -> dict[str, float]:
    """Megabytes of this process: VmRSS, its peak VmHWM, and the parts RssAnon and RssFile."""
    pairs = (line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    wanted = ("VmRSS", "VmHWM", "RssAnon", "RssFile")
    return {name: int(value.split()[0]) * 1024 / 1e6 for name, value in pairs if name in wanted}


# -- what it is measured on


def write_parquet(path: Path, rows: int) -> None:
    """Word problems of 200 bytes, no two alike."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    draws = np.random.default_rng(1)
    stems = pa.array([
        f"{name} bought {a} {thing} in the morning, gave a third of them to a neighbour, and found {b} more under the "
        "old bridge on the way home. " for name in NAMES for thing in THINGS for a, b in ((12, 7), (48, 5), (330, 21))])
    with pq.ParquetWriter(path, _schema(), compression="snappy") as writer:
        for start in range(0, rows, 100_000):
            count = min(100_000, rows - start)
            numbers = pa.array(np.arange(start, start + count))
            text = numbers.cast(pa.string())
            content = pc.binary_join_element_wise(
                stems.take(pa.array(draws.integers(0, len(stems), count))), "On day ", text,
                " the others were counted again. How many are there in all?", "")
            roles = pa.array(["user"] * count)
            messages = pa.StructArray.from_arrays([roles, content], names=["role", "content"])
            chats = pa.ListArray.from_arrays(pa.array(np.arange(count + 1), pa.int32()), messages)
            truth = pa.StructArray.from_arrays([pa.array(["rule"] * count), text], names=["style", "ground_truth"])
            extra = pa.StructArray.from_arrays([numbers, pa.array(["train"] * count)], names=["index", "split"])
            writer.write_table(pa.table({"data_source": pa.array(["word/problems"] * count), "prompt": chats,
                                         "reward_model": truth, "extra_info": extra}, schema=_schema()))


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([("data_source", pa.string()),
                      ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
                      ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
                      ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string())]))])


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer trained on such problems, with the files that AutoTokenizer reads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    texts = [f"{name} bought {i} {thing} in the morning, gave a third of them to a neighbour, and found {7 * i} more "
             "under the old bridge on the way home. On day the others were counted again. How many are there in all?"
             for name in NAMES for thing in THINGS for i in range(0, 1000, 50)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.stdout.write(json.dumps(measure(Path(sys.argv[1]))) + "\n")
