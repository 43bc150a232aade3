"""Whether block scales look swizzled in place: as ``checkpoint.scale_order``, without torch.

The tests hold both against each other; see there for what is compared and why.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.scan.statistics import NAN, VALUES

Bytes = npt.NDArray[np.uint8]

_LEAST_GAIN, _LEAST_SIGMAS, _LEAST_RATIO = 0.03, 8.0, 1.5
_ROWS, _COLUMNS = 128, 4
_SMALLEST = np.float32(2.0**-9)


def looks_swizzled(scales: Bytes) -> bool:
    """Whether one matrix's scales, uint8 [R, C], make much more sense after unswizzling.

    Never where a byte is NaN or negative, sizes are not whole tiles, or there is one column tile.
    """
    rows, columns = scales.shape
    if rows % _ROWS or columns % _COLUMNS or columns == _COLUMNS or int(scales.max()) >= NAN:
        return False
    logs = np.log2(np.maximum(VALUES, _SMALLEST))[scales]
    tiles = logs.reshape(rows // _ROWS, columns // _COLUMNS, 32, 4, _COLUMNS)
    # [row tile, column tile, r % 32, r // 32, c] back to rows and columns.
    turned = _explained(tiles.transpose(0, 3, 2, 1, 4).reshape(rows, columns))
    linear = _explained(logs)
    noise = 2.0 * (rows + columns) ** 0.5 / (rows * columns)
    least = max(_LEAST_GAIN, _LEAST_SIGMAS * noise)
    return turned - linear > least and turned > _LEAST_RATIO * linear


def _explained(logs: npt.NDArray[np.float32]) -> float:
    """Share of variance that row means and column means explain."""
    centred = logs - logs.mean(dtype=np.float64)
    total = float(np.square(centred).sum(dtype=np.float64))
    if total == 0:
        return 0.0
    rows, columns = centred.shape
    by_row = columns * float(np.square(centred.mean(axis=1, dtype=np.float64)).sum())
    by_column = rows * float(np.square(centred.mean(axis=0, dtype=np.float64)).sum())
    return (by_row + by_column) / total
