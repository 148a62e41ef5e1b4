"""Weights that come one tensor at a time, as trainers that gather them send them."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from deltawire.tensors.digest import Digest
from deltawire.tensors.names import Ties, check_names
from deltawire.tensors.weights import Tensors, Weights

NOT_WEIGHTS = "the function for weights must return them by name, or as pairs of a name and a tensor, not "


class Stream:
    """Pairs of a name and a tensor, read once.

    A tensor is done with before the next one is asked for: then it may be freed, or its memory have other weights. So
    nothing is learnt from addresses, and names are tied only where that is stated.

    Args:
        pairs: The pairs, in any order.
        kept: Weights that do not change, for names that do not come.
        once: Nobody can send these again: what was read is put back where it does not fit to what was published.
    """

    def __init__(self, pairs: Iterable[Any], kept: Weights | None = None, *, once: bool = False) -> None:
        self._pairs, self._kept, self.once = iter(pairs), kept or {}, once
        self._open: list[Any] = []
        self.view: Callable[[str, Any, bool], Tensors]
        """Makes weights of one tensor, and says whether it is not compared; a source sets it."""
        self.is_frozen: Callable[[str], bool] = lambda name: False
        self.tied: Ties = {}
        self.names: dict[str, None] = {}
        """The names so far, tied ones too."""
        self.fixed: set[str] = set()
        """Those of them that are not compared."""
        self.ties: dict[str, Digest] = {}
        """For each tied name that came, the digest of its weights under the other name."""
        self.watch: Callable[[str, Any, Any], None] = lambda name, value, history: None
        """Called with each name, its tensor, and the history that has taken it, before the next one comes."""
        self.measured: dict[str, Digest] = {}
        self.copied: list[Any] = []
        """What the check of live weights has found."""

    def first(self) -> Any:
        """The first tensor, which stays unread; None if there is none."""
        for pair in self._pairs:
            self.put_back([pair])
            return pair[1] if isinstance(pair, tuple | list) and len(pair) == 2 else None
        return None

    def put_back(self, pairs: Iterable[Any]) -> None:
        """Let some pairs come again, before the others."""
        self._pairs, self._open = chain(pairs, self._open, self._pairs), []

    def each(self, history: Any) -> Iterator[Tensors]:
        """Weights of one tensor each, for a history; tied names are hashed and left out."""
        from deltawire.publish.recheck import hashed

        self.names = {}
        self.fixed.clear()
        for pair, is_kept in self._all():
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise TypeError(f"{NOT_WEIGHTS}{type(pair).__name__}")
            self._open, (name, value) = [pair], pair
            check_names([name])
            if name in self.names:
                raise ValueError(f"{name} came twice: weights that come one by one must have each name once")
            if is_kept or self.is_frozen(name):
                self.fixed.add(name)
            some = self.view(name, value, name in self.fixed)
            if name in self.tied:
                self.ties[name] = hashed(value, self.tied[name], some[name].dtype, some[name].shape)
            else:
                yield some
                self.watch(name, value, history)
            self.names[name], self._open = None, []
            del pair, value, some
        if not self.names:
            raise ValueError("there are no tensors to publish: the iterator gave no pair of a name and a tensor")

    def _all(self) -> Iterator[tuple[Any, bool]]:
        for pair in self._pairs:
            yield pair, False
            del pair
        for name in self._kept:
            if name not in self.names:
                yield (name, self._kept[name]), True
