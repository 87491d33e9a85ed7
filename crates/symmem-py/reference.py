"""Writes docs/api-python.md: names and types from the package's sources and stubs, descriptions from its docstrings.

    python crates/symmem-py/reference.py            # needs the installed package, which has the docstrings of the native part

Needs neither torch nor numpy. `tests/test_reference.py` fails if the page is out of date.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import sys

SOURCES = pathlib.Path(__file__).parent / "python"
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "api-python.md"

HEAD = """\
# Reference of the Python package

Every public name with its arguments. [python.md](python.md) has examples, and [pytorch.md](pytorch.md) is about PyTorch's names. This page is
generated from the docstrings by `python crates/symmem-py/reference.py`; a test compares them.
"""

Definition = ast.ClassDef | ast.FunctionDef


class Undocumented(Exception):
    """Something public has no docstring."""


def page() -> str:
    """The whole page."""
    parts = [HEAD, *_module("symmem"), *_module("symmem.torch")]
    return "\n".join(parts)


def _module(name: str) -> list[str]:
    """The public names of a package, classes first."""
    tree, _ = _parsed(name)
    origins = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    public = [n for n in _all(tree) if not n.startswith("__")]
    found = {n: _definition(origins.get(n, name), n) for n in public}
    classes = [n for n in public if isinstance(found[n], ast.ClassDef)]
    others = [n for n in public if n not in classes]
    lines = [f"## `{name}`\n", _whole(ast.get_docstring(tree)), ""]
    lines += [_entry(origins.get(n, name), n, found[n]) for n in others] + [""]
    for n in classes:
        lines += _class(origins.get(n, name), n, found[n])
    return lines


def _parsed(module: str) -> tuple[ast.Module, pathlib.Path]:
    base = SOURCES.joinpath(*module.split("."))
    for path in (base / "__init__.py", base.with_suffix(".py"), base.with_suffix(".pyi")):
        if path.exists():
            return ast.parse(path.read_text()), path
    raise FileNotFoundError(f"no source of {module}")


def _all(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    return []


def _definition(module: str, name: str) -> ast.stmt:
    tree, path = _parsed(module)
    for node in tree.body:
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return node
    raise LookupError(f"{name} is not in {path}")


def _class(module: str, name: str, node: ast.ClassDef) -> list[str]:
    bases = [ast.unparse(base) for base in node.bases]
    shown = [base for base in bases if not base.rpartition(".")[2].startswith("_")]
    title = f"class {name}({', '.join(shown)})" if shown else f"class {name}"
    lines = [f"### `{title}`\n", _whole(_doc(module, node)), ""]
    hidden = [_definition(module, base) for base in bases if base.startswith("_")]
    fields, members = [], []
    for member in [m for base in [*hidden, node] for m in base.body]:
        if isinstance(member, ast.AnnAssign) and not member.target.id.startswith("_"):
            written = _native_doc(member.target.id, name) if module == "symmem._native" else None
            if written:
                members.append(f"- `{ast.unparse(member)}`: {_short(written)}")
            else:
                fields.append(f"`{member.target.id}`")
        if isinstance(member, ast.FunctionDef) and _is_shown(member):
            members.append(_entry(module, name, member))
    if fields and not hidden:
        lines += [f"Fields: {', '.join(fields)}.\n"]
    return [*lines, *members, ""] if members else lines


def _is_shown(node: ast.FunctionDef) -> bool:
    # `apply` is what users of an autograd function call.
    hidden = node.name.startswith("_") or node.name in ("forward", "backward")
    return not hidden and not any(ast.unparse(d).endswith(".setter") for d in node.decorator_list)


def _entry(module: str, owner: str, node: ast.stmt) -> str:
    """One line for a function, a property or a constant."""
    if isinstance(node, ast.Assign):
        return f"- `{owner} = {ast.unparse(node.value)}`: {_comment(module, node)}"
    if any(ast.unparse(d) == "property" for d in node.decorator_list):
        return f"- `{node.name}: {ast.unparse(node.returns)}`: {_short(_doc(module, node, owner))}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = ast.unparse(_without_self(node))
    return f"- `{node.name}({arguments}){returns}`: {_short(_doc(module, node, owner))}"


def _without_self(node: ast.FunctionDef) -> ast.arguments:
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    return arguments


def _doc(module: str, node: Definition, owner: str | None = None) -> str:
    written = ast.get_docstring(node)
    if written is None or module == "symmem._native":
        written = _native_doc(node.name, owner) or written
    if not written:
        raise Undocumented(f"{module}.{owner + '.' if owner else ''}{node.name} has no docstring")
    return written


def _native_doc(name: str, owner: str | None) -> str | None:
    found = importlib.import_module("symmem._native")
    for step in filter(None, (owner if owner != name else None, name)):
        found = getattr(found, step, None)
    return inspect.getdoc(found) if found is not None else None


def _comment(module: str, node: ast.Assign) -> str:
    """The `#:` lines above a constant."""
    _, path = _parsed(module)
    above = path.read_text().splitlines()[: node.lineno - 1]
    lines = []
    while above and above[-1].startswith("#:"):
        lines.insert(0, above.pop().removeprefix("#:").strip())
    if not lines:
        raise Undocumented(f"{module}: a constant without a comment")
    return " ".join(lines)


def _whole(doc: str | None) -> str:
    """A docstring as paragraphs; examples after `::` become code."""
    return (doc or "").replace("::\n", ":\n")


def _short(doc: str) -> str:
    """A docstring in one line of a list."""
    return " ".join(doc.split())


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
