"""The package's rules that no linter knows, each as a function from a root folder (that of `lite`) to what breaks it.

Models are found by looking; there is no list to keep. Relative imports are resolved, imports inside functions are told apart.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

HEAVY = {"vllm", "transformer_engine", "mamba_ssm", "causal_conv1d", "flashinfer", "triton"}
HEAVY_HOMES = ("primitive/kernels/", "vllm_plugin/", "runtime/rollout/vllm.py")
NEVER_AT_MODULE_LEVEL = {"transformers", "matplotlib", "reasoning_gym", "gguf"}
FAMILY_FILES = {"__init__.py", "config.py", "checkpoint.py", "model.py", "protocol.py"}
TO_HOST = {"item", "cpu", "tolist"}


@dataclass(frozen=True)
class Import:
    """module: absolute name. inner: inside a function."""

    file: str
    line: int
    module: str
    inner: bool


def sources(root: Path, under: str = "") -> Iterator[tuple[str, ast.Module]]:
    """(path below root, tree) of each Python file."""
    for path in sorted((root / under).rglob("*.py")):
        yield path.relative_to(root).as_posix(), _parsed(path.read_text())


@lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.Module:
    """Each violation is planted in a copy of the package that is otherwise the same."""
    return ast.parse(text)


def model_families(root: Path) -> list[str]:
    return sorted(p.name for p in (root / "model").iterdir() if p.is_dir() and any(p.rglob("*.py")))


def imports(root: Path, file: str, tree: ast.Module) -> Iterator[Import]:
    """Every name that a file's imports may load; `from a import b` gives a.b. `if TYPE_CHECKING:` counts: mypy reads it, too."""
    package = [root.name, *Path(file).parent.parts]

    def walk(node: ast.AST, inner: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, inner)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                yield Import(file, node.lineno, ".".join([*base, *filter(None, [node.module]), alias.name]), inner)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(file, node.lineno, first.value, inner)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inner or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    yield from walk(tree, False)


def model_folders_are_alike(root: Path) -> list[str]:
    """A family is five files: who has read one can read them all."""
    found = []
    for name in model_families(root):
        entries = {p.name for p in (root / "model" / name).iterdir() if p.name != "__pycache__"}
        found += [f"model/{name}: lacks {entry}" for entry in sorted(FAMILY_FILES - entries)]
        found += [f"model/{name}: holds {entry}" for entry in sorted(entries - FAMILY_FILES)]
    return found


def no_primitives_in_models(root: Path) -> list[str]:
    """What two families could share belongs to lite/primitive."""
    names = ("primitive", "primitives", "primitive.py", "primitives.py")
    return [p.relative_to(root).as_posix() for p in sorted((root / "model").rglob("primitive*")) if p.name in names]


def heavy_imports_stay_home(root: Path) -> list[str]:
    """GPU packages are imported by the kernel sets and vLLM's side only, and there inside functions: every other machine lacks them."""
    found = []
    for file, tree in sources(root):
        for i in imports(root, file, tree):
            top = i.module.split(".")[0]
            if top in HEAVY and not (i.inner and file.startswith(HEAVY_HOMES)):
                found.append(f"{file}:{i.line}: {top} {'outside its folders' if i.inner else 'at module level'}")
            if top in NEVER_AT_MODULE_LEVEL and not i.inner:
                found.append(f"{file}:{i.line}: {top} at module level")
    return found


def families_are_named_in_models_only(root: Path) -> list[str]:
    """No `if model == ...` outside lite/model: shared code asks for a capability. Docstrings may tell of families, and so may the list
    of gates, which is data."""
    names = model_families(root)
    found = []
    for file, tree in sources(root):
        if file.startswith("model/") or file == "acceptance/gates.py":
            continue
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            for text in _texts(node) if id(node) not in prose else ():
                words = "_".join(w.lower() for w in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+[0-9]*(?![a-z])", text))
                found += [f"{file}:{getattr(node, 'lineno', 0)}: {name} in {text!r}" for name in names if f"_{name}_" in f"_{words}_"]
    return found


def _texts(node: ast.AST) -> Iterator[str]:
    """The identifiers and strings that a node itself holds."""
    for _, value in ast.iter_fields(node):
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, str):
                yield entry


def no_writes_through_data(root: Path) -> list[str]:
    """`.data` hides a write from the version counter, which is how a backward over changed weights is caught."""
    found = []

    def through_data(node: ast.AST) -> bool:
        while isinstance(node, ast.Subscript | ast.Attribute | ast.Call):
            if isinstance(node, ast.Attribute) and node.attr == "data":
                return True
            node = node.func if isinstance(node, ast.Call) else node.value
        return False

    for file, tree in sources(root):
        for node in ast.walk(tree):
            targets: list[ast.AST] = []
            if isinstance(node, ast.Assign):
                targets = [leaf for t in node.targets for leaf in ast.walk(t) if isinstance(leaf, ast.Attribute | ast.Subscript)]
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            elif isinstance(node, ast.Call):
                targets = [keyword.value for keyword in node.keywords if keyword.arg == "out"]
                if isinstance(node.func, ast.Attribute) and re.fullmatch(r"[a-z]\w*_|__setitem__", node.func.attr):
                    targets.append(node.func.value)
            if any(through_data(t) for t in targets):
                found.append(f"{file}:{node.lineno}: writes through .data")
    return found


def no_host_reads_in_the_model(root: Path) -> list[str]:
    """A value read back stalls the GPU at every layer, and code that branches on it is no longer one computation."""
    return [
        f"{file}:{node.lineno}: .{node.func.attr}()"
        for under in ("primitive/modules", "primitive/ops")
        for file, tree in sources(root, under)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TO_HOST
    ]


def families_do_not_import_each_other(root: Path) -> list[str]:
    names = model_families(root)
    found = []
    for name in names:
        for file, tree in sources(root, f"model/{name}"):
            for i in imports(root, file, tree):
                other = [*i.module.split("."), "", ""][:3]
                if other[:2] == [root.name, "model"] and other[2] in names and other[2] != name:
                    found.append(f"{file}:{i.line}: imports {other[2]}")
    return found
