"""The kernels on the CPU: numba, compiled at the first call and cached on disk, with the GIL released.

Every function takes flat contiguous arrays of unsigned integers, 8 to 64 bits wide, and works on one tile of them;
`workers.Workers` runs tiles side by side.
"""
