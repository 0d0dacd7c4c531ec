"""``layerstore doctor``: check whether a folder is fit for a store."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import layerstore
from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, store_or_nearest
from layerstore.cli.render import PASTED_WIDTH, counted, output, print_json, print_line, print_paragraph, shown
from layerstore.errors import LayerstoreError
from layerstore.json_fields import json_fields

if TYPE_CHECKING:
    from layerstore.check import Diagnosis

ABOUT = About("Before you start", store=None, answers=True)


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help="A store, or a folder that may become one."),
    ] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Check whether a folder can keep the promises of a store.

    Tests the filesystem, the index, the clock, the space and the versions.
    Trial files are removed again. The report contains no secrets, and is made for pasting.
    A problem breaks a promise, so the exit code is 1; a note does not.

    \b
    Examples:
      layerstore doctor
      layerstore doctor /scratch/me
    """
    diagnosis = layerstore.doctor(path or store_or_nearest(store))
    if as_json:
        print_json(json_fields(diagnosis))
    else:
        _print_result(diagnosis)
    if not diagnosis.ok:
        checks = ", ".join(finding.check for finding in diagnosis.problems)
        full = [finding.hint for finding in diagnosis.problems if finding.check == "space"]
        if path is not None:
            output.store = str(path)
        raise LayerstoreError(
            f"promises cannot be kept at {diagnosis.path}: {checks}",
            hint=full[0] if full else "docs/internals/durability.md lists what a store requires of a filesystem",
        )


def _print_result(diagnosis: "Diagnosis") -> None:
    print_line(f"layerstore doctor {shown(diagnosis.path)}")
    width = max(len(finding.check) for finding in diagnosis.findings) + 2
    for finding in diagnosis.findings:
        _print_indented(f"{finding.verdict:<9}{finding.check:<{width}}{shown(finding.text)}", indent=9 + width)
        if finding.hint is not None and finding.verdict != "ok":
            _print_indented(f"{'':<9}{'':<{width}}hint: {shown(finding.hint)}", indent=9 + width + len("hint: "))
    versions = ", ".join(f"{name} {version or '(none)'}" for name, version in diagnosis.versions.items())
    _print_indented(f"versions: {shown(versions)}", indent=2)
    notes = sum(finding.verdict == "note" for finding in diagnosis.findings)
    fit = "fit for a store" if diagnosis.ok else "not fit for a store"
    print_line(f"{fit}: {counted(len(diagnosis.problems), 'problem')}, {counted(notes, 'note')}")


def _print_indented(text: str, *, indent: int) -> None:
    print_paragraph(text, indent=indent, pipe_width=PASTED_WIDTH)
