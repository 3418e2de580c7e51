"""Ways to make the interpreter of Triton 3.6 to 3.9 faster, without which tests of kernels take
several times as long.

None of them changes what an operation computes or refuses.
"""

from dataclasses import replace

import triton.language as tl


def speed_up(interpreter) -> None:
    """Change the module triton.runtime.interpreter, and Triton's language where it is run."""
    _prepare_once(interpreter)
    _spare_work(interpreter)
    _share_types(tl.core)
    _remember_pairs_of_types(type(interpreter.interpreter_semantic))
    _read_integers(interpreter)


def _prepare_once(interpreter) -> None:
    """Triton's interpreter prepares its language anew whenever a kernel calls a function, which
    takes half of the time.

    Once a launch is enough for each module.
    """
    patch, prepared = interpreter._patch_lang, {}

    class Scope(interpreter._LangPatchScope):
        def restore(self):
            prepared.clear()
            super().restore()

    def patch_once(function):
        module = id(function.__globals__)
        if module not in prepared:
            prepared[module] = patch(function)
        return prepared[module]

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, patch_once


def _spare_work(interpreter) -> None:
    """Leave out two things that take 40 % of the interpreter's time.

    It computes each sum and product of integers twice to find overflows, which it now does for
    tests with the fixture find_overflows. It makes a table of all dtypes for each operation.
    """
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    find, found = interpreter._get_np_dtype, {}

    def find_once(dtype):
        if dtype.name not in found:
            found[dtype.name] = find(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = find_once


def _share_types(core) -> None:
    """Make one block type for all blocks of a dtype and a shape.

    Each operation makes several, and then checks and copies their shapes.
    """
    Block, check = core.block_type, core.block_type.__init__
    shared = {}

    def make(cls, element_ty, shape):
        values = shape.values if isinstance(shape, core.tuple) else shape
        if cls is not Block or any(type(size) is not int for size in values):
            return object.__new__(cls)
        key = id(element_ty), *values
        if key not in shared:
            block = object.__new__(cls)
            check(block, element_ty, shape)
            shared[key] = block  # which keeps element_ty, and so its id
        return shared[key]

    def check_once(self, element_ty, shape):
        if "name" not in vars(self):
            check(self, element_ty, shape)

    Block.__new__, Block.__init__ = make, check_once

    def describe(self, handle, type):
        """As Triton's, with one shape for all tensors of a type."""
        described = vars(type).get("described")
        if described is None:
            as_tensor(self, handle, type)
            type.described = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = described

    as_tensor, core.tensor.__init__ = core.tensor.__init__, describe


def _remember_pairs_of_types(semantic) -> None:
    """Find out once for two types which type two operands are computed in, and which shape."""
    broadcast, compute = semantic.broadcast_impl_value, semantic.computation_type_impl
    cast, plans, computed = semantic.cast, {}, {}

    def become(self, x, type):
        """Return x as a block of a type: as it is, a scalar repeated, or with longer sides."""
        if x.type is type:
            return x
        if x.type.is_block():
            handle = self.builder.create_broadcast(x.handle, type.shape.values)
        else:
            handle = self.builder.create_splat(type, x.handle)
        return tl.tensor(handle, type)

    def broadcast_once(self, lhs, rhs):
        types = lhs.type, rhs.type
        if types[0] is types[1]:
            return lhs, rhs
        key = id(types[0]), id(types[1])
        if key in plans:
            _, left, right = plans[key]
            return become(self, lhs, left), become(self, rhs, right)
        pair = broadcast(self, lhs, rhs)
        if len({len(type.shape) for type in types if type.is_block()}) < 2:
            plans[key] = types, *(x.type for x in pair)  # types, so that ids stay theirs
        return pair

    def compute_once(self, a, a_is_scalar, b, b_is_scalar, div_or_mod):
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in computed:
            computed[key] = compute(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return computed[key]

    def cast_others(self, x, dtype, *args, **options):
        return x if x.dtype is dtype else cast(self, x, dtype, *args, **options)

    semantic.cast, semantic.broadcast_impl_value = cast_others, broadcast_once
    semantic.computation_type_impl = compute_once


def _read_integers(interpreter) -> None:
    """Let Triton 3.6 take an integer from an array of one, which NumPy 2.4 refuses to convert."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor
