"""Docstrings are written for `help()`: here their examples and drawings become blocks that Markdown leaves alone."""

import re

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?:>>> |\.\.\. ).*)*", re.MULTILINE)
DRAWING = re.compile(r"^\S.*\n(?:[├│└].*\n?)+", re.MULTILINE)


class Fences(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is None:
            return
        text = EXAMPLE.sub(_example, obj.docstring.value)
        obj.docstring.value = DRAWING.sub(lambda found: f"```text\n{found[0].rstrip()}\n```\n", text)


def _example(found: re.Match[str]) -> str:
    lines = [re.sub(r"^(>>>|\.\.\.) | +# doctest: .*$", "", line) for line in found[0].splitlines()]
    return "```python\n" + "\n".join(lines) + "\n```"
