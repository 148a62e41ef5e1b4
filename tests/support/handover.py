"""Ways to hand weights over and to take them, drawn at random; what must arrive is worked out by numpy and torch."""

import functools
import gc
from collections.abc import Mapping

import numpy as np
import torch
from hypothesis import strategies as st

NAMES = ["a", "b", "c", "layer.weight", "layer.bias"]
SHAPES = st.sampled_from([(), (0,), (1,), (5,), (3, 4), (4, 4), (2, 3, 2), (64, 3)])
NUMPY_DTYPES = st.sampled_from([np.float16, np.float32, np.float64, np.int8, np.uint8, np.int64, np.bool_, np.uint16])
TORCH_DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int64, torch.bool])
LAYOUTS = st.sampled_from(["own", "own", "transposed", "strided", "flat", "expanded", "reversed", "swapped"])


def random_bytes(draw, count):
    return np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 256, count).astype(np.uint8)


def new_numpy(draw, dtype=None, shape=None, layout="own"):
    dtype = np.dtype(draw(NUMPY_DTYPES) if dtype is None else dtype)
    shape = draw(SHAPES) if shape is None else shape
    count = int(np.prod(shape))
    raw = random_bytes(draw, count * dtype.itemsize)
    array = (raw % 2 if dtype == np.bool_ else raw).view(dtype).reshape(shape)
    if layout == "transposed":
        return np.asfortranarray(array)
    if layout in ("strided", "flat"):
        room = np.zeros((2 * count + 3,), dtype)
        view = room[1 : 1 + 2 * count : 2] if layout == "strided" else room[1 : 1 + count]
        view[:] = array.reshape(-1)
        return view.reshape(shape) if layout == "flat" or len(shape) < 2 else array
    if layout == "expanded" and shape:
        return np.broadcast_to(array.reshape(-1)[:1].reshape((1,) * len(shape)), shape) if count else array
    if layout == "reversed" and shape:
        return array[::-1]
    return array.astype(dtype.newbyteorder(">")) if layout == "swapped" else array


def new_torch(draw, dtype=None, shape=None, layout="own"):
    dtype = draw(TORCH_DTYPES) if dtype is None else dtype
    shape = draw(SHAPES) if shape is None else shape
    count = int(np.prod(shape))
    if not count:
        return torch.empty(shape, dtype=dtype)
    raw = random_bytes(draw, count * dtype.itemsize)
    tensor = torch.from_numpy(raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)
    if layout == "transposed" and len(shape) == 2:
        return tensor.t().contiguous().t()
    if layout in ("strided", "flat"):
        room = torch.zeros(2 * count + 3, dtype=dtype)
        view = room[1 : 1 + 2 * count : 2] if layout == "strided" else room[1 : 1 + count]
        view.copy_(tensor.reshape(-1))
        return view.view(shape) if layout == "flat" or len(shape) < 2 else tensor
    if layout == "expanded" and shape and count:
        return tensor.reshape(-1)[:1].reshape((1,) * len(shape)).expand(shape)
    return tensor


def content(value):
    """A tensor's shape and bytes, by its values."""
    if isinstance(value, torch.Tensor):
        value = value.detach().clone(memory_format=torch.contiguous_format)
        return tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes()
    value = np.asarray(value)
    return value.shape, value.astype(value.dtype.newbyteorder("<"), order="C").tobytes()


class OnAccess(Mapping):
    """A mapping that makes its tensors when they are asked for."""

    def __init__(self, tensors, cast):
        self.tensors, self.cast = tensors, cast

    def __getitem__(self, name):
        return self.cast(self.tensors[name])

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


class OneKept(OnAccess):
    """The same with a cache of one, so that two accesses in a row give one tensor, and its memory is used again."""

    def __init__(self, tensors, cast):
        super().__init__(tensors, cast)
        self.last = None, None

    def __getitem__(self, name):
        if self.last[0] != name:
            self.last = None, None
            gc.collect(0)
            self.last = name, super().__getitem__(name)
        return self.last[1]


