"""
The cost of saves: storage during a run, requests to a bucket, and idle GPUs.

The model: every save is pushed to a bucket, which is collected every hour if anything is to go. The requests are those
that `layerstore.remote` makes; a test compares them with a real push, collection and composite.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, gcd, isfinite
from typing import Any, Self

from layerstore.errors import InvalidInput
from layerstore.limits import REMOTE_GRACE_SECONDS, REMOTE_PART_BYTES

MONTH_SECONDS = 365.25 * 86400 / 12
GB = 10**9
COLLECTED_SECONDS = 3600.0
"""How often a bucket is collected."""

# Names per listing answer of a bucket, and the number of object folders to list.
_LISTED_MAX, _OBJECT_FOLDERS = 1_000, 256
# A push sends objects and blobs and lists the folders of objects. Besides that, it writes the record and a file to
# learn the time, reads store.json and that file's time, and lists records twice, and running and ended collections.
_PUSH_PUTS, _PUSH_GETS, _PUSH_LISTS = 2, 2, 4
# A collection: two marks, and a look at each; store.json; records and pins twice each, the trash once, old marks and
# parts.
_COLLECTION_PUTS, _COLLECTION_GETS, _COLLECTION_LISTS = 2, 3, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The prices of a bucket and of GPUs in dollars, in the units of price lists."""

    gb_month: float
    """Per GB stored for a month."""
    put: float
    """Per 1,000 requests that write or list."""
    get: float
    """Per 1,000 requests that read."""
    gpu_hour: float
    """Per GPU for an hour."""

    def __post_init__(self) -> None:
        for price in (self.gb_month, self.put, self.get, self.gpu_hour):
            if not (isfinite(price) and price >= 0):
                raise InvalidInput(f"a price cannot be {price}", hint=_PRICES)

    @classmethod
    def parse(cls, text: str) -> Self:
        """
        Read ``GB-month,PUT,GET,GPU-hour``.

        >>> Prices.parse("0.023,0.005,0.0004,2.5").gpu_hour
        2.5
        """
        words = text.split(",")
        try:
            gb_month, put, get, gpu_hour = map(float, words)
        except ValueError as exc:
            what = f"{len(words)} of four" if len(words) != 4 else "not all of them numbers"
            raise InvalidInput(f"--price {text!r} are no prices: {what}", hint=_PRICES) from exc
        return cls(gb_month=gb_month, put=put, get=get, gpu_hour=gpu_hour)


_PRICES = "dollars for a GB-month, 1,000 PUTs, 1,000 GETs and a GPU-hour: --price 0.023,0.005,0.0004,2.50"


