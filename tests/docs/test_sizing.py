"""The page on sizes shows what the estimate says, and its formulas give these figures."""

import pytest

from tests.docs.sizing import EVERY, LAST, PAGE, POLICIES, RULES, SIZES, Size, written


@pytest.mark.full
def test_the_page_is_the_generated_one() -> None:
    """Whoever changes the estimate or the policies writes it anew: python -m tests.docs.sizing."""
    assert PAGE.read_text() == written(PAGE.read_text())


@pytest.mark.parametrize("of", SIZES, ids=lambda of: of.name)
def test_the_formulas_give_the_figures(of: Size) -> None:
    """Each row of the page's table of formulas, to one part in a hundred."""
    saves, full = of.training.saves, 12 * of.parameters
    newest = {policy: of.kept(policy, RULES[0])[0] for policy in POLICIES}
    spaced = {policy: of.kept(policy, RULES[1])[0] - newest[policy] for policy in POLICIES}
    later = {policy: line["average_bytes"] for policy, line in of.lines.items()}
    # The last step is among the newest already.
    apart = of.training.steps // EVERY - 1

    assert later["full"] == pytest.approx(full, rel=0.01)
    assert later["parity"] == pytest.approx(full / 2, rel=0.01)
    assert of.kept("parity", RULES[2])[0] == pytest.approx(full + (saves - 1) * later["parity"], rel=0.01)
    assert newest["full"] == pytest.approx((LAST + 1) * full, rel=0.01)
    assert newest["parity"] == pytest.approx((LAST / 2 + 1) * full, rel=0.01)
    assert list(spaced.values()) == pytest.approx([apart * full] * len(POLICIES), rel=0.01)
    layers = of.blocks + 3
    assert of.files_a_save("full") == layers * of.ranks * 2 + layers + of.ranks + 1
