"""Writes to the memory of an engine that fail when a part of them is done."""

from typing import Any


def fail_next_write(memory: Any, written: slice) -> None:
    """Let the next write do these of its items, and then fail; later ones are whole again."""
    put = memory.put

    def some(items: Any, *, undo: bool = False, writes: bool = True) -> Any:
        if not writes:
            return put(items, writes=False)
        memory.put = put
        put(items[written], undo=undo)
        raise OSError("a fault in the middle")

    memory.put = some
