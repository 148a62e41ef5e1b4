"""The kernels on a GPU: Triton, the same functions as `kernels/cpu` and bit-identical results.

They also run in Triton's interpreter, on tensors of the CPU, where `TRITON_INTERPRET` is set before the first import.
"""
