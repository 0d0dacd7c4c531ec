"""A report as a page, on its way to the disk: with as many of the saves as such a file has room for."""

from layerstore.errors import Unsupported
from layerstore.ops.report import Report, thinned
from layerstore.ops.report_fields import report_fields
from layerstore.report.page import PAGE_BYTES_MAX, render


def report_page(report: Report) -> bytes:
    """
    Return the page of *report*, which is never larger than its bound: saves are left out until it is not.

    Raises:
        Unsupported: Even one save of each run is too much, for the sake of long names.
    """
    shown: Report | None = report
    while shown is not None:
        page = render(report_fields(shown))
        if len(page) <= PAGE_BYTES_MAX:
            return page
        shown = thinned(shown)
    raise Unsupported(
        f"a page about {len(report.runs)} runs has more than {PAGE_BYTES_MAX:,} bytes",
        hint="layerstore report --run RUN makes one about a single run; --json has no bound",
    )
