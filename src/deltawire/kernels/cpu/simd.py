"""Vector instructions that numba has no word for, written as LLVM intermediate code.

A block is 64 consecutive elements. LLVM turns each function below into whatever the machine has (AVX-512 mask
registers, AVX2 `movmskb`, NEON), so one comparison of 64 weights is a handful of instructions, and its result is a
64-bit word in which bit j speaks of element j. Little-endian machines only, as is the file format.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BLOCK = 64


def _load_block(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """The 64 elements of a contiguous array from `index` on, as one vector. The caller keeps it inside the array."""
    data = context.make_array(array_type)(context, builder, array).data
    item = context.get_data_type(array_type.dtype)
    vector = ir.VectorType(item, BLOCK)
    pointer = builder.bitcast(builder.gep(data, [index]), vector.as_pointer())
    return builder.load(pointer, align=item.width // 8)


def _splat(builder: Any, scalar: Any, length: int = BLOCK) -> Any:
    vector = ir.VectorType(scalar.type, length)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), length), [0] * length)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


@intrinsic
def changed_mask(typingctx: Any, old: Any, new: Any, index: Any) -> Any:
    """Bit j is set where old[index + j] and new[index + j] differ."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a = _load_block(context, builder, signature.args[0], args[0], args[2])
        b = _load_block(context, builder, signature.args[1], args[1], args[2])
        return builder.bitcast(builder.icmp_unsigned("!=", a, b), ir.IntType(64))

    return types.uint64(old, new, types.intp), codegen


@intrinsic
def class_planes(typingctx: Any, old: Any, index: Any, shift: Any, mask: Any, first: Any) -> Any:
    """The classes of 64 elements as four bit planes: bit j of plane p is bit p of the class of old[index + j].

    The class is `(bits >> shift) & mask`, less `first`, clamped into 0..15.
    """
    word = types.uint64

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = _load_block(context, builder, signature.args[0], args[0], args[1])
        shift_, mask_, first_ = (_splat(builder, arg) for arg in args[2:])
        exponent = builder.and_(builder.lshr(bits, shift_), mask_)
        top = _splat(builder, ir.Constant(bits.type.element, 15))
        above = builder.icmp_unsigned(">", exponent, first_)
        offset = builder.select(above, builder.sub(exponent, first_), ir.Constant(bits.type, [0] * BLOCK))
        offset = builder.select(builder.icmp_unsigned("<", offset, top), offset, top)
        narrow = ir.VectorType(ir.IntType(8), BLOCK)
        classes = offset if bits.type.element.width == 8 else builder.trunc(offset, narrow)
        planes = []
        for plane in range(4):
            bit = ir.Constant(narrow, [1 << plane] * BLOCK)
            is_set = builder.icmp_unsigned("!=", builder.and_(classes, bit), ir.Constant(narrow, [0] * BLOCK))
            planes.append(builder.bitcast(is_set, ir.IntType(64)))
        return cgutils.pack_array(builder, planes)

    return types.UniTuple(word, 4)(old, types.intp, old.dtype, old.dtype, old.dtype), codegen


def _count_bits(name: str, *extra: int) -> Any:
    @intrinsic
    def count(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(64)
            kind = ir.FunctionType(word, [word, *(ir.IntType(1) for _ in extra)])
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.i64")
            return builder.call(function, [args[0], *(ir.Constant(ir.IntType(1), bit) for bit in extra)])

        return types.int64(types.uint64), codegen

    return count


popcount = _count_bits("ctpop")
trailing_zeros = _count_bits("cttz", 0)
leading_zeros = _count_bits("ctlz", 0)


@intrinsic
def advance_classes(typingctx: Any, planes: Any, masks: Any, seen: Any, wanted: Any) -> Any:
    """Count a block into the 16 classes: bit k of the result is set where `wanted[k]` is now below `seen[k]`.

    `planes` are four class planes and a plane of the elements that exist; `masks[k]` becomes the elements in class k,
    and `seen[k]` grows by their number.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        row = ir.VectorType(word, 16)

        def pointer(which: int) -> Any:
            data = context.make_array(signature.args[which])(context, builder, args[which]).data
            return builder.bitcast(data, row.as_pointer())

        members, *planes = (_splat(builder, builder.extract_value(args[0], i), 16) for i in (4, 0, 1, 2, 3))
        for plane, bits in enumerate(planes):
            flip = ir.Constant(row, [0 if k >> plane & 1 else -1 for k in range(16)])
            members = builder.and_(members, builder.xor(bits, flip))
        builder.store(members, pointer(1), align=8)
        count = cgutils.get_or_insert_function(builder.module, ir.FunctionType(row, [row]), "llvm.ctpop.v16i64")
        total = builder.add(builder.load(pointer(2), align=8), builder.call(count, [members]))
        builder.store(total, pointer(2), align=8)
        hits = builder.icmp_unsigned("<", builder.load(pointer(3), align=8), total)
        return builder.zext(builder.bitcast(hits, ir.IntType(16)), word)

    return types.uint64(planes, masks, seen, wanted), codegen


@intrinsic
def put_lane(typingctx: Any, row: Any, k: Any, value: Any) -> Any:
    """Set row[k] of 16 words, as one store of all of them: `advance_classes` would have to wait for a narrower one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = ir.VectorType(ir.IntType(64), 16)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(data, words.as_pointer())
        is_lane = builder.icmp_unsigned("==", ir.Constant(words, list(range(16))), _splat(builder, args[1], 16))
        changed = builder.select(is_lane, _splat(builder, args[2], 16), builder.load(pointer, align=8))
        builder.store(changed, pointer, align=8)
        return context.get_dummy_value()

    return types.void(row, types.uint64, types.uint64), codegen


@intrinsic
def nth_bit(typingctx: Any, word: Any, n: Any) -> Any:
    """The word with nothing but its n-th lowest set bit, from 0, or 0 if it has no more than n."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, one = ir.IntType(64), ir.Constant(ir.IntType(64), 1)
        if "+bmi2" in context.codegen().magic_tuple()[2]:
            deposit = ir.FunctionType(kind, [kind, kind])
            function = cgutils.get_or_insert_function(builder.module, deposit, "llvm.x86.bmi.pdep.64")
            return builder.call(function, [builder.shl(one, args[1]), args[0]])
        left = cgutils.alloca_once_value(builder, args[0])
        with cgutils.for_range(builder, args[1]):
            now = builder.load(left)
            builder.store(builder.and_(now, builder.sub(now, one)), left)
        now = builder.load(left)
        return builder.and_(now, builder.neg(now))

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], which need not be inside the array.

    Into the second cache: more of them can be on their way there than to the first one.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, *(ir.Constant(flag, value) for value in (0, 2, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen
