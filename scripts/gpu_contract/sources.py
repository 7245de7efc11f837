"""Python packages as text: what a wheel or an installed package defines, read without importing it."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEPTH = 20
"""So many re-exports are followed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A name of a module: where it is defined, and by what; `node` is None for a module."""

    module: str
    node: ast.AST | None


@dataclass(kw_only=True, eq=False)
class Sources:
    """The modules of a wheel, or below a folder."""

    path: Path
    _texts: dict[str, ast.Module | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._zip = zipfile.ZipFile(self.path) if self.path.suffix == ".whl" else None
        self._names = frozenset(self._zip.namelist()) if self._zip else frozenset()

    @property
    def version(self) -> str:
        """Of a wheel, by its file's name."""
        return self.path.name.split("-")[1] if self._zip else "installed"

    def module(self, name: str) -> ast.Module | None:
        """The parsed module, or None where there is none."""
        if name not in self._texts:
            text = next((found for end in (".py", "/__init__.py") if (found := self._text(name, end))), None)
            self._texts[name] = None if text is None else ast.parse(text)
        return self._texts[name]

    def _text(self, name: str, end: str) -> str | None:
        path = name.replace(".", "/") + end
        if self._zip is not None:
            return self._zip.read(path).decode() or " " if path in self._names else None
        file = self.path / path
        return file.read_text() or " " if file.is_file() else None

    def _is_package(self, name: str) -> bool:
        return self._text(name, "/__init__.py") is not None

    def find(self, module: str, name: str, depth: int = DEPTH) -> Found | None:
        """What `name` of `module` is, through re-exports; None where the module does not have it."""
        tree = self.module(module)
        if tree is None or not depth:
            return None
        for node in statements(tree):
            if (found := self._bound(module, node, name, depth)) is not None:
                return found
        return Found(module=f"{module}.{name}", node=None) if self.module(f"{module}.{name}") is not None else None

    def _bound(self, module: str, node: ast.stmt, name: str, depth: int) -> Found | None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return Found(module=module, node=node) if node.name == name else None
            case ast.Assign(targets=targets, value=value):
                if (lazy := self._lazy(module, node, name, depth)) is not None:
                    return lazy
                bound = any(name == _id(each) for target in targets for each in _flat(target))
                if bound and isinstance(value, ast.Name) and value.id != name:  # an alias
                    return self.find(module, value.id, depth - 1) or Found(module=module, node=node)
                return Found(module=module, node=node) if bound else None
            case ast.AnnAssign(target=target):
                return Found(module=module, node=node) if _id(target) == name else None
            case ast.ImportFrom(names=names):
                return self._imported(module, node, names, name, depth)
            case ast.Import(names=names):
                for alias in names:
                    if (alias.asname or alias.name.split(".")[0]) == name:
                        return Found(module=alias.name if alias.asname else alias.name.split(".")[0], node=None)
        return None

    def _imported(
        self, module: str, node: ast.ImportFrom, names: list[ast.alias], name: str, depth: int
    ) -> Found | None:
        source = self.absolute(module, node)
        for alias in names:
            if alias.name == "*":
                if (found := self.find(source, name, depth - 1)) is not None:
                    return found
            elif (alias.asname or alias.name) == name:
                return self.find(source, alias.name, depth - 1) or self._foreign(source, alias.name)
        return None

    def _foreign(self, module: str, name: str) -> Found | None:
        """A name of another distribution, which is not here to look at."""
        own = self.module(module.split(".", maxsplit=1)[0]) is not None or self._has_below(
            module.split(".", maxsplit=1)[0]
        )
        return None if own else Found(module=module, node=ast.Constant(value=name))

    def _has_below(self, package: str) -> bool:
        if self._zip is not None:
            return any(each.startswith(f"{package}/") for each in self._names)
        return (self.path / package).is_dir()

    def _lazy(self, module: str, node: ast.Assign, name: str, depth: int) -> Found | None:
        """A table {"Name": ".module:Name"} from which a module's __getattr__ imports."""
        if not isinstance(node.value, ast.Dict):
            return None
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            match key, value:
                case ast.Constant(value=str(said)), ast.Constant(value=str(where)) if said == name and ":" in where:
                    source, _, real = where.partition(":")
                    return self.find(module + source if source.startswith(".") else source, real, depth - 1)
        return None

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that a `from ... import` names."""
        if not node.level:
            return node.module or ""
        package = module.split(".") if self._is_package(module) else module.split(".")[:-1]
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def lineage(self, found: Found, depth: int = DEPTH) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and its bases, as far as they are of this package."""
        if not isinstance(found.node, ast.ClassDef) or not depth:
            return
        yield found.module, found.node
        for base in found.node.bases:
            above = self._base(found.module, base)
            if isinstance(above, Found):
                yield from self.lineage(above, depth - 1)

    def strangers(self, found: Found) -> list[str]:
        """Bases of a class, and of its bases, that other packages define, such as torch.nn.Module."""
        bases = [(module, base) for module, node in self.lineage(found) for base in node.bases]
        return [above for module, base in bases if isinstance(above := self._base(module, base), str)]

    def _base(self, module: str, node: ast.expr) -> Found | str:
        """The class that an expression names: ours, or by its full name another package's."""
        path = words(node.value if isinstance(node, ast.Subscript) else node)
        if not path:
            return ast.unparse(node)
        found = self.find(module, path[0])
        for word in path[1:]:
            if found is None or found.node is not None or self.module(found.module) is None:
                break
            found = self.find(found.module, word)
        if found is not None and isinstance(found.node, ast.ClassDef):
            return found
        if found is not None and isinstance(found.node, ast.Constant):
            return ".".join([found.module, str(found.node.value), *path[1:]])
        if found is not None and found.node is None:
            return ".".join([found.module, *path[1:]])
        return ".".join(path)


@cache
def statements(tree: ast.Module) -> tuple[ast.stmt, ...]:
    """Statements of a module, those inside `if`, `try` and `with` too, last first: what is bound last counts."""

    def walk(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if isinstance(node, ast.If | ast.Try | ast.With):
                for part in ("body", "handlers", "orelse", "finalbody"):
                    for inner in getattr(node, part, []):
                        yield from walk(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])
            else:
                yield node

    return tuple(walk(tree.body))


def words(node: ast.expr) -> list[str]:
    """a.b.c as words; nothing for what is no chain of names."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := words(node.value)):
        return [*before, node.attr]
    return []


def _id(node: ast.expr | ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _flat(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple) else [target]
