"""
Bisect: find the first bad save, then the layers that make it bad.

``search`` asks as few questions as it can, ``bisection`` turns each question into a folder, ``judges`` judge the
folder, and ``trial_log`` keeps the answers so that a search can continue.
"""

from layerstore.bisect.bisection import Bisected, bisect
from layerstore.bisect.judges import Judged, command_judge
from layerstore.bisect.search import TrialVerdict
from layerstore.bisect.trial_log import Trial, read_trials
