"""The digest's sum on a CPU, compiled: one pass over the elements, four rows at a time, nothing allocated.

Importing this compiles for about two seconds, or takes what an earlier process compiled from numba's cache on the disk.
Two things make it as fast as reading: columns that the compiler knows to be adjacent, in vectors of 512 bits, and four rows
far apart, which share the columns' keys and are four streams of memory, whose wait is the largest part.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import binding
from numba.core import config


def _prefer_wide_vectors() -> None:
    """LLVM keeps to 256 bits on most Xeons, unless told. Only what is compiled first has a say, and no setting of a user."""
    found = binding.get_host_cpu_features()
    if not found.get("avx512dq") or config.CPU_NAME is not None or config.CPU_FEATURES is not None:  # type: ignore[attr-defined]
        return
    config.CPU_NAME = binding.get_host_cpu_name()  # type: ignore[attr-defined]
    config.CPU_FEATURES = f"{found.flatten()},-prefer-256-bit"  # type: ignore[attr-defined]


def _compiled(function: Any, signatures: Any = None) -> Any:
    try:
        return numba.njit(signatures, nogil=True, cache=True)(function)
    except RuntimeError:  # no folder that numba could keep its cache in
        return numba.njit(signatures, nogil=True)(function)


def _key_sum(bits, stride, row_keys, first_row, last_row, column_keys, first_column, last_column):  # noqa: ANN001, ANN202  # numba's own types
    row_keys, column_keys = row_keys[first_row:last_row], column_keys[first_column:last_column]
    rows, columns = row_keys.size, column_keys.size
    total = np.uint64(0)
    quarter = rows // 4
    for r0 in range(quarter):
        r1, r2, r3 = r0 + quarter, r0 + 2 * quarter, r0 + 3 * quarter
        bits0, bits1 = bits[r0 * stride : r0 * stride + columns], bits[r1 * stride : r1 * stride + columns]
        bits2, bits3 = bits[r2 * stride : r2 * stride + columns], bits[r3 * stride : r3 * stride + columns]
        sum0 = sum1 = sum2 = sum3 = np.uint64(0)
        for c in range(columns):
            key = column_keys[c]
            sum0 += key * np.uint64(bits0[c])
            sum1 += key * np.uint64(bits1[c])
            sum2 += key * np.uint64(bits2[c])
            sum3 += key * np.uint64(bits3[c])
        total += row_keys[r0] * sum0 + row_keys[r1] * sum1 + row_keys[r2] * sum2 + row_keys[r3] * sum3
    for r in range(4 * quarter, rows):
        row, row_sum = bits[r * stride : r * stride + columns], np.uint64(0)
        for c in range(columns):
            row_sum += column_keys[c] * np.uint64(row[c])
        total += row_keys[r] * row_sum
    return total


_prefer_wide_vectors()
_keys = numba.types.Array(numba.uint64, 1, "C")  # C: adjacent elements
key_sum = _compiled(
    _key_sum,
    [
        numba.uint64(numba.types.Array(bits, 1, "C"), numba.int64, *(_keys, numba.int64, numba.int64) * 2)
        for bits in (numba.uint32, numba.uint16)
    ],
)
"""key_sum(bits, stride, row_keys, first_row, last_row, column_keys, first_column, last_column): the sum mod 2^64 of
row_keys[first_row + r] * column_keys[first_column + c] * bits[r * stride + c], r and c up to the last ones, which are left out."""
