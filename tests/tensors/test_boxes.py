"""Boxes: where the elements of a part lie in the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire import Box


@st.composite
def boxes(draw):
    full = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    offset = tuple(draw(st.integers(0, size)) for size in full)
    shape = tuple(draw(st.integers(0, size - start)) for size, start in zip(full, offset, strict=True))
    return Box(full, offset, shape)


@given(boxes())
def test_positions_in_the_tensor(box):
    numbers = np.arange(int(np.prod(box.full)), dtype=np.int64).reshape(box.full)
    expected = numbers[box.slices].reshape(-1)
    assert box.to_tensor(np.arange(box.num_elements)).tolist() == expected.tolist()
    starts, length = box.runs()
    runs = [start + i for start in starts for i in range(length)]
    assert runs == expected.tolist()


@given(boxes(), st.data())
def test_intersection_is_what_both_touch(box, data):
    offset = tuple(data.draw(st.integers(0, size)) for size in box.full)
    shape = tuple(data.draw(st.integers(0, size - start)) for size, start in zip(box.full, offset, strict=True))
    other = Box(box.full, offset, shape)
    touched = np.zeros(box.full, int)
    touched[box.slices] += 1
    touched[other.slices] += 1
    shared = box.intersection(other)
    assert (shared is not None) == bool((touched == 2).any())
    if shared is not None:
        assert (touched[shared.slices] == 2).all()
        assert shared.num_elements == (touched == 2).sum()
        numbers = np.arange(touched.size).reshape(box.full)
        inside = numbers[box.slices][shared.slices_in(box)]
        assert inside.tolist() == numbers[shared.slices].tolist()


@given(boxes())
def test_positions_in_the_box(box):
    everywhere = np.arange(int(np.prod(box.full)), dtype=np.int64)
    local, inside = box.from_tensor(everywhere)
    assert local.tolist() == list(range(box.num_elements))
    assert everywhere[inside].tolist() == box.to_tensor(local).tolist()


def test_whole():
    assert Box.whole((3, 4)).is_whole
    assert not Box((3, 4), (0, 0), (3, 3)).is_whole
    assert Box.whole(()).num_elements == 1


@pytest.mark.parametrize(("offset", "shape"), [((0,), (3, 4)), ((1, 0), (3, 4)), ((-1, 0), (1, 1)), ((0, 0), (3, -1))])
def test_a_box_outside_is_refused(offset, shape):
    with pytest.raises(ValueError, match="does not fit in a tensor"):
        Box((3, 4), offset, shape)
