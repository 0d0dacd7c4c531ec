"""``layerstore push``: send what a remote lacks."""

import shlex
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import counted, print_aside, print_json, print_line, print_note, print_warning, shown, some
from layerstore.errors import InvalidInput, NotFound
from layerstore.json_fields import json_fields
from layerstore.layers import is_name
from layerstore.layout import is_url
from layerstore.nearest import did_you_mean, nearest
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore import Store
    from layerstore.remote import Pulled, Pushed

ABOUT = About("Elsewhere")

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[REMOTE] [REF]...", help="A remote's name or URL; then references, all by default."),
]
Follow = Annotated[bool, typer.Option("--follow", help="Keep sending each new commit, until Ctrl-C.")]
MovePins = Annotated[
    bool, typer.Option("--move-pins", help="Move pins that differ in the remote to their targets in this store.")
]


def push(
    words: Words = None,
    *,
    store: StorePath = None,
    follow: Follow = False,
    move_pins: MovePins = False,
    as_json: AsJson = False,
) -> None:
    """
    Send commits and pins that a remote lacks.

    Sends all that the remote lacks, or only the references that are given.
    A commit appears in the remote only after all that it needs. A killed push resumes where it stopped; just repeat it.
    Without REMOTE, the store's only remote is used.

    \b
    Examples:
      layerstore push
      layerstore push origin sft@200
      layerstore push --follow
      layerstore push s3://checkpoints/sft
    """
    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        name, refs = remote_and_references(opened_store, words or [], from_here=True)
        on_made = partial(_print_made, opened_store)
        if follow:
            for pushed in opened_store.follow(name, refs=refs, move_pins=move_pins, on_made=on_made, progress=progress):
                print_transferred(pushed, refs, as_json=as_json, verb="sent", size_bytes=pushed.bytes_sent)
            return
        pushed = opened_store.push(name, refs=refs, move_pins=move_pins, on_made=on_made, progress=progress)
    print_transferred(pushed, refs, as_json=as_json, verb="sent", size_bytes=pushed.bytes_sent)
    if pushed.commits and not as_json:
        print_note(f"elsewhere: layerstore clone {shlex.quote(shown(pushed.url))}")


def _print_made(store: "Store", url: str) -> None:
    """Print that the store at *url* was just made, so that a mistyped URL is noticed."""
    from layerstore.history import pushed_to

    before = pushed_to(store.repo).get(url, ())
    if before:
        print_warning(
            f"there was no store at {url}, where {counted(len(before), 'commit')} had been pushed: this push makes "
            "one; if the filesystem is just not mounted, stop the push"
        )
    else:
        print_aside(f"there was no store at {url}: this push makes one")


def remote_and_references(store: "Store", words: list[str], *, from_here: bool) -> tuple[str | None, list[str] | None]:
    """Return the remote and the references in *words*; *from_here* if the references are to this store, as for push."""
    from layerstore.history import begins_id
    from layerstore.remote import refuse_folder

    if not words:
        return None, None
    remotes = store.remotes.urls()
    if is_url(words[0]) or words[0] in remotes:
        return words[0], words[1:] or None
    if "/" in words[0]:  # no run's name has a slash
        refuse_folder(words[0])
        hint = "a remote is a name or a URL, like file:///FOLDER; a reference is RUN@STEP, RUN or a pin's name"
        raise InvalidInput(f"{words[0]!r} is neither a remote nor a reference", hint=hint)
    runs = store.runs()
    known = [*remotes, *runs, *(pin.name for pin in store.pins())]
    similar = nearest(words[0], known if from_here else remotes)
    # Refuse a word that can be neither remote nor reference. Any other is returned as a reference, since resolving it
    # gives the best error message.
    is_plain = is_name(words[0]) and not begins_id(words[0])
    if words[0] not in known and (is_plain if from_here else similar):
        here = f"remotes here: {some([*remotes]) or 'none'}; runs here: {some(runs) or 'none'}; a step is RUN@STEP"
        raise NotFound(f"{words[0]!r} is neither a remote nor a run or pin", hint=did_you_mean(similar, else_=here))
    return None, words


def print_transferred(
    done: "Pushed | Pulled", refs: list[str] | None, *, as_json: bool, verb: str, size_bytes: int, is_all: bool = True
) -> None:
    """Print what a push or a pull of *refs* has *done*; *is_all* unless it skipped commits in this store's trash."""
    if as_json:
        print_json(json_fields(done))
        return
    what = [counted(len(done.commits), "commit"), *([counted(len(done.pins), "pin")] if done.pins else [])]
    if not (done.commits or done.pins):
        holder, other = (shown(done.url), "this store") if verb == "sent" else ("this store", shown(done.url))
        all_ = f"{'every' if is_all else 'every other'} commit and pin of {other}"
        print_line(f"{holder} has {all_ if refs is None else shown(some(refs))}")
        return
    print_line(f"{verb} {' and '.join(what)}: {counted(done.objects, 'object')}, {size(size_bytes)}")
    print_line(f"  {some([*done.commits, *done.pins])}")
