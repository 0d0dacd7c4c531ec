"""Where savers tell what training need not stop for."""

import logging

LOG = logging.getLogger("layerstore")
