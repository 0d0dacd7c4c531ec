"""``layerstore report``: one page about a store, to look at, to print and to send."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.policy import keep_of, with_rules
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import counted, print_json, print_line, print_paragraph, print_warning, shown
from layerstore.errors import InvalidInput, Unsupported
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore.policy import Keep

ABOUT = About("Look", store="anywhere")

Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="The page; an older report is replaced.")]
Open = Annotated[bool, typer.Option("--open", help="Show the page in a browser; without -o, it is a temporary file.")]
Serve = Annotated[bool, typer.Option("--serve", help="Serve the page until Ctrl-C; it shows changes of the store.")]
Host = Annotated[str, typer.Option("--host", metavar="HOST", help="With --serve: the address, or this machine's name.")]
Port = Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="With --serve; 0 chooses a free one.")]
RunName = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run.", show_default=False)]


@with_rules
def report(
    *,
    out: Out = None,
    run: RunName = None,
    rules: Mapping[str, object],
    opens: Open = False,
    serve: Serve = False,
    host: Host = "127.0.0.1",
    port: Port = 8321,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Write one HTML page: each layer's version at every step.

    The page needs no network and stays below 1 MB: for a long history, only some saves are shown.
    With the options of gc, the page also shows what gc would keep; nothing is removed.
    With --serve, this machine, or anyone who can reach HOST, can open the page; it shows new saves.

    \b
    Examples:
      layerstore report -o report.html
      layerstore report -o report.html --run sft --keep-last 3 --keep-every 1000
      layerstore report --open
      layerstore report --json
    """
    keep = keep_of(rules)
    if serve:
        if out is not None or as_json:
            raise InvalidInput("--serve neither writes a file nor prints JSON", hint="leave out -o and --json")
        _serve(store, host=host, port=port, run=run, keep=keep, opens=opens)
        return
    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        if out is None and opens:
            out = Path(tempfile.mkdtemp(prefix="layerstore-")) / "report.html"
        if out is None and not as_json:
            raise InvalidInput("a report needs a file", hint="layerstore report -o report.html")
        facts = opened_store.report(out, run=run, keep=keep, progress=progress)
    for problem in facts["left_out"]:
        print_warning(f"left out: {problem}")
    if as_json:
        print_json({"out": None if out is None else str(out), **facts})
    else:
        _print_result(facts, out)
    if opens and out is not None:
        _show(out.absolute().as_uri())


def _serve(store: str | None, *, host: str, port: int, run: str | None, keep: "Keep | None", opens: bool) -> None:
    from layerstore.cli.serve import ReportServer

    with opened(store) as opened_store:
        name = opened_store.repo.name
    with ReportServer(name, host=host, port=port, run=run, keep=keep) as server:
        print_line(f"serving {server.url} until Ctrl-C")
        if not server.is_local:
            print_warning("anyone who can reach this address can read the names and figures of the store")
        if opens:
            _show(server.url)
        server.serve_forever()


def _show(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        raise Unsupported(
            f"no browser was found to open {url}", hint="open it elsewhere, or: layerstore report --serve"
        )


def _print_result(facts: dict[str, Any], out: Path | None) -> None:
    stats, plan = facts["stats"], facts["retention"]
    print_line(f"wrote {shown(out)}: {counted(stats['commits'], 'commit')} of {counted(stats['run_count'], 'run')}")
    if plan is not None:
        rules = plan["rules"] if facts["run"] is None else f"{facts['run']} {plan['rules']}"
        print_paragraph(f"gc {shown(rules)} would {_planned(plan)}", indent=2)
    for run in facts["runs"]:
        count = len(run["saves"]["step"])
        if count < run["commits"]:
            print_line(f"{shown(run['run'])}: sampled, {count:,} of {counted(run['commits'], 'save')} are shown")


def _planned(plan: dict[str, Any]) -> str:
    """Return what gc would do under the rules."""
    if plan["refusal"] is not None:
        return f"refuse: {shown(plan['refusal'])}"
    trimmed = f", remove the moments of {plan['commits_trimmed']:,}" if plan["commits_trimmed"] else ""
    later = f", and {size(plan['bytes_freed_later'])} later, too young now" if plan["bytes_freed_later"] else ""
    removed = counted(plan["commits_removed"], "commit") if plan["commits_removed"] else "no commit"
    freed = size(plan["bytes_freed"]) if plan["bytes_freed"] else "nothing at once" if later else "nothing"
    stay = counted(plan["commits_kept"], "commit")
    return f"remove {removed}{trimmed} and free {freed}{later}; {stay} would stay"
