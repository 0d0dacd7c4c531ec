"""
``.pt`` files without torch: the only package that reads or writes them.

This is the security boundary. A pickle is described, never run: globals become names, calls become nodes, and anything
that is not on a list is refused. No module here imports ``pickle``.
"""

from layerstore.zero3.pt.allowlist import INERT, MEMORY_FORMAT, VALUES
from layerstore.zero3.pt.ptread import PtFile, read_pt, read_section
from layerstore.zero3.pt.ptwrite import PtLayout, WrittenPickles, layout_pt, write_pickle
from layerstore.zero3.pt.unpickle import OF_DCP_METADATA, Pickles, read_pickle
