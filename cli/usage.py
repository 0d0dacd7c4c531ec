"""Usage errors in our words: what was written, and what is wrong with it."""

from collections.abc import Mapping

from typer.exceptions import TyperException

# By the code that the library gives a value it refuses; what has none of these keeps the library's own words.
_PROBLEMS = {
    "int_parsing": "is no whole number",
    "int_parsing_size": "is too large",
    "float_parsing": "is no number",
    "greater_than_equal": "is less than {ge}",
    "less_than_equal": "is more than {le}",
}


def usage_message(problem: TyperException) -> str:
    """Return what is wrong with the words on the command line, in one line."""
    option, found = _option(problem), _refused(problem)
    if option is not None and found is not None:
        facts = found.get("ctx")
        facts = facts if isinstance(facts, Mapping) else {}
        if found.get("type") in _PROBLEMS:
            return f"{option} {found.get('input')} {_PROBLEMS[str(found['type'])].format_map(facts)}"
        if "error" in facts:  # a choice, which typer checks itself
            return f"{option}: {str(facts['error']).rstrip('.')}"
    return " ".join(problem.format_message().split())


def _option(problem: TyperException) -> str | None:
    """Return the option whose value it is, by its long name."""
    names = getattr(getattr(problem, "param", None), "opts", [])
    return max((name for name in names if name.startswith("-")), key=len, default=None)


def _refused(problem: TyperException) -> Mapping[str, object] | None:
    """Return what the library's checker says of the value: typer keeps it as the cause."""
    errors = getattr(problem.__cause__, "errors", None)
    found = errors() if callable(errors) else []
    return found[0] if found else None