@dataclass(frozen=True, slots=True)
class Files:
    """Files that are saved together."""

    count: int = 0
    size_bytes: int = 0
    puts: int = 0
    """Requests that send them."""

    @classmethod
    def alike(cls, count: int, size_bytes: int) -> Self:
        """Return *count* files of *size_bytes* each; those larger than a part are uploaded in parts."""
        parts = ceil(size_bytes / REMOTE_PART_BYTES)
        return cls(count, count * size_bytes, count * (parts + 2 if parts > 1 else 1))

    def __add__(self, other: "Files") -> "Files":
        """Return both together."""
        return Files(self.count + other.count, self.size_bytes + other.size_bytes, self.puts + other.puts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Files that are saved at the same saves, such as those of layers that are due together."""

    files: Files
    """What each of these saves writes."""
    blobs: int = 0
    """Version blobs that name them."""
    due: Sequence[int] = ()
    """When in a cycle, counted from 0. The run's first save, which is exact and full, is before the first cycle."""
    cycle: int = 1
    is_in_first: bool = True

    def saves(self, count: int) -> Iterator[int]:
        """Yield the numbers of the saves, of *count*, that have them."""
        if self.is_in_first:
            yield 0
        for begin in range(1, count, self.cycle):
            yield from (begin + at for at in self.due if begin + at < count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """When a run saves, and which saves it keeps."""

    run_seconds: float
    interval_seconds: float
    every: int
    """Steps from save to save."""
    saves: int
    keep_last: int | None
    keep_every: int | None
    """Steps."""

    @property
    def has_rules(self) -> bool:
        """Whether anything is ever removed."""
        return self.keep_last is not None or self.keep_every is not None

    @property
    def last(self) -> int:
        """How many of the newest saves stay; the newest one does under any rule."""
        return self.keep_last or 1

    @property
    def keeper(self) -> int | None:
        """The interval, in saves, at which one save stays for good."""
        return None if self.keep_every is None else self.keep_every // gcd(self.keep_every, self.every)

    @property
    def kept(self) -> int:
        """How many saves are kept when the run ends."""
        if not self.has_rules:
            return self.saves
        newest = set(range(max(self.saves - self.last, 0), self.saves))
        return len(newest if self.keeper is None else newest | set(range(self.keeper - 1, self.saves, self.keeper)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The amount of storage used."""

    byte_seconds: float
    """Over the run."""
    end_bytes: int
    """When it ends."""
    end_files: int


def stored(groups: Sequence[Group], times: Timetable, *, lingers_seconds: float) -> Stored:
    """Return the storage used: each version stays until no kept save has it, plus *lingers_seconds*."""
    byte_seconds, end_bytes, end_files = 0.0, 0, 0
    for group in groups:
        begins = list(group.saves(times.saves))
        for begin, end in zip(begins, [*begins, times.saves][1:], strict=True):
            stays = not times.has_rules or bool(times.keeper and end // times.keeper > begin // times.keeper)
            # The last save with this version is *end* - 1; *last* saves later, it is no longer among the newest.
            goes_seconds = (end + times.last) * times.interval_seconds + lingers_seconds
            until_seconds = times.run_seconds if stays else min(goes_seconds, times.run_seconds)
            byte_seconds += group.files.size_bytes * (until_seconds - (begin + 1) * times.interval_seconds)
            if stays or goes_seconds > times.run_seconds:
                end_bytes += group.files.size_bytes
                end_files += group.files.count + group.blobs
    return Stored(byte_seconds=byte_seconds, end_bytes=end_bytes, end_files=end_files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A run's use of a bucket."""

    stored: Stored
    puts: int
    """Requests that write."""
    lists: int
    """Requests that list, at the price of writes."""
    gets: int
    """Requests that read, or query one name; at the end of the run, the newest save is read once."""

    def fields(self, prices: Prices | None, *, held_gpu_seconds: float) -> dict[str, Any]:
        """Return the usage with its cost at *prices*."""
        found = {"held_bytes": self.stored.end_bytes, "puts": self.puts, "lists": self.lists, "gets": self.gets}
        if prices is None:
            return found | {"cost": None}
        cost = {
            "storage": self.stored.byte_seconds / GB / MONTH_SECONDS * prices.gb_month,
            "requests": ((self.puts + self.lists) * prices.put + self.gets * prices.get) / 1000,
            "held_up": held_gpu_seconds / 3600 * prices.gpu_hour,
        }
        return found | {"cost": cost | {"total": sum(cost.values())}}


def usage_of_files(files: Files, times: Timetable) -> Usage:
    """Return the usage by full checkpoints of *files*, assuming that old ones are removed at once."""
    full = Group(files=files, due=(0,))
    return Usage(
        stored=stored([full], times, lingers_seconds=0.0), puts=files.puts * times.saves, lists=0, gets=files.count
    )


def usage_of_store(groups: Sequence[Group], times: Timetable, *, ranks: int) -> Usage:
    """Return the usage of its remote by a store with the objects of *groups*."""
    lingers_seconds = REMOTE_GRACE_SECONDS + COLLECTED_SECONDS if times.has_rules else 0.0
    found = stored(groups, times, lingers_seconds=lingers_seconds)
    lasting = times.kept + (ceil(lingers_seconds / times.interval_seconds) if times.has_rules else 0)
    counts = [sum(1 for _ in group.saves(times.saves)) for group in groups]
    versions = sum(group.blobs * count for group, count in zip(groups, counts, strict=True))
    blobs = versions + ranks * times.saves  # with the states of ranks
    objects = sum(group.files.puts * count for group, count in zip(groups, counts, strict=True))
    # With rules, the amount soon becomes constant; without, it grows steadily, so the average is half of it.
    there = (found.end_files + ranks * min(lasting, times.saves)) / (1 if times.has_rules else 2)
    folders = max(_OBJECT_FOLDERS, ceil(there / _LISTED_MAX))
    puts, lists = objects + blobs + times.saves * _PUSH_PUTS, times.saves * (folders + _PUSH_LISTS)
    # To read the newest save: store.json, the records, and all that it names.
    gets = times.saves * _PUSH_GETS
    written = [group for group, count in zip(groups, counts, strict=True) if count]
    gets += 1 + times.kept + sum(group.files.count + group.blobs for group in written) + ranks
    if times.has_rules:
        collections, gone = int(times.run_seconds // COLLECTED_SECONDS), times.saves - times.kept
        puts += collections * _COLLECTION_PUTS + gone
        lists += collections * (folders + _COLLECTION_LISTS)
        # A collection reads each record when it is new and when it goes, each blob once, and the trash each time, but
        # for what it moves there.
        trashed = min(gone, ceil(lingers_seconds / times.interval_seconds))
        gets += collections * (_COLLECTION_GETS + trashed) + times.saves + blobs
    return Usage(stored=found, puts=puts, lists=lists, gets=gets)
