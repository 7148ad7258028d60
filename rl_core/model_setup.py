"""From `config.model` to a Hugging Face directory that engine and learner can load.

`tiny` is made once, warmed up (tiny_model.py) and cached by the digest of everything that decides its bytes; `local` is
checked file by file, so that what cannot be loaded is refused before any device is taken; `hf:owner/name` is downloaded
into a local directory first, and `pip:package` stands for one that `headway fetch` has made. No code of a model
directory is ever run. Importable without torch.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import xxhash

from rl_core.config import Config, LocalModel, TinyModel
from rl_core.errors import BrokenFile, ConfigError
from rl_core.hub import fetch, hub_id
from rl_core.lora.plan import Linear
from rl_core.packaged_models import find_packaged, packaged_model
from rl_core.rollout.environments.sort import held_out_rows
from rl_core.run_dir import fsync_dir, put_if_absent, read_json, to_json

RECIPE = 1
"""Raised when the same settings would give other bytes: part of the cache key."""
MANIFEST = "headway-model.json"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
"""Files that decide what text becomes of ids, and the other way round."""
UNLOADABLE = (ValueError, LookupError, OSError, ImportError, TypeError, AttributeError, RecursionError)
"""What transformers raises over files of a model directory that are not what they should be."""
TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
SETTINGS_FILES = ("config.json", "generation_config.json")
HUB_FILES = (*SETTINGS_FILES, "model.safetensors", "model-*.safetensors", INDEX, *TOKENIZER_FILES, *TEMPLATE_FILES)
"""What is downloaded of a model of the hub: no code, no other formats of the same weights."""
BLOCK_WEIGHT = re.compile(r"\.\d+\..*\.weight$")
"""Names of weights inside a numbered block."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which a config.json says how many experts a layer has."""
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")

Progress = Callable[[int, int], None]
"""`progress(done, total)`: steps of the warm-up."""


def _silent(done: int, total: int) -> None:
    """The default progress: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What a model directory says about itself, read without loading a tensor."""

    parameters: int
    context: int
    """Longest sequence, tokens."""
    vocabulary: int
    """Rows of the embedding: ids from 0."""
    eos_token_ids: tuple[int, ...]
    layers: tuple[Linear, ...] = ()
    """Linear layers inside the decoder's blocks, by the names and shapes of the files."""
    experts: int = 0
    """Of a mixture of experts: how many a layer chooses from for each token; 0: a dense model."""


def set_up_model(config: Config, cache_home: Path, progress: Progress = _silent) -> Path:
    """The model directory of a run: made and cached (`tiny`), or fetched, checked and returned (`local`).

    Raises ConfigError naming `model.path` for a directory that cannot be used, DeadlinePassed when the warm-up takes
    longer than `deadlines.model_setup_s`.
    """
    if isinstance(config.model, LocalModel):
        directory = model_directory(config, config.model, cache_home)
        check_model(directory)
        return directory
    return _tiny(config, config.model, cache_home, progress)


def model_directory(config: Config, local: LocalModel, cache_home: Path | None) -> Path:
    """The directory that `model.path` names, not checked; a model of the hub is downloaded to `cache_home`/hub.

    Raises ConfigError where the hub has no such model or cannot be asked, or a packaged one was not fetched yet,
    DeadlinePassed (deadlines.model_setup_s).
    """
    packaged = packaged_model("model.path", local.path)
    if packaged is not None:
        return find_packaged("model.path", packaged, cache_home or Path("models"))
    wanted = hub_id("model.path", local.path)
    if wanted is None:
        return Path(local.path).expanduser()
    cache = None if cache_home is None else cache_home / "hub"
    return fetch("model.path", wanted, kind="model", patterns=HUB_FILES, cache=cache,
                 deadline_s=config.deadlines.model_setup_s)


def is_kept_elsewhere(path: str) -> bool:
    """Whether `model.path` names a model of a hub or an index, which a run that has begun holds its own copy of."""
    return hub_id("model.path", path) is not None or packaged_model("model.path", path) is not None


def _tiny(config: Config, tiny: TinyModel, cache_home: Path, progress: Progress) -> Path:
    settings = tiny_settings(config, tiny)
    key = xxhash.xxh3_128_hexdigest(json.dumps(settings, sort_keys=True).encode())
    final = cache_home / f"tiny-{key[:16]}"
    if _is_whole(final, settings):
        return final
    from rl_core.tiny_model import make_tiny_model  # torch and transformers: only where a model is made

    held_out = {row["prompt"] for row in held_out_rows(config.data.validation_size)}
    aside = cache_home / f".tiny-{key[:16]}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    aside.mkdir(parents=True)
    try:
        make_tiny_model(aside, tiny, settings["seed"], held_out, config.deadlines.model_setup_s, progress)
        put_if_absent(aside / MANIFEST, to_json({"settings": settings, "digests": model_digests(aside)}))
        _install(aside, final, settings)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def tiny_settings(config: Config, tiny: TinyModel) -> dict[str, Any]:
    """All that decides the bytes of the tiny model; the digest of this is its name in the cache."""
    seed = config.seed if tiny.seed is None else tiny.seed
    return {"recipe": RECIPE, **tiny.model_dump(mode="json"), "seed": seed, "held_out": config.data.validation_size}


