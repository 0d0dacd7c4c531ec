"""
LMDB's files, made safe before LMDB maps and trusts them.

Pages of the data file have no checksums: a truncated file, or an offset that points outside its page, kills the process
with a signal instead of raising an error. So every page that the trees reach is checked first. ``lmdb.verify`` checks
all of this and more, but takes several times as long (ADR 31); tests compare the two. This module knows only the kind
of table that the index uses, and refuses all others.
"""

import mmap
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from layerstore.limits import PAGE_BYTES

_LOCK_FILE_BYTES = 2 * PAGE_BYTES  # 128 bytes, then 64 for each of LMDB's 126 readers
# A try fails only if another process commits during it.
_TRIES = 20

_METAS = 2
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_NO_ROOT = 2**64 - 1
_DEPTH_MAX = 32  # LMDB's own limit: a cursor has room for no more
_NODE_IS_LARGE = 1
# Flags of LMDB's table of free pages, whose keys are integers, and of our table: no duplicate keys, no named tables.
_FREE_FLAGS, _MAIN_FLAGS = 8, 0

_HEADER = struct.Struct("=QHHHH")  # number, padding, flags, end of the offsets, start of the nodes
_NODE = struct.Struct("=HHHH")  # value size (2 parts), flags, key size; in a branch: page number (3 parts), key size
_NUMBER = struct.Struct("=Q")
_TREE = "IHHQQQQQ"
_META_PAGE = struct.Struct(f"={_HEADER.format[1:]}IIQQ{_TREE}{_TREE}QQ")
_HALVES = PAGE_BYTES // 2
_NODE_BEGINS_MAX = PAGE_BYTES - _NODE.size


class TableEntry(NamedTuple):
    """An entry of LMDB's meta page about one of its two tables."""

    padding: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int


class _Unsound(Exception):
    """The file is not as LMDB writes it."""


def preallocate_lock_file(path: Path) -> None:
    """Allocate the lock file's blocks: on a full disk, LMDB would be killed by a signal instead of getting an error."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        if os.fstat(fd).st_size < _LOCK_FILE_BYTES:
            os.posix_fallocate(fd, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(fd)


def problem_in(path: Path) -> str | None:
    """Return what is wrong with the file *path*; None if LMDB can open it; an empty file is fine."""
    for _ in range(_TRIES):
        before = _meta_pages(path)
        problem = _problem_now(path)
        # Believe a problem only if no other process committed during the check: only a commit makes LMDB reuse pages.
        if problem is None or _meta_pages(path) == before:
            return problem
    return None


def _meta_pages(path: Path) -> bytes:
    """Return LMDB's first two pages; every commit changes one of them."""
    with path.open("rb") as file:
        return file.read(_METAS * PAGE_BYTES)


def _problem_now(path: Path) -> str | None:
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if not size_bytes:
            return None
        pages = size_bytes // PAGE_BYTES
        if pages < _METAS:
            return "it was cut short"
        # Map the file, as LMDB will: copying a long index into memory would take longer than checking it.
        with (
            mmap.mmap(file.fileno(), pages * PAGE_BYTES, prot=mmap.PROT_READ) as data,
            memoryview(data) as view,
            view.cast("H") as halves,
            view.cast("Q") as numbers,
        ):
            try:
                _Check(data, halves, numbers, pages).run()
            except _Unsound as problem:
                return str(problem)
    return None


