"""curve.png: which panels a run gets, and what is drawn in them."""

from runtime.view.report import CREDIT, draw_curve

import pytest
from matplotlib.figure import Figure


def drawn(rows, run, monkeypatch) -> dict[str, dict]:
    """{label of the y axis: {label of a line: its points}} of the left column, against
    iterations."""
    figures, save = [], Figure.savefig

    def saved(figure, path):
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(Figure, "savefig", saved)
    draw_curve(rows, run)
    assert (run / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (figure,) = figures
    left = [axis for axis in figure.axes if axis.get_xlabel() == "iteration"]
    return {
        axis.get_ylabel(): {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
        for axis in left
    }


def rows_of(**of_training):
    first = {"iteration": 0, "time/elapsed": 0.0, "eval/success": 0.25, "eval/return": -1.0}
    later = {"time/elapsed": 60.0, "train/success": 0.5, "train/return": -0.5}
    return [first, later | {"iteration": 1} | of_training, later | {"iteration": 2} | of_training]


def test_a_run_without_a_prm_has_success_and_return(tmp_path, monkeypatch):
    panels = drawn(rows_of(), tmp_path, monkeypatch)
    assert list(panels) == ["success", "return"]
    assert panels["success"] == {"train": [[1, 0.5], [2, 0.5]], "eval": [[0, 0.25]]}
    assert panels["return"] == {"train": [[1, -0.5], [2, -0.5]], "eval": [[0, -1.0]]}


@pytest.mark.parametrize("unknown", CREDIT)
def test_credit_has_a_panel_of_what_is_known(unknown, tmp_path, monkeypatch):
    """A number that no row has (WebShop knows no progress) has no line and no label."""
    known = dict.fromkeys(CREDIT, 0.75) | {unknown: None}
    panels = drawn(rows_of(**known), tmp_path, monkeypatch)
    assert list(panels) == ["success", "return", "credit"]
    labels = [label for key, label in CREDIT.items() if key != unknown]
    assert panels["credit"] == {label: [[1, 0.75], [2, 0.75]] for label in labels}
