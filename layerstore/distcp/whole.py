"""
Read FSDP's ``FULL_STATE_DICT`` form, the Trainer's default: a file of ``torch.save`` for the model and another for the
optimizer, with whole tensors.
"""

from collections.abc import Iterator
from pathlib import Path

from layerstore.distcp.metadata import Chunk, Entry
from layerstore.distcp.read import DcpFolder
from layerstore.errors import SourceCheckpoint
from layerstore.filenames import FSDP_MODEL, FSDP_OPTIMIZER
from layerstore.handover import KeyPath
from layerstore.source import damaged, real_path
from layerstore.tree import Located, Tensor, Tree
from layerstore.zero3 import distributed_at, refuse_file_per_rank, refuse_pointer
from layerstore.zero3.pt import Pickles, read_pt

_TOPS = {FSDP_MODEL: "model", FSDP_OPTIMIZER: "optim"}
"""The key below which a distributed checkpoint would have each file's contents."""


class WholeFolder(DcpFolder):
    """A ``FULL_STATE_DICT`` on disk, read as a distributed checkpoint in which each tensor is one chunk."""

    def __init__(self, path: Path, pickles: Pickles, *, follow: bool = False) -> None:
        """
        Read both files; see `DcpFolder`.

        Raises:
            SourceCheckpoint: A file is missing, damaged, untrusted, or a link.
        """
        self.path = path
        self._follow = follow
        self.metadata = [self.allowed(path / name) for name in _TOPS]
        self.entries: dict[str, Entry] = {}
        self.checks = []
        self._trees: dict[str, Tree] = {}
        for name, top in _TOPS.items():
            if not (path / name).is_file():
                raise SourceCheckpoint(
                    f"{path} is incomplete: {name} missing", hint="was it saved with save_only_model? unset that"
                )
            for steps, value in _leaves((top,), read_pt(path / name, pickles).tree):
                self._add(steps, value, file=name)

    def _add(self, steps: KeyPath, value: Tree, *, file: str) -> None:
        key = ".".join(map(str, steps))
        if key in self.entries:
            raise damaged(self.path / file, f"it has {key!r} twice")
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        # Where the tensor's storage lies: tensors with the same storage are the same tensor.
        place = value.storage.content if isinstance(value, Tensor) else None
        offset = place.offset_bytes if isinstance(place, Located) else 0
        # The chunk's size is never used: the tree has been read already.
        chunk = Chunk(offsets=(0,) * len(shape), sizes=shape, file=file, offset_bytes=offset, size_bytes=0)
        self.entries[key] = Entry(
            key=key,
            path=steps,
            dtype=value.storage.dtype if isinstance(value, Tensor) else None,
            shape=shape,
            chunks=(chunk,),
        )
        self._trees[key] = value

    def _content(self, entry: Entry, number: int) -> Tree:
        tree = self._trees[entry.key]
        self._note_checks(entry, [tree.storage] if isinstance(tree, Tensor) else [])
        return tree


def _leaves(steps: KeyPath, tree: Tree) -> Iterator[tuple[KeyPath, Tree]]:
    """Yield the values in nested maps, and in the list of param groups, each with the path to it."""
    # An empty map is itself a value, because it has no leaves.
    if isinstance(tree, dict) and tree:
        pairs = list(tree.items())
    elif isinstance(tree, list) and steps[-1] == "param_groups":  # other lists are settings, such as betas
        pairs = list(enumerate(tree))
    else:
        yield steps, tree
        return
    for step, value in pairs:
        yield from _leaves((*steps, step if isinstance(step, int) else str(step)), value)


def open_folder(path: Path, *, allowed_globals: frozenset[str] = frozenset(), follow: bool = False) -> DcpFolder:
    """
    Read the checkpoint in *path*, in either form; links in it are followed only with *follow*.

    Raises:
        SourceCheckpoint: *path* holds no checkpoint, or only half of one, or the checkpoint is damaged, or a link.
        Unsupported: Each rank has saved a file of its own.
        InvalidInput: *path* holds pointers: its state is in a store.
    """
    path = real_path(path)
    whole = distributed_at(path) if path.is_dir() else None
    if whole is not None and whole != path:
        raise SourceCheckpoint(f"{path} is one half of the checkpoint {whole}", hint=f"name {whole}, which holds both")
    refuse_file_per_rank(path)
    refuse_pointer(path / FSDP_MODEL)
    is_whole = (path / FSDP_MODEL).exists()
    return (WholeFolder if is_whole else DcpFolder)(path, Pickles(allowed_globals), follow=follow)
