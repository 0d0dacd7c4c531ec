"""
``.pt`` files without torch: the only package that reads or writes them.

This is the security boundary. A pickle is described, never run: globals become names, calls become nodes, and anything
that is not on a list is refused. No module here imports ``pickle``.
"""

from layerstore.zero3.pt.picklenames import INERT, VALUES
from layerstore.zero3.pt.picklewrite import WrittenPickles
from layerstore.zero3.pt.ptfile import PtFile, PtLayout, layout_pt, read_pt
from layerstore.zero3.pt.unpickle import Pickles

__all__ = ["INERT", "VALUES", "Pickles", "PtFile", "PtLayout", "WrittenPickles", "layout_pt", "read_pt"]
