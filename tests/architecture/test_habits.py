"""Habits of the code that a reader relies on: public things of rl_core are described, no pickle is loaded, no print."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rl_core", "tasks", "flows", "deployments")
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*packages: str) -> Iterator[tuple[str, ast.Module]]:
    """`(path under the root, syntax tree)` of every module."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(), str(path))


def public(nodes: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split("[")[0] in ("Protocol", "typing.Protocol") for base in node.bases)


def is_described(method: Function, in_protocols: set[str]) -> bool:
    """A docstring of its own, that of the protocol method it implements, or a body of one line that says it all."""
    return bool(ast.get_docstring(method)) or method.name in in_protocols or len(method.body) == 1


def test_every_public_function_of_rl_core_has_a_docstring() -> None:
    trees = list(sources("rl_core"))
    in_protocols = {"forward"} | {  # of torch.nn.Module
        method.name
        for _, tree in trees
        for node in public(tree.body) if isinstance(node, ast.ClassDef) and is_protocol(node)
        for method in public(node.body) if ast.get_docstring(method)
    }
    bare: list[str] = []
    for name, tree in trees:
        if ast.get_docstring(tree) is None:
            bare.append(f"{name}: the module")
        for node in public(tree.body):
            if isinstance(node, Function) and ast.get_docstring(node) is None:
                bare.append(f"{name}:{node.lineno} {node.name}")
            if isinstance(node, ast.ClassDef):
                bare += [f"{name}:{method.lineno} {node.name}.{method.name}" for method in public(node.body)
                         if isinstance(method, Function) and not is_described(method, in_protocols)]
    assert not bare, "\n".join(bare)


def test_a_session_is_of_answers_and_an_owner_of_a_run() -> None:
    """Each word has one meaning (docs/glossary.md)."""
    found = [(node.name, name) for name, tree in sources("rl_core", "tasks", "flows") for node in tree.body
             if isinstance(node, ast.ClassDef) and node.name in ("Session", "Owner")]
    assert found == [("Session", "rl_core/rollout/group.py"), ("Owner", "tasks/owner.py")]


def test_no_pickle_is_loaded() -> None:
    """Files of a run directory are Arrow, JSON and safetensors; none of them runs code when it is read."""
    found: list[str] = []
    for name, tree in sources(*PACKAGES):
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names) if {alias.name.split(".")[0] for alias in names} & PICKLES:
                    found.append(f"{name}:{node.lineno} {ast.unparse(node)}")
                case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLES:
                    found.append(f"{name}:{node.lineno} {ast.unparse(node)}")
                case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save"):
                    found.append(f"{name}:{node.lineno} {ast.unparse(node)}")
                case _:
                    pass
    assert not found, "\n".join(found)


def test_print_is_not_used() -> None:
    """Standard output belongs to the console and to `--json`. Writing to a stream that is named is no print."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree in sources(*PACKAGES)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        and not any(keyword.arg == "file" for keyword in node.keywords)
    ]
    assert not found, "\n".join(found)


def test_only_run_dir_names_the_parts_of_a_run_directory() -> None:
    """A path like `root / "ledger"` outside run_dir.py would be a second owner of the layout."""
    parts = {"streams", "ledger", "attempts", "versions", "outcomes", "quarantine", "owner.lock", "run.json", "records",
             "validations", "checkpoints", "pins"}
    found: list[str] = []
    for name, tree in sources(*PACKAGES):
        if name == "rl_core/run_dir.py":
            continue
        for node in ast.walk(tree):
            match node:
                case ast.BinOp(op=ast.Div(), right=ast.Constant(value=str(text))) if text in parts:
                    found.append(f"{name}:{node.lineno} {ast.unparse(node)}")
                case _:
                    pass
    assert not found, "\n".join(found)