class _Check:
    """One check of all pages in use."""

    def __init__(self, data: mmap.mmap, halves: memoryview, numbers: memoryview, pages: int) -> None:
        self._data = data
        self._halves = halves
        # One list per header field, over all pages.
        self._numbers: list[int] = numbers[:: PAGE_BYTES // 8].tolist()
        self._flags: list[int] = halves[5::_HALVES].tolist()
        self._lower: list[int] = halves[6::_HALVES].tolist()
        self._upper: list[int] = halves[7::_HALVES].tolist()
        self._end = pages
        self._is_taken = bytearray(pages)

    def run(self) -> None:
        """Raise _Unsound if anything is wrong."""
        # The meta page of the later transaction counts.
        last_page, _, free, main = max(map(self._meta, range(_METAS)), key=lambda meta: meta[1])
        if not _METAS - 1 <= last_page < self._end:
            raise _Unsound("it was cut short")
        self._end = last_page + 1
        lists: list[bytes] = []
        self._walk(free, is_free=True, lists=lists)
        self._walk(main, is_free=False, lists=[])
        for listed in lists:
            self._take(_pages_listed(listed))
        # A page that is neither free nor reached by a tree shows that the pointer to it was overwritten.
        if sum(self._is_taken) != self._end - _METAS:
            raise _Unsound("a page is neither used nor free")

    def _meta(self, page: int) -> tuple[int, int, TableEntry, TableEntry]:
        fields = _META_PAGE.unpack_from(self._data, page * PAGE_BYTES)
        free, main = TableEntry(*fields[9:17]), TableEntry(*fields[17:25])
        last_page, txn = fields[25:]
        is_sound = (
            (fields[0], fields[2]) == (page, _META)
            and fields[5:7] == (_MAGIC, _VERSION)
            and (free.padding, free.flags) == (PAGE_BYTES, _FREE_FLAGS)
            and (main.padding, main.flags) == (0, _MAIN_FLAGS)
            # LMDB writes the two meta pages in turn.
            and (not txn or txn % _METAS == page)
        )
        if not is_sound:
            raise _Unsound("it was cut short or overwritten")
        return last_page, txn, free, main

    def _take(self, pages: Iterable[int]) -> None:
        """Mark *pages* as used or free; raise if a page was marked before."""
        for page in pages:
            if not _METAS <= page < self._end or self._is_taken[page]:
                raise _Unsound(f"page {page} is used twice, or does not exist")
            self._is_taken[page] = 1

    def _walk(self, tree: TableEntry, *, is_free: bool, lists: list[bytes]) -> None:
        """Check all pages of *tree*; add the values of the table of free pages to *lists*."""
        level = [] if tree.root == _NO_ROOT else [tree.root]
        if tree.depth > _DEPTH_MAX or bool(tree.depth) != bool(level):
            raise _Unsound("a table's depth is wrong")
        # Level by level: a page that leads back up is met twice, which `_take` refuses, so this terminates.
        branches = 0
        for _ in range(tree.depth - 1):
            branches += len(level)
            self._take(level)
            level = [child for page in level for child in self._children(page, is_free=is_free)]
        self._take(level)
        entries, overflows, before = 0, 0, b""
        for page in level:
            for at, value_bytes, flags, key in self._nodes(page, _LEAF, is_free=is_free):
                if entries and key <= before:
                    raise _Unsound(f"the keys on page {page} are out of order")
                before = key
                entries += 1
                begin = at + _NODE.size + len(key)
                if flags:
                    begin, pages = self._large(page, begin, value_bytes, flags)
                    overflows += pages
                elif begin + value_bytes > (page + 1) * PAGE_BYTES:
                    raise _Unsound(f"a value on page {page} reaches outside of it")
                if is_free:
                    lists.append(self._data[begin : begin + value_bytes])
        if (branches, len(level), overflows, entries) != tree[3:7]:
            raise _Unsound("a table does not have the pages or entries that it states")

    def _nodes(self, page: int, kind: int, *, is_free: bool) -> list[tuple[int, int, int, bytes]]:
        """Return each node on *page*, which must be of *kind*: its position, size of the value, flags and key."""
        lower, upper, start = self._lower[page], self._upper[page], page * PAGE_BYTES
        if self._numbers[page] != page or self._flags[page] != kind:
            raise _Unsound(f"page {page} is not what it is used as")
        if not _HEADER.size < lower <= upper <= PAGE_BYTES or lower % 2:
            raise _Unsound(f"page {page} has impossible bounds")
        nodes = []
        for place in range((start + _HEADER.size) // 2, (start + lower) // 2):
            offset = self._halves[place]
            if not upper <= offset <= _NODE_BEGINS_MAX:
                raise _Unsound(f"a node of page {page} lies outside of it")
            at = start + offset
            low, high, flags, key_bytes = _NODE.unpack_from(self._data, at)
            if offset + key_bytes > _NODE_BEGINS_MAX:
                raise _Unsound(f"a key on page {page} reaches outside of it")
            key = self._data[at + _NODE.size : at + _NODE.size + key_bytes]
            if is_free and sys.byteorder == "little":
                key = key[::-1]  # a native integer: with its bytes reversed, it compares as the number does
            nodes.append((at, low | high << 16, flags, key))
        return nodes

    def _children(self, page: int, *, is_free: bool) -> Iterator[int]:
        before = b""
        for place, (_, low, high, key) in enumerate(self._nodes(page, _BRANCH, is_free=is_free)):
            if place > 1 and key <= before:  # the first node has no key
                raise _Unsound(f"the keys on page {page} are out of order")
            before = key
            yield low | high << 32  # in a branch, the flags are the upper part of the page number

    def _large(self, page: int, at: int, value_bytes: int, flags: int) -> tuple[int, int]:
        """Return where the large value of the node before *at* starts, and how many pages it fills."""
        if flags != _NODE_IS_LARGE or at + _NUMBER.size > (page + 1) * PAGE_BYTES:
            raise _Unsound(f"a node of page {page} is of a kind that is not used here")
        (first,) = _NUMBER.unpack_from(self._data, at)
        count = (_HEADER.size + value_bytes - 1) // PAGE_BYTES + 1
        self._take(range(first, first + count))
        # An overflow page keeps its number of pages in the fields that other pages use for their bounds.
        stated = self._lower[first] | self._upper[first] << 16
        if (self._numbers[first], self._flags[first], stated) != (first, _OVERFLOW, count):
            raise _Unsound(f"page {first} is not what it is used as")
        return first * PAGE_BYTES + _HEADER.size, count


def _pages_listed(data: bytes) -> Iterator[int]:
    """Yield the pages that *data* lists: a count, then page numbers."""
    if not data or len(data) % 8:
        raise _Unsound("a list of free pages is torn")
    count, *pages = (number for (number,) in _NUMBER.iter_unpack(data))
    if count != len(pages) or sorted(pages, reverse=True) != pages:
        raise _Unsound("a list of free pages is torn")
    yield from pages