def _install(aside: Path, final: Path, settings: dict[str, Any]) -> None:
    """Rename into place. Whoever comes second takes what the first one made; what is there and damaged is replaced."""
    try:
        os.rename(aside, final)
    except OSError:
        if _is_whole(final, settings):
            return
        os.rename(final, aside.with_suffix(".damaged"))
        shutil.rmtree(aside.with_suffix(".damaged"))
        os.rename(aside, final)
    fsync_dir(final.parent)


def _is_whole(directory: Path, settings: dict[str, Any]) -> bool:
    """The manifest, written last, is there and its digests match the files."""
    try:
        manifest = read_json(directory / MANIFEST)
    except (FileNotFoundError, BrokenFile):
        return False
    return manifest.get("settings") == settings and manifest.get("digests") == model_digests(directory)


def model_digests(directory: Path) -> dict[str, str]:
    """xxh3_128 of the model's files (`model`), of the tokenizer's (`tokenizer`), and of the template (`chat_template`).

    `model` covers config.json, generation_config.json and every safetensors file, by name.
    """
    files = [*(directory / name for name in SETTINGS_FILES), *sorted(directory.glob("*.safetensors"))]
    tokenizer = [directory / name for name in TOKENIZER_FILES]
    return {"model": _files_digest(files), "tokenizer": _files_digest(tokenizer),
            "chat_template": xxhash.xxh3_128_hexdigest(chat_template(directory).encode())}


