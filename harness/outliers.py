"""Metrics of a record against the range of earlier records of the same cell. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.records import MetricRecord, Record
from harness.status import Status

LEAST = 5  # earlier records, below which a range says nothing
FAR = 0.5  # widths of the range
MOST = 10  # earlier records that are looked at, the newest

_Key = tuple[str, str, str]  # check (empty: the cell's own), name, unit


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A metric outside of what it was in `records` earlier ones: `low` to `high`, in `unit`, as `value` is."""

    cell: str
    check: str
    name: str
    unit: str
    value: float
    low: float
    high: float
    records: int

    @property
    def beyond(self) -> float:
        """How far outside, in widths of the range; infinite where it never varied."""
        outside = max(self.low - self.value, self.value - self.high)
        width = self.high - self.low
        return outside / width if width > 0 else math.inf

    @property
    def far(self) -> bool:
        """Whether that is more than chance does: of what only varies, one in five is outside of ten others, but one in
        a hundred by half of their width."""
        return self.beyond >= FAR


@dataclass(slots=True)
class _Range:
    """What a metric is now, from `least` to `most` (a check may say it more than once), and what it was earlier."""

    least: float
    most: float
    low: float = math.inf
    high: float = -math.inf
    records: int = 0
    last: int = -1

    def add(self, value: float, number: int) -> None:
        self.low, self.high = min(self.low, value), max(self.high, value)
        if number != self.last:
            self.records, self.last = self.records + 1, number

    @property
    def inside(self) -> bool:
        """Once so, always so: a range only widens."""
        return self.low <= self.least and self.most <= self.high


def outliers(record: Record, earlier: Iterable[Record]) -> tuple[Outlier, ...]:
    """The metrics outside of the range of at least LEAST earlier records with equal axes.

    `earlier` is taken from, the newest first, only as long as that can change anything, and at most MOST times. What a
    run took over from another one counts once, and what says nothing of the version not at all.
    """
    far = _ranges(record)
    seen = {record.started}
    for other in earlier if far else ():
        if other.started in seen or other.started > record.started:
            continue
        seen.add(other.started)
        if other.axes == record.axes and other.status is not Status.MISS:
            _widen(far, other, len(seen))
            far = {key: one for key, one in far.items() if not one.inside}
        if not far or len(seen) > MOST:
            break
    return tuple(_outlier(record.cell, key, one) for key, one in far.items() if one.records >= LEAST)


def _ranges(record: Record) -> dict[_Key, _Range]:
    found: dict[_Key, _Range] = {}
    for metric in record.metrics if record.status is not Status.MISS else ():
        one = found.setdefault(_key(metric), _Range(metric.value, metric.value))
        one.least, one.most = min(one.least, metric.value), max(one.most, metric.value)
    return found


def _widen(far: Mapping[_Key, _Range], other: Record, number: int) -> None:
    for metric in other.metrics:
        one = far.get(_key(metric))
        if one is not None:
            one.add(metric.value, number)


def _key(metric: MetricRecord) -> _Key:
    return metric.check or "", metric.name, metric.unit


def _outlier(cell: str, key: _Key, one: _Range) -> Outlier:
    check, name, unit = key
    value = max(one.least, one.most, key=lambda value: max(one.low - value, value - one.high))
    return Outlier(
        cell=cell, check=check, name=name, unit=unit, value=value, low=one.low, high=one.high, records=one.records
    )
