"""Passes and sizes for any number of rows, from those that were measured with one row and with two."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher

from ..recording.segments import PassRecord
from ..records import CollectiveRecord, Work


def number_at_rows(one: int, two: int, rows: int) -> int:
    """Return the number for some rows on the line through those of one row and of two."""
    return one + (two - one) * (rows - 1)


def pass_at_rows(one: PassRecord, two: PassRecord, rows: int) -> PassRecord:
    """Return the pass for some rows, from those of one row and of two; peak and change are on a line."""
    peak, change = number_at_rows(one.peak, two.peak, rows), number_at_rows(one.change, two.change, rows)
    work = one.work if rows == 1 else tuple(_work_at_rows(one.work, two.work, rows))
    return PassRecord(peak, change, work)


def _work_at_rows(one: Sequence[Work], two: Sequence[Work], rows: int) -> Iterator[Work]:
    """Yield the work for more than one row: that of two rows, scaled.

    A model may do other work with one row, as tensors with a dimension of size 1 are contiguous more often. Work of two rows
    without a counterpart with one row is proportional to the rows.
    """
    names, others = [_identity(each) for each in one], [_identity(each) for each in two]
    if names == others:
        yield from (_on_line(*pair, rows) for pair in zip(one, two, strict=True))
        return
    for change, begin, end, first, last in SequenceMatcher(None, names, others, autojunk=False).get_opcodes():
        if change == "equal":
            yield from (_on_line(*pair, rows) for pair in zip(one[begin:end], two[first:last], strict=True))
        else:
            yield from (_in_proportion(each, rows) for each in two[first:last])


def _identity(work: Work) -> Hashable:
    return (work.kind, work.ranks) if isinstance(work, CollectiveRecord) else (work.name, work.dtype, len(work.shape))


def _on_line(one: Work, two: Work, rows: int) -> Work:
    nbytes = number_at_rows(one.nbytes, two.nbytes, rows)
    if isinstance(one, CollectiveRecord) or isinstance(two, CollectiveRecord):
        return one._replace(nbytes=nbytes)
    shape = tuple(number_at_rows(*pair, rows) for pair in zip(one.shape, two.shape, strict=True))
    return one._replace(nbytes=nbytes, flops=number_at_rows(one.flops, two.flops, rows), shape=shape)


def _in_proportion(two: Work, rows: int) -> Work:
    nbytes = two.nbytes * rows // 2
    if isinstance(two, CollectiveRecord):
        return two._replace(nbytes=nbytes)
    return two._replace(nbytes=nbytes, flops=two.flops * rows // 2)
