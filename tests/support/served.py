"""The served formats' definitions, written down apart from `convert`: values are the nearest ones of a list."""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([(8 * (e > 0) + m) / 8 * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:-1])
INTEGERS = np.arange(0, 300)
SMALLEST = 2.0**-90
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
#: scheme -> rows and columns that share a scale (0: all), what the largest is divided by, and the values' magnitudes.
SCHEMES = {
    "int4-32": ((1, 32), 7.5, INTEGERS[:9]),
    "int4-128": ((1, 128), 7.5, INTEGERS[:9]),
    "int4-32-zeros": ((1, 32), 15, None),
    "int4-128-zeros": ((1, 128), 15, None),
    "int8": ((1, 0), 127.5, INTEGERS[:129]),
    "fp8-row": ((1, 0), 448, E4M3),
    "fp8-tensor": ((0, 0), 448, E4M3),
    "fp8-block": ((128, 128), 448, E4M3),
    "nvfp4": ((1, 16), 6, E2M1),
    "mxfp4": ((1, 32), None, E2M1),
}


def nearest(x, magnitudes):
    """The nearest of some magnitudes with the sign of x; of two that are as near the one with an even number."""
    distance = np.abs(np.abs(x.astype(np.float64))[..., None] - magnitudes)
    first = distance.argmin(axis=-1)
    second = np.minimum(first + 1, len(magnitudes) - 1)
    tie = np.take_along_axis(distance, second[..., None], -1)[..., 0] == distance.min(axis=-1)
    return np.copysign(magnitudes[np.where(tie & (first % 2 == 1), second, first)], x).astype(np.float32)


def stored_scale(largest, divisor, dtype):
    scale = np.asarray(np.float32(largest) / np.float32(divisor)).astype(dtype).astype(np.float32)
    return scale if scale >= SMALLEST else np.float32(EPSILON[np.dtype(dtype).name])


def values_of(matrix, scheme, dtype, top):
    """A matrix decoded, as float32 values of `dtype`; `top` is the largest of all that share its scale."""
    (high, wide), divisor, magnitudes = SCHEMES[scheme]
    rows, columns = matrix.shape
    high, wide = high or rows, wide or columns
    result = np.empty_like(matrix)
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            place = slice(row, row + high), slice(column, column + wide)
            result[place] = _group(matrix[place], scheme, divisor, magnitudes, dtype, np.float32(top))
    return result.astype(dtype).astype(np.float32)


def _group(w, scheme, divisor, magnitudes, dtype, top):
    largest = np.abs(w).max()
    if magnitudes is None:
        low, high = min(w.min(), np.float32(0)), max(w.max(), np.float32(0))
        scale = stored_scale(high - low, divisor, dtype)
        zero = nearest(np.clip(np.float32(-8) - low / scale, -8, 7), INTEGERS[:9])
        return (nearest(np.clip(w / scale + zero, -8, 7), INTEGERS[:9]) - zero) * scale
    if scheme == "nvfp4":
        whole = np.float32(2688) / top
        local = nearest(np.minimum(whole * (largest / np.float32(6)), 448), E4M3)
        scale = (local if local else np.float32(0.125)) / whole
    elif scheme == "mxfp4":
        scale = np.float32(2.0 ** (np.floor(np.log2(largest)) - 2)) if largest else np.float32(1)
    else:
        scale = stored_scale(top if scheme == "fp8-tensor" else largest, divisor, dtype)
    limit = magnitudes[-1] - (scheme[:3] == "int") * (w >= 0)  # one integer more below zero
    return nearest(np.clip(w / scale, -magnitudes[-1], limit), magnitudes) * scale
