"""Files of other tools than DeepSpeed, as plans: what goes into them, under which names, in which bytes."""