def cast_of(value):
    if isinstance(value, torch.Tensor):
        return value.to(torch.bfloat16) if value.is_floating_point() else value.clone()
    with np.errstate(all="ignore"):
        return value.astype(np.float16) if value.dtype.kind == "f" else value.copy()


class Source:
    """Weights of a trainer: `given` is what a publisher gets, `expected` what must arrive of it now."""

    KINDS = ("dict", "function", "fresh", "on access", "one kept", "module")

    def __init__(self, draw):
        self.draw = draw
        self.kind = draw(st.sampled_from(self.KINDS))
        self.is_torch = self.kind == "module" or draw(st.booleans())
        self.tensors = {}
        self.kept = OneKept(self.tensors, cast_of)
        for name in NAMES[: draw(st.integers(1, len(NAMES)))]:
            self.add(name)

    def new(self, layout=None, **options):
        layout = self.draw(LAYOUTS) if layout is None else layout
        return (new_torch if self.is_torch else new_numpy)(self.draw, layout=layout, **options)

    def add(self, name):
        """A tensor of its own, or one that shares memory with another in some way."""
        others = [value for other, value in self.tensors.items() if other != name and value.ndim]
        hop = self.draw(st.sampled_from(["own", "own", "tied", "view", "turned", "slice", "step"])) if others else "own"
        if hop == "own":
            self.tensors[name] = self.new()
            return
        other = self.draw(st.sampled_from(others))
        turned = (other.t() if self.is_torch else other.T) if other.ndim == 2 else other
        half = len(other) // 2
        self.tensors[name] = {
            "tied": other,
            "view": other[:],
            "turned": turned,
            "slice": other[half:],
            "step": other[: 2 * half : 2],
        }[hop]

    def given(self):
        if self.kind == "module":
            return self.module()
        return {
            "dict": lambda: self.tensors,
            "function": lambda: lambda: self.tensors,
            "fresh": lambda: lambda: {name: cast_of(value) for name, value in self.tensors.items()},
            "on access": lambda: OnAccess(self.tensors, cast_of),
            "one kept": lambda: self.kept,
        }[self.kind]()

    @functools.cache  # noqa: B019
    def module(self):
        module = torch.nn.Module()
        module.layer = torch.nn.Module()
        self.fill(module)
        return module

    def fill(self, module):
        """Make a module's tensors ours: floats as parameters, the rest as buffers."""
        for part in (module, module.layer):
            for name in [*part._parameters, *part._buffers]:
                delattr(part, name)
        for name, value in self.tensors.items():
            owner = module.layer if name.startswith("layer.") else module
            own = name.removeprefix("layer.")
            if value.is_floating_point():
                setattr(owner, own, torch.nn.Parameter(value, requires_grad=False))
            else:
                owner.register_buffer(own, value)

    def expected(self):
        if self.kind == "module":
            casts = {name: value.to(torch.bfloat16) if value.is_floating_point() else value
                     for name, value in self.tensors.items()}  # fmt: skip
        else:
            is_cast = self.kind in ("fresh", "on access", "one kept")
            casts = {name: cast_of(value) if is_cast else value for name, value in self.tensors.items()}
        return {name: content(value) for name, value in casts.items()}

    def change(self):
        """What a training loop, or a mistake in it, does between two versions."""
        names = sorted(self.tensors)
        name = self.draw(st.sampled_from(names))
        what = self.draw(st.sampled_from(["write", "write", "write", "write", "replace", "untie", "remove", "add"]))
        value = self.tensors[name]
        if what == "remove" and len(names) > 1:
            del self.tensors[name]
        elif what == "add":
            self.add(self.draw(st.sampled_from(NAMES)))
        elif what == "untie":
            self.tensors[name] = value.clone() if self.is_torch else value.copy()
        elif what == "replace":
            self.tensors[name] = self.new(dtype=value.dtype, shape=tuple(value.shape), layout="own")
        else:
            self.write(value)
        self.kept.last = None, None
        if self.kind == "module":
            self.fill(self.module())

    def write(self, value):
        """New bits for some elements, in place, where that can be."""
        if not (value.numel() if self.is_torch else value.size):
            return
        fresh = self.new(dtype=value.dtype, shape=tuple(value.shape), layout="own")
        where = tuple(self.draw(st.integers(0, length - 1)) for length in value.shape)
        if self.is_torch:
            value[where].copy_(fresh[where]) if value.ndim else value.copy_(fresh)
        elif value.flags.writeable:
            value[where] = fresh[where]


