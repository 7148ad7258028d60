"""The directories of the models beside the policy: checked before anything starts, copied into the run, found again.

Importable without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rl_core.config import Config, LearnerConfig
from rl_core.errors import ConfigError, refuse
from rl_core.model_setup import ModelFacts, check_model, copy_model, loaded_bytes, model_digests
from rl_core.roles.plan import ROLES, Role, asked_roles, is_base, role_paths
from rl_core.run_dir import RunDir


def role_directories(run: RunDir, config: Config) -> dict[str, Path]:
    """Where the run has what each role is loaded from: a copy of the directory it was given, or the initial model."""
    given = role_paths(config.learner)
    return {role: run.role(role) if role in given else run.model for role in ROLES}


def place_roles(run: RunDir, config: Config) -> dict[str, str]:
    """Copy the directories of the roles into the run where they are not yet; returns their digests by role.

    Idempotent. For the owner, who holds the lock.
    """
    digests: dict[str, str] = {}
    for role, path in role_paths(config.learner).items():
        run.roles.mkdir(parents=True, exist_ok=True)
        copy_model(Path(path).expanduser(), run.role(role))
        digests[role] = model_digests(run.role(role))["model"]
    return digests


def check_role_models(config: Config, model: ModelFacts, tokenizer: Any) -> dict[Role, ModelFacts]:
    """Facts of the directories that roles were given, by role.

    `model`, `tokenizer`: of the policy. Raises ConfigError naming the role's `path` for a directory that cannot be
    used, and for another vocabulary.
    """
    found: dict[Role, ModelFacts] = {}
    for role, path in role_paths(config.learner).items():
        field, directory = f"learner.{role}.path", Path(path).expanduser()
        facts = _checked(field, directory, role)
        check_vocabulary(field, path, facts, model, tokenizer)
        found[role] = facts
    return found


def check_role_contexts(config: Config, found: Mapping[Role, ModelFacts], *, longest: int) -> None:
    """Raises ConfigError for a role that cannot read `longest` tokens, the longest prompt with its answer."""
    for role, path in role_paths(config.learner).items():
        if longest > found[role].context:
            refuse(f"learner.{role}.path", path, f"takes {found[role].context} tokens, and the longest prompt with its "
                   f"answer has {longest}; use fewer sampling.max_new_tokens, or a model of a longer context")


def role_bytes(config: Config, found: dict[Role, ModelFacts], model_bytes: int) -> dict[str, int]:
    """Bytes of the float32 parameters of every role that the settings ask for, and that is a model of its own."""
    shared = {"reference"} if is_base(config.learner) else set[str]()
    return {role: 4 * found[role].parameters if role in found else model_bytes
            for role in ROLES if role in asked_roles(config.learner) and role not in shared}


def copied_role_bytes(learner: LearnerConfig) -> int:
    """Bytes that the run keeps of the roles' directories."""
    return sum(loaded_bytes(Path(path).expanduser()) for path in role_paths(learner).values())


def check_vocabulary(field: str, path: str, facts: ModelFacts, model: ModelFacts, tokenizer: Any) -> None:
    """Raises ConfigError where a token id of the policy means another text to the model at `path`, or nothing."""
    from rl_core.rollout.prompts import load_tokenizer

    mine = cast("dict[str, int]", tokenizer.get_vocab())
    theirs = cast("dict[str, int]", cast(Any, load_tokenizer(Path(path).expanduser())).get_vocab())
    if other := sorted((token, text) for text, token in mine.items() if theirs.get(text) != token):
        token, text = other[0]
        refuse(field, path, f"has another vocabulary than model: {len(other)} of {len(mine)} tokens differ, as in "
               f"{text!r}, which is {token} there and {theirs.get(text, 'nothing')} here; its log-probs would be of "
               "other texts: use a model with the same tokenizer")
    if facts.vocabulary < model.vocabulary:
        refuse(field, path, f"has {facts.vocabulary} rows of embeddings, fewer than the {model.vocabulary} of model: "
               "it knows nothing of some tokens that the policy may sample; use a model with as many")


def _checked(field: str, directory: Path, role: Role) -> ModelFacts:
    try:
        return check_model(directory, classifier=role == "critic")
    except ConfigError as error:  # what is wrong with a directory is the same for every role, its name is not
        raise ConfigError(f"{field}{str(error).removeprefix('model.path')}") from error
