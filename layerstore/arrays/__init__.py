"""A composite's tensors in memory: as numpy arrays, mapped where possible, and as a torch state dict."""

from layerstore.arrays.state_dict import make_state_dict
from layerstore.arrays.tensors import TensorKind, Tensors, open_tensors
