"""A model as engines have them: tensors fused, sliced over ranks, padded and tied, with loading code of its own."""

import numpy as np
import torch

from deltawire.engines.layout import Piece
from deltawire.engines.live_weights import Found, LiveModel
from deltawire.engines.places import check_recoverable
from deltawire.engines.trace import flat_storages, trace
from deltawire.tensors.weights import torch_view

HIDDEN, INNER, EXPERTS, VOCABULARY, PADDED = 8, 12, 2, 22, 32
HEADS, HEAD = 4, 4

SHAPES = {
    "embed": (VOCABULARY, HIDDEN),
    "norm": (HIDDEN,),
    "q": (HEADS * HEAD, HIDDEN),
    "k": (HEAD, HIDDEN),
    "v": (HEAD, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD),
    "scale": (1,),
    **{f"experts.{i}.{part}": (INNER, HIDDEN) for i in range(EXPERTS) for part in ("gate", "up")},
    **{f"experts.{i}.down": (HIDDEN, INNER) for i in range(EXPERTS)},
    "router": (HIDDEN, EXPERTS),
}
SPECS = {name: ("F32" if name == "router" else "BF16", shape) for name, shape in SHAPES.items()}


def random_bits(shape, dtype, rng):
    bits = rng.integers(0, 1 << 62, shape, np.int64)
    return torch.from_numpy(bits.astype(f"i{dtype.itemsize}")).view(dtype)


def make_checkpoint(seed=0):
    """Tensors of any bits at all."""
    rng = np.random.default_rng(seed)
    return {
        name: random_bits(shape, torch.float32 if name == "router" else torch.bfloat16, rng)
        for name, shape in SHAPES.items()
    }


def bits_of(tensor):
    return torch_view(tensor.detach().contiguous().view(-1))


class FusedModel(torch.nn.Module):
    """One rank of it. Keys and values have one head, which every rank has."""

    def __init__(self, rank=0, world=1):
        super().__init__()
        self.rank, self.world = rank, world
        self.register_buffer("cache", torch.zeros(3))
        self.embed = self._new(PADDED // world, HIDDEN)
        self.head = self.embed
        self.norm = self._new(HIDDEN)
        self.qkv = self._new((HEADS // world + 2) * HEAD, HIDDEN)
        self.o = self._new(HIDDEN, HEADS // world * HEAD)
        self.scale = self._new(1)
        self.w13 = self._new(EXPERTS, 2 * INNER // world, HIDDEN)
        self.w2 = self._new(EXPERTS, HIDDEN, INNER // world)
        self.router = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN), requires_grad=False)

    def _new(self, *shape):
        return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)

    def _own(self, tensor, dim):
        size = tensor.shape[dim] // self.world
        return tensor.narrow(dim, self.rank * size, size)

    def load_weights(self, weights):
        queries = HEADS // self.world * HEAD
        rows = {"k": slice(queries, queries + HEAD), "v": slice(queries + HEAD, queries + 2 * HEAD)}
        for name, tensor in weights:
            parts = name.split(".")
            if name == "embed":
                size = PADDED // self.world
                own = tensor[self.rank * size : (self.rank + 1) * size]
                # Tied, and so loaded twice.
                for table in (self.embed, self.head):
                    table.data[: len(own)].copy_(own)
                    table.data[len(own) :].fill_(0)
            elif name == "q":
                self.qkv.data[:queries].copy_(self._own(tensor, 0))
            elif name in rows:
                self.qkv.data[rows[name]].copy_(tensor)
            elif name == "o":
                self.o.data.copy_(self._own(tensor, 1))
            elif name == "router":
                self.router.data.copy_(tensor.t())
            elif parts[0] == "experts" and parts[2] == "down":
                self.w2.data[int(parts[1])].copy_(self._own(tensor, 1))
            elif parts[0] == "experts":
                half = INNER // self.world
                first = half * (parts[2] == "up")
                self.w13.data[int(parts[1])].narrow(0, first, half).copy_(self._own(tensor, 0))
            else:
                getattr(self, name).data.copy_(tensor)


def plain_pieces(traced):
    """The pieces of all tensors, where each must be copied as it is."""
    check_recoverable(traced)
    return [piece for copy in traced.copies for piece in copy.pieces()]


def live_model(model):
    def find(specs):
        storages = flat_storages(model)
        return Found(plain_pieces(trace(model.load_weights, storages, specs)), storages)

    return LiveModel(find, threads=2)


def whole(name, storage, size, first=0, at=0):
    return Piece(name, storage, 1, size, first, size, (at, size, 1))
