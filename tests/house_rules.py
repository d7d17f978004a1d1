"""Rules about source code that no linter knows: what the library may import, call and keep.

Each rule takes a `Source` and returns its findings, one line each.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

RUNTIME = {"torch", "safetensors", "transformers", "einops", "PIL", "numpy", "psutil"}
HOST = {"comfy", "comfy_api", "comfy_extras", "comfy_execution", "folder_paths", "nodes", "execution", "server"}
OPTIONAL = {"comfy_kitchen", "gguf", "sageattention", "websocket"}  # used where it is installed
PEERS = {"diffusers", "torchvision", "accelerate"}
UNSAFE = {"pickle", "dill", "joblib", "shelve", "marshal", "subprocess", "pip", "ensurepip"}

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
_CONTAINERS = {"dict", "list", "set", "defaultdict", "OrderedDict", "deque", "Counter", "bytearray"}
_CONTAINERS |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}
_MUTATORS = {"add", "append", "appendleft", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault"}
_MUTATORS |= {"update", "discard"}
_EXECUTES = re.compile(r"(eval|exec|os\.(system|popen|exec\w+|spawn\w+)|torch\.load|torch\.hub\.load\w*)$")
_SEEDS = re.compile(r"(torch|torch\.random|torch\.cuda)\.(manual_seed(_all)?|seed(_all)?)$")
_SETTINGS = re.compile(
    r"torch(\.\w+)*\.set_\w+$|torch\.use_deterministic_algorithms$|torch\.backends(\.\w+)*\.enable_\w+$"
    r"|(numpy\.)?random\.seed$|os\.(putenv|unsetenv|chdir)$|os\.environ\.(update|setdefault|pop|clear)$"
    r"|sys\.path\.(insert|append|extend|remove)$"
)
_SETTING_NAMES = re.compile(r"torch\.backends\.|os\.environ$|sys\.path$|torch\.(cuda|mps|_dynamo|_inductor)\.")
MACHINE_PATH = re.compile(r"(?<![\w.~>-])/(?:root|work|home|Users|mnt|scratch)/[\w.]|[A-Z]:\\Users\\", re.ASCII)


@dataclass(frozen=True)
class Source:
    """One Python file: `name` is its path below the repository's root."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name, feature_version=(3, 10))

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What imported names stand for: `np` is `numpy`, `load` of `from torch import load` is `torch.load`."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    full = alias.name if alias.asname else alias.name.split(".")[0]
                    found[alias.asname or full] = full
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return found

    def dotted(self, node: ast.AST) -> str:
        """Full name of `a.b.c`, empty if it does not start at a plain name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.aliases.get(node.id, node.id), *reversed(parts)])

    def at(self, node: ast.AST, finding: str) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 1)}: {finding}"


@dataclass(frozen=True)
class Imported:
    node: ast.AST
    module: str  # as written, without the dots of a relative import
    level: int
    lazy: bool  # inside a function, or for type checkers only

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


def _imports(source: Source, node: ast.AST | None = None, lazy: bool = False) -> Iterator[Imported]:
    for child in ast.iter_child_nodes(node or source.tree):
        if isinstance(child, ast.Import):
            yield from (Imported(child, alias.name, 0, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield Imported(child, child.module or "", child.level, lazy)
        elif name := _imported_by_call(source, child):
            yield Imported(child, name.lstrip("."), len(name) - len(name.lstrip(".")), lazy)
        for_types = isinstance(child, ast.If) and source.dotted(child.test).endswith("TYPE_CHECKING")
        yield from _imports(source, child, lazy or for_types or isinstance(child, _FUNCTIONS))


def _imported_by_call(source: Source, node: ast.AST) -> str:
    """Module that `importlib.import_module("...")` or `__import__("...")` names, or empty."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
        return ""
    imports = source.dotted(node.func) in ("importlib.import_module", "__import__")
    return str(node.args[0].value) if imports else ""


def library_imports(source: Source) -> list[str]:
    """The library imports itself relatively, the runtime packages and the standard library; nothing else."""
    depth = source.name.count("/")
    findings = []
    for found in _imports(source):
        top = found.top
        if found.level:
            problem = "leaves the library" if found.level > depth else ""
        elif top == "qwen21":
            problem = "must be relative: ComfyUI loads the pack under another name"
        elif top in HOST:
            problem = "is ComfyUI's; the library knows nothing of it"
        elif top in PEERS:
            problem = "is not a runtime package; it serves tests only"
        elif top == "transformers" and not found.lazy:
            problem = "belongs inside the function that loads the encoder"
        elif top in OPTIONAL and not found.lazy:
            problem = "is of an optional package; it belongs inside the function that tries it"
        elif top not in RUNTIME | OPTIONAL and top not in sys.stdlib_module_names:
            problem = "is not in requirements.txt"
        else:
            problem = ""
        if problem:
            findings.append(source.at(found.node, f"import of {'.' * found.level}{found.module} {problem}"))
    return findings


