"""The guides to Slurm and to work in shares, on two real nodes of Slurm."""
