"""
What a mixture of layers costs a model: `python -m tests.bench quality`, from a corpus to a table.

``run`` drives it, ``settings`` says how much of everything there is. ``corpus`` and ``tokenizer`` make data,
``training`` the model, ``job`` fails and resumes it under every one of ``arms``. ``rows`` keeps what was found,
``intervals`` are put around it, ``table`` prints it, and ``plots`` draw it, each a ``chart``.
"""