class Sink:
    """Weights of a replica: `given` is what it gets, `arrived` what is there now."""

    KINDS = ("empty", "zeros", "module", "tied alike", "tied", "overlapping", "copies", "read-only", "swapped",
             "extra", "missing", "flat", "folder")  # fmt: skip

    def __init__(self, draw, source, folder):
        self.kind = draw(st.sampled_from(self.KINDS))
        shapes = {name: content_like(value, source) for name, value in source.tensors.items()}
        self.tensors = {name: make() for name, make in shapes.items()}
        self.folder = folder
        names = list(self.tensors)
        if self.kind == "tied alike":
            for name in names[1:]:
                if source.tensors[name] is source.tensors[names[0]]:
                    self.tensors[name] = self.tensors[names[0]]
        elif self.kind == "tied":
            self.tensors[names[-1]] = self.tensors[names[0]]
        elif self.kind == "overlapping" and self.tensors[names[0]].ndim:
            self.tensors[names[-1]] = self.tensors[names[0]][1:]
        elif self.kind == "read-only" and not source.is_torch:
            self.tensors[names[0]].flags.writeable = False
        elif self.kind == "swapped" and not source.is_torch:
            self.tensors[names[0]] = self.tensors[names[0]].astype(self.tensors[names[0]].dtype.newbyteorder(">"))
        elif self.kind == "extra":
            self.tensors["zz"] = self.tensors[names[0]]
        elif self.kind == "missing":
            del self.tensors[names[0]]
        elif self.kind == "flat" and source.is_torch:
            self.tensors = flattened(self.tensors)
        elif self.kind == "empty":
            self.tensors = {}
        self.worker = Source.__new__(Source)
        self.worker.tensors, self.worker.kind = self.tensors, "module"
        if self.kind == "module" and not all(isinstance(value, torch.Tensor) for value in self.tensors.values()):
            self.kind = "zeros"

    def given(self):
        if self.kind == "folder":
            return self.folder
        if self.kind == "module":
            return self.worker.module()
        if self.kind == "copies":
            return OnAccess(self.tensors, lambda value: value.clone() if isinstance(value, torch.Tensor) else +value)
        return self.tensors

    def arrived(self, replica):
        if self.kind == "folder":
            weights = replica.target.weights()
            return {name: (tensor.shape, tensor.bits.tobytes()) for name, tensor in weights.items()}
        if self.kind == "module":
            return {name: content(value) for name, value in self.worker.module().state_dict().items()}
        return {name: value_content(value) for name, value in self.tensors.items()}


def value_content(value):
    bits = getattr(value, "bits", None)
    return content(value) if bits is None else (value.shape, bits.tobytes())


def content_like(value, source):
    """What makes a tensor of the dtype that a source's tensor arrives in, of other content."""
    casts = source.kind in ("fresh", "on access", "one kept", "module")
    if source.is_torch:
        dtype = torch.bfloat16 if casts and value.is_floating_point() else value.dtype
        return lambda: torch.ones(tuple(value.shape), dtype=dtype)
    dtype = np.dtype(np.float16) if casts and value.dtype.kind == "f" else value.dtype.newbyteorder("=")
    return lambda: np.ones(value.shape, dtype)


def flattened(tensors):
    """Views into one buffer for each dtype, one after the other."""
    rooms = {}
    for value in tensors.values():
        rooms.setdefault(value.dtype, []).append(value.numel())
    rooms = {dtype: (torch.ones(sum(sizes), dtype=dtype), iter(sizes)) for dtype, sizes in rooms.items()}
    starts = dict.fromkeys(rooms, 0)
    views = {}
    for name, value in tensors.items():
        start = starts[value.dtype]
        starts[value.dtype] += value.numel()
        views[name] = rooms[value.dtype][0][start : starts[value.dtype]].view(value.shape)
    return views
