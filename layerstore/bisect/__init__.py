"""
Bisect: find the save from which on something is bad, then the layers that make it so.

``search`` asks as few questions as it can, ``trials`` turns each into a folder that a command judges, ``bisection``
brings them together and keeps a log to go on from.
"""

from layerstore.bisect.bisection import Bisected, Trial, bisect, read_trials
from layerstore.bisect.judges import Judged, command_judge
from layerstore.bisect.search import Verdict

__all__ = ["Bisected", "Judged", "Trial", "Verdict", "bisect", "command_judge", "read_trials"]