def pack_imports(source: Source) -> list[str]:
    """What holds for nodes too: relative imports of our own, no import of `transformers` at startup, no peers."""
    findings = []
    for found in _imports(source):
        if found.level:
            continue
        if found.top == "qwen21":
            findings.append(source.at(found.node, "import of qwen21 must be relative"))
        if found.top in PEERS:
            findings.append(source.at(found.node, f"import of {found.top}, which is not in requirements.txt"))
        if found.top == "transformers" and not found.lazy:
            findings.append(source.at(found.node, "import of transformers at startup"))
    return findings


def unsafe_code(source: Source) -> list[str]:
    """No pickle in any form, no code from strings, no other programs, no pip."""
    imports = [found for found in _imports(source) if not found.level and found.top in UNSAFE]
    findings = [source.at(found.node, f"import of {found.module}") for found in imports]
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = source.dotted(node.func)
        if _EXECUTES.match(name):
            findings.append(source.at(node, f"call of {name}"))
        for keyword in node.keywords:
            if keyword.arg in ("allow_pickle", "trust_remote_code") and not _is_false(keyword.value):
                findings.append(source.at(node, f"{keyword.arg} in a call of {name or 'something'}"))
    return findings


def _is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def global_settings(source: Source) -> list[str]:
    """Nothing that outlives a call for everybody: torch's settings and seeds, the environment, `sys.path`."""
    forked: set[ast.AST] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.With) and any("fork_rng" in ast.dump(item.context_expr) for item in node.items):
            forked.update(ast.walk(node))
    findings = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = source.dotted(node.func)
            if _SETTINGS.match(name) or (_SEEDS.match(name) and node not in forked):
                findings.append(source.at(node, f"call of {name}, a global setting"))
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
            for target in targets:
                name = source.dotted(target.value if isinstance(target, ast.Subscript) else target)
                if _SETTING_NAMES.match(name):
                    findings.append(source.at(node, f"{name} is set, a global setting"))
    return findings


def global_caches(source: Source) -> list[str]:
    """No cache that lives on a module or class: tensors and files kept there are never given back.

    Tables are fine: a filled container that no function changes.
    """
    findings, tables = [], {}
    for scope in [source.tree, *(node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef))]:
        for node in scope.body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not _is_container(source, node.value):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if not isinstance(target, ast.Name) or target.id == "__all__":
                    continue
                if _is_empty(node.value):
                    findings.append(source.at(node, f"{target.id} starts empty, so something fills it: a cache?"))
                tables[target.id] = node
    for function in (node for node in ast.walk(source.tree) if isinstance(node, _FUNCTIONS)):
        findings += _kept_by(source, function, tables)
    return findings


def _kept_by(source: Source, function: ast.AST, tables: dict[str, ast.AST]) -> list[str]:
    """What one function keeps beyond its call: in its own memo, a global, or one of the module's `tables`."""
    findings = []
    memo = any(_is_memo(source, decorator) for decorator in getattr(function, "decorator_list", []))
    if memo and re.search(r"'torch'|Tensor\b", ast.dump(function)):
        findings.append(source.at(function, f"{function.name} keeps tensors in a cache"))
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    local = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            findings.append(source.at(node, f"global {', '.join(node.names)}"))
        changed = _changed_name(node)
        if changed in tables and changed not in local:
            findings.append(source.at(node, f"{changed} is changed at run time: a cache?"))
    return findings


def _is_container(source: Source, node: ast.AST | None) -> bool:
    called = isinstance(node, ast.Call) and source.dotted(node.func).split(".")[-1] in _CONTAINERS
    return called or isinstance(node, _DISPLAYS)


def _is_empty(node: ast.AST | None) -> bool:
    if isinstance(node, ast.Call):
        named = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return not node.keywords and (not node.args or (named == "defaultdict" and len(node.args) == 1))
    return not (getattr(node, "keys", None) or getattr(node, "elts", None) or hasattr(node, "generators"))


def _is_memo(source: Source, decorator: ast.AST) -> bool:
    name = source.dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return name in ("functools.lru_cache", "functools.cache")


def _changed_name(node: ast.AST) -> str:
    """Name of the container that this very node changes, or empty."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return getattr(node.value, "id", "")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
        return getattr(node.func.value, "id", "")
    if isinstance(node, ast.AugAssign):
        return getattr(node.target, "id", "")
    return ""