def _files_digest(paths: list[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in paths:
        if path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()


def loaded_files(directory: Path) -> list[Path]:
    """Files of a model directory that engine, learner and tokenizer are loaded from, relative to it.

    Whatever else lies there (other formats of the same weights, optimizer states, a repository) is left out. Raises
    ConfigError naming `model.path` where the index of the weights cannot be read.
    """
    names = [*SETTINGS_FILES, INDEX, *weight_files(directory), *TOKENIZER_FILES]
    found = [Path(name) for name in names if (directory / name).is_file()]
    return found + sorted(path.relative_to(directory) for pattern in TEMPLATE_FILES for path in directory.glob(pattern))


def loaded_bytes(directory: Path) -> int:
    """Bytes of `loaded_files`: what `copy_model` writes."""
    return sum((directory / name).stat().st_size for name in loaded_files(directory))


def copy_model(source: Path, target: Path) -> None:
    """Copy `loaded_files` to `target`, beside it first and durably; a target that is there stands. For one writer."""
    if target.exists():
        return
    aside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    for name in loaded_files(source):
        copy = aside / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
        fsync_dir(copy.parent)
    os.rename(aside, target)
    fsync_dir(target.parent)


def chat_template(directory: Path) -> str:
    """Text of the chat template; empty where the directory has none."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    settings = directory / "tokenizer_config.json"
    return str(json.loads(settings.read_text()).get("chat_template") or "") if settings.is_file() else ""


# -- checking a directory


def check_model(directory: Path, *, classifier: bool = False) -> ModelFacts:
    """Facts of a Hugging Face causal LM directory, or with `classifier` also of a sequence classifier's. Raises
    ConfigError naming `model.path` and what is wrong."""
    if not directory.is_dir():
        _refuse(directory, "is not a directory; give one written by save_pretrained")
    settings = _json_object(directory, "config.json")
    shapes = tensor_shapes(directory)
    _check_architecture(directory, settings, classifier=classifier)
    text: dict[str, Any] = settings.get("text_config") or settings
    facts = ModelFacts(parameters=sum(_count(shape) for shape in shapes.values()),
                       context=int(text.get("max_position_embeddings") or text.get("n_positions") or 0),
                       vocabulary=int(text.get("vocab_size") or 0), eos_token_ids=eos_token_ids(directory),
                       layers=tuple(Linear(name.removesuffix(".weight"), *shape) for name, shape in shapes.items()
                                    if len(shape) == 2 and BLOCK_WEIGHT.search(name)),
                       experts=_experts(text))
    if not facts.context or not facts.vocabulary:
        _refuse(directory, "has a config.json without max_position_embeddings or without vocab_size")
    _check_tokenizer(directory, facts)
    for name, shape in shapes.items():
        if name.endswith(("embed_tokens.weight", "wte.weight")) and shape[0] != facts.vocabulary:
            _refuse(directory, f"holds {shape[0]} rows of {name} where config.json says vocab_size {facts.vocabulary}: "
                    "weights and config are of two models")
    return facts


def _experts(text: Mapping[str, Any]) -> int:
    most = max((count for name in EXPERTS if isinstance(count := text.get(name), int)), default=0)
    return most if most > 1 else 0


def _refuse(directory: Path, why: str) -> NoReturn:
    raise ConfigError(f"model.path: {str(directory)!r} {why}")


def _json_object(directory: Path, name: str) -> dict[str, Any]:
    try:
        payload = json.loads((directory / name).read_text())
    except FileNotFoundError:
        _refuse(directory, f"has no {name}; give a directory written by save_pretrained")
    except ValueError as error:
        _refuse(directory, f"has a {name} that is not JSON ({error})")
    except OSError as error:
        _refuse(directory, f"has a {name} that cannot be read ({error.strerror})")
    if not isinstance(payload, dict):
        _refuse(directory, f"has a {name} that is no JSON object")
    return cast(dict[str, Any], payload)


def _check_architecture(directory: Path, settings: dict[str, Any], *, classifier: bool) -> None:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    named: Any = settings.get("architectures") or []
    names = [named] if isinstance(named, str) else cast(list[str], named)
    endings = ("ForCausalLM", "LMHeadModel", *(("ForSequenceClassification",) if classifier else ()))
    if names and not any(name.endswith(endings) for name in names):
        _refuse(directory, f"holds {', '.join(names)}, not a causal language model")
    try:
        cast(Any, AutoConfig).from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (*UNLOADABLE, StrictDataclassError) as error:
        why = "cannot be loaded without running its own code, which Headway never does" if "auto_map" in settings else \
            "has a config.json that transformers cannot use"
        _refuse(directory, f"{why} ({' '.join(str(error).split())})")


def _check_tokenizer(directory: Path, facts: ModelFacts) -> None:
    from transformers import AutoTokenizer

    if not any((directory / name).is_file() for name in VOCABULARY_FILES):
        _refuse(directory, f"has no tokenizer (none of {', '.join(VOCABULARY_FILES)}); save one beside the model")
    try:
        tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(directory, local_files_only=True,
                                                                   trust_remote_code=False)
    except UNLOADABLE as error:
        _refuse(directory, f"has a tokenizer that cannot be loaded ({error})")
    largest = max(cast(dict[str, int], tokenizer.get_vocab()).values())
    if largest >= facts.vocabulary:
        _refuse(directory, f"has a tokenizer with id {largest}, outside the model's vocabulary of {facts.vocabulary}")


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Every id that ends an answer: of generation_config.json, else of config.json; empty if neither names one."""
    for name in ("generation_config.json", "config.json"):
        value = _json_object(directory, name).get("eos_token_id") if (directory / name).is_file() else None
        if value is None:
            continue
        ids = cast(list[Any], value if isinstance(value, list) else [value])
        if not all(isinstance(token, int) for token in ids):
            _refuse(directory, f"has a {name} whose eos_token_id is {value!r}; it is a token id, or a list of them")
        return tuple(cast(list[int], ids))
    return ()


# -- safetensors headers


def weight_files(directory: Path) -> list[str]:
    """Names of the safetensors files that the weights are loaded from. Raises ConfigError for a broken index."""
    if not (directory / INDEX).is_file():
        return ["model.safetensors"]
    weight_map = _json_object(directory, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _refuse(directory, f"has a {INDEX} without a weight_map")
    names = sorted({str(name) for name in cast(dict[str, Any], weight_map).values()})
    for name in names:
        if Path(name).name != name:
            _refuse(directory, f"has a {INDEX} that names {name!r}; weights lie beside their index")
    return names


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name, from the headers alone. Raises ConfigError for missing, cut or foreign files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in weight_files(directory):
        if not (directory / name).is_file():
            _refuse(directory, f"has no {name}; weights must be safetensors (pickled weights are not loaded)")
        shapes |= _header(directory, name)
    return shapes


def _header(directory: Path, name: str) -> dict[str, tuple[int, ...]]:
    """Header of one safetensors file: 8 bytes of length, JSON, then the tensors' bytes."""
    path = directory / name
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        raw = file.read(length) if length <= path.stat().st_size else b""
    try:
        entries: dict[str, Any] = json.loads(raw)
        tensors = {key: entry for key, entry in entries.items() if key != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        _refuse(directory, f"has a {name} that is no safetensors file")
    if path.stat().st_size != 8 + length + end:
        _refuse(directory, f"has a {name} of {path.stat().st_size} bytes where its header promises {8 + length + end}: "
                "an incomplete copy")
    return {key: tuple(entry["shape"]) for key, entry in tensors.items()}


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
