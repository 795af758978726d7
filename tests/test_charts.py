"""Charts: the same records give the same drawing, records never become markup, and old charts are removed."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from factories import cell_record, drawn, edit

from kvbench.harness.core import plugins
from kvbench.harness.report import chart
from kvbench.harness.report.sections import section
from kvbench.harness.report.task_charts import over_the_stream
from kvbench.harness.tasks.streameval import over_distance


def test_the_same_records_give_the_same_drawing_in_any_order_of_pages():
    one, two = (section(drawn()[0], records) for records in (drawn(), drawn()[::-1]))
    assert one.charts == two.charts
    assert one.charts[0].svg("light") == two.charts[0].svg("light")
    assert one.charts[0].svg("light") != one.charts[0].svg("dark")


def test_a_drawing_does_not_depend_on_those_before_it():
    """Vega numbers the gradients of a process."""
    scale = {"values": [{"x": 1, "y": 2}, {"x": 2, "y": 5}]}
    colour = {"field": "y", "type": "quantitative", "legend": {"type": "gradient"}}
    made = chart.Chart("x", "x", {"data": scale, "mark": "point", "encoding": {"x": {"field": "x"}, "color": colour}})
    drawings = []
    for _ in range(2):
        chart._svg.cache_clear()
        drawings.append(made.svg("light"))
    assert drawings[0] == drawings[1]
    assert 'id="gradient_0"' in drawings[0]
    assert "url(#gradient_0)" in drawings[0]


def test_what_is_drawn_is_what_was_measured():
    (made,) = over_the_stream(drawn())
    *marks, lines = made.spec["layer"]
    assert marks[0]["data"]["values"] == [{"at": 8, "what": "cache full"}, {"at": 512, "what": "training length"}]
    found = [v["perplexity"] for v in lines["data"]["values"] if v["policy"] == "dense"]
    tokens = [v["token"] for v in lines["data"]["values"] if v["policy"] == "dense"]
    assert tokens == sorted(tokens)
    assert len(found) == 1 + 18, "two points a doubling from 64 to 32,768"
    assert found[-1] == pytest.approx(6.69, rel=0.02), "e to the 1.9, of thousands of tokens"
    blocks = drawn()[0].metrics.blocks
    assert found[0] == pytest.approx(2.718281828 ** (sum(blocks.nll_sum[:2]) / 64), rel=1e-4), "the first point is 64 tokens"


def test_a_drawing_has_no_markup_of_a_record_and_needs_nothing_from_elsewhere():
    page = section(drawn()[0], drawn())
    assert "<script" not in page.text
    for theme in ("light", "dark"):
        svg = page.charts[0].svg(theme)
        tags = {e.tag.rpartition("}")[2] for e in ET.fromstring(svg).iter()}
        assert tags <= {"svg", "g", "path", "text", "rect", "line", "defs", "clipPath", "title"}
        assert "script" in svg, "the name is there, as text"
        assert not any(word in svg.lower() for word in ("href=", "url(http", "@import"))


def test_answers_over_distance_have_their_intervals():
    def asked(distance: int, right: int):
        task = {"name": "streameval", "distance": distance}
        made = cell_record({"right": right, "questions": 40, "accuracy": right / 40}, task=task, capacity=128)
        edit(made, data={"line_tokens": 16.0, "streams": 40})
        return made

    (made,) = over_distance([asked(20, 0), asked(2, 40)])
    *marks, errors, line = made.spec["layer"]
    assert marks[0]["data"]["values"][0]["at"] == 8, "lines that 128 tokens hold"
    near, far = line["data"]["values"]
    assert (near["lines back"], near["right"], near["high"]) == (2, 100, 100)
    assert far["right"] == far["low"] == 0 < far["high"] < 15
    assert errors["data"] == line["data"]
    assert over_distance([asked(2, 40)]) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_two_shipped_policies_share_colour_and_dash(theme):
    marks = [chart.mark(policy) for policy in plugins.working_policies()]
    assert len({(getattr(mark, theme), mark.dash) for mark in marks}) == len(marks)
