"""Charts: the same records give the same drawing, records never become markup, and old charts are removed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from factories import cell_record, drawn, edit, record

from kvbench.harness.report import chart, paper
from kvbench.harness.report.paper import curves
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


def test_a_picture_says_what_it_shows_to_those_who_do_not_see_it():
    shown = section(drawn()[0], drawn()).charts[0].markdown()
    assert 'alt="Perplexity over the stream of m' in shown
    assert shown.count(".svg") == 2
    assert "<b" not in chart.Chart("x", 'a "b" <b>', {}).markdown()


def test_the_drawings_are_those_that_the_page_names(tmp_path):
    folder = tmp_path / "charts"
    chart.write({}, folder)
    assert not folder.exists()
    page = section(drawn()[0], drawn())
    chart.write(chart.draw(page.charts), folder)
    assert {p.name for p in folder.iterdir()} == {f"{page.charts[0].name}{t}.svg" for t in ("", "-dark")}
    assert chart.drawing_files(page.text) == {p.name for p in folder.iterdir()}
    assert chart.drawing_files('src="charts/../x.svg" srcset="other/x.svg" src="charts/Mine.svg"') == set()


def test_several_capacities_are_panels_and_one_record_is_no_chart():
    several = [*drawn(), record("window", 16, 2.0)]
    assert [p["title"] for row in over_the_stream(several)[0].spec["vconcat"] for p in row["hconcat"]] == [
        "capacity 8",
        "capacity 16",
    ]
    assert over_the_stream([record("window", 8)]) == []
    assert over_the_stream([record("dense", None), record("dense", None, status="failed", metrics={})]) == []


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


def test_loss_curves_lie_beside_attention_to_the_first_token(tmp_path):
    for name, loss in (("one", 3.0), ("two", 3.5)):
        (tmp_path / name).mkdir()
        rows = [{"tokens": 10**6 * (i + 1), "loss": loss - i / 100} for i in range(100)]
        rows[49]["attention_to_first"] = {"largest": 0.25, "mean": 0.1}
        (tmp_path / name / "training.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    (made,) = curves([tmp_path / "one", tmp_path / "two"])
    losses, attention = (panel["data"]["values"] for panel in made.spec["hconcat"])
    assert [v["loss"] for v in losses if v["model"] == "two"] == [round(3.5 - i / 100, 4) for i in range(2, 100)]
    assert attention == [{"model": m, "tokens": 50.0, "attention": 0.25} for m in ("one", "two")]
    assert "<svg" in made.svg("dark")
    assert curves([]) == []


def test_rows_that_compare_only_with_themselves_are_told_as_multiples():
    row = next(line for line in paper.render([]).text.splitlines() if line.startswith("| zero sink"))
    assert "*29,214 (1,622x)*" in row
    assert "*18.01 (1.000x)*" in row
