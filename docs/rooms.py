"""The rooms of the package and who imports whom, read from the source: the map in ARCHITECTURE.md, and its test."""

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"

# Lowest first: a room imports only from those above it, never from one of the same line.
ROOMS = [
    ["errors"],
    ["workers", "disk", "redact"],
    ["kernels", "terminal", "hosts"],
    ["tensors"],
    ["codec"],
    ["format", "store"],
    ["run"],
    ["publish", "follow"],
    ["maintain", "metrics", "interop", "estimate"],
    ["engines"],
    ["trainers", "agent", "testing"],
    ["pages"],
    ["deltawire_demo"],
    ["cli"],
]


def room_of(module: str) -> str:
    """The room that a module lies in: `publish` for deltawire.publish.history."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "deltawire" else package


def files_of(room: str) -> list[Path]:
    folder = SOURCE / room if room == "deltawire_demo" else SOURCE / "deltawire" / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@cache
def imports(file: Path) -> list[str]:
    """The modules that a file imports, and names from them, which may be modules; not those for types only."""
    found: list[str] = []
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    for node in waiting:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        waiting += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
    return found


def imported_rooms(room: str) -> set[str]:
    rooms = {each for line in ROOMS for each in line}
    modules = {module for file in files_of(room) for module in imports(file) if module.startswith("deltawire")}
    return {room_of(module) for module in modules} & rooms - {room}


def purpose(room: str) -> str:
    """The first sentence of a room's docstring."""
    text = ast.get_docstring(ast.parse(files_of(room)[0].read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def table() -> str:
    """Every room that is a folder, highest first: what it is for, and which others it imports."""
    lines = ["| room | what it is for | imports |", "|---|---|---|"]
    for room in reversed([room for line in ROOMS for room in line]):
        files = files_of(room)
        if len(files) > 1:
            below = [
                each for line in ROOMS for each in line if each in imported_rooms(room) and len(files_of(each)) > 1
            ]
            lines.append(f"| `{room}` | {purpose(room)} | {', '.join(reversed(below)) or '-'} |")
    return "\n".join(lines)
