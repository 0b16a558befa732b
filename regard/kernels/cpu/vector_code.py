"""Vector code of compiled CPU kernels, where compilers do not find it: registers of 16 lanes of 32 bits in LLVM."""

from collections.abc import Callable
from typing import Any

# 32-bit lanes of a register, and their bytes.
LANES = 16
LANE_BYTES = 4 * LANES


class VectorCode:
    """Emits instructions; addresses and counts are 64-bit integers.

    It is for functions that numba's `intrinsic` decorates. Import only where numba is available. Such functions take
    arrays and find their addresses themselves: numba frees an array after its last use, and an address is none. They
    are not covered by numba's bounds checks, so that their callers check the sizes.
    """

    def __init__(self, builder: Any) -> None:
        from llvmlite import ir

        self.ir, self.builder = ir, builder
        self.int32, self.int64, self.float32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
        self.floats, self.ints = ir.VectorType(self.float32, LANES), ir.VectorType(self.int32, LANES)

    def array(self, context: Any, kind: Any, value: Any) -> tuple[Any, list[Any], list[Any]]:
        """The address, the shape and the distances in bytes of an array of numba, given its type."""
        from numba.core import cgutils

        array = context.make_array(kind)(context, self.builder, value)
        address = self.builder.ptrtoint(array.data, self.int64)
        return address, *(cgutils.unpack_tuple(self.builder, part) for part in (array.shape, array.strides))

    def number(self, value: int) -> Any:
        return self.ir.Constant(self.int64, value)

    def constant(self, value: float, kind: Any) -> Any:
        """A constant, the same in all lanes of a vector."""
        return self.ir.Constant(kind, [value] * kind.count if isinstance(kind, self.ir.VectorType) else value)

    def add(self, base: Any, count: Any, size: int = 1) -> Any:
        """base + count * size; `count` is a value or a Python number."""
        if isinstance(count, int):
            return self.builder.add(base, self.number(count * size))
        return self.builder.add(base, self.builder.mul(count, self.number(size)))

    def load(self, address: Any, kind: Any) -> Any:
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        value.align = 4 if kind != self.int64 else 8
        return value

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = 4

    def broadcast(self, value: Any) -> Any:
        """A vector with this value in all lanes."""
        vector = self.ir.VectorType(value.type, LANES)
        undefined = self.ir.Constant(vector, self.ir.Undefined)
        single = self.builder.insert_element(undefined, value, self.ir.Constant(self.int32, 0))
        return self.builder.shuffle_vector(single, undefined, self.constant(0, self.ints))

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        """The given lanes of two vectors side by side."""
        index = self.ir.Constant(self.ir.VectorType(self.int32, len(lanes)), lanes)
        return self.builder.shuffle_vector(a, b, index)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        """Call an instruction of LLVM by name."""
        from numba.core import cgutils

        kind = self.ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, of floats."""
        return self.call(f"llvm.fma.v{LANES}f32", self.floats, a, b, c)

    def sum_lanes(self, vector: Any) -> Any:
        """The sum of the lanes of a vector of floats, in any order."""
        from numba.core import cgutils

        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        kind = self.ir.FunctionType(self.float32, [self.float32, self.floats])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, [self.constant(-0.0, self.float32), vector], fastmath=("reassoc",))

    def variable(self, initial: Any) -> Any:
        """A variable in a register: change it with builder.store, read it with builder.load."""
        from numba.core import cgutils

        slot = cgutils.alloca_once(self.builder, initial.type)
        self.builder.store(initial, slot)
        return slot

    def loop(self, count: Any, step: int, body: Callable[[Any], None]) -> None:
        """Call `body` with the index 0, step, 2 step, … below `count`."""
        from numba.core import cgutils

        with cgutils.for_range_slice(self.builder, self.number(0), count, self.number(step), self.int64) as (index, _):
            body(index)
