"""Training frameworks: the only room that imports torch and deepspeed, and only inside functions."""
