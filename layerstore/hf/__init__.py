"""Hugging Face's folders: a composite's weights as Transformers and PEFT load them."""

from layerstore.hf.meta_model import parameter_shapes
from layerstore.hf.peft import plan_beside
from layerstore.hf.plan import CONFIG, goes_along, plan_export
