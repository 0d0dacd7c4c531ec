"""The mean of the numbers of several saves: summed in double precision, and rounded once."""

from collections.abc import Iterable

from layerstore.numbers.rounding import Bytes, convert


def mean(parts: Iterable[tuple[Bytes, float]], *, dtype: str) -> memoryview:
    """
    Return the weighted mean of *parts* as fp32; all have the same number of elements, of type *dtype*.

    >>> import numpy as np
    >>> parts = [(np.float32([1, 2]).tobytes(), 1.0), (np.float32([4, 8]).tobytes(), 2.0)]
    >>> np.frombuffer(mean(parts, dtype="F32"), np.float32).tolist()
    [3.0, 6.0]
    """
    import numpy as np

    total, weights = None, 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaNs go into the mean
        for data, weight in parts:
            numbers = np.frombuffer(convert(data, source=dtype, target="F32"), "<f4")
            if total is None or weight != 1:
                numbers = numbers.astype("<f8")  # before it is weighted: numpy 1 would multiply in fp32
                numbers *= weight
            total = numbers if total is None else np.add(total, numbers, out=total)
            weights += weight
        assert total is not None
        total /= weights
        return total.astype("<f4").data.cast("B")
