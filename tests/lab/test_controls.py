"""Comparison of many policies with one control."""

import pytest

from kvbench.lab.studies.controls import holm


def test_holm_corrects_step_by_step():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
