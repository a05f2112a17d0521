"""Rows of the benchmark of simulated engines count only while the machine kept the simulated times."""

import math

import pytest

from benchmarks.sim_harness.verdict import Compared, is_void, late_quantile_s, validity

INFINITY = math.inf


def compared(measured_s, profile_s=0.1, late_s=0.001):
    return Compared(name="TTFT, batch 1", measured_s=measured_s, profile_s=profile_s, late_s=late_s)


def test_the_quantile_is_the_smallest_bound_that_holds_the_share():
    late = {0.001: 50, 0.002: 99, 0.005: 100, INFINITY: 100}
    assert late_quantile_s(late, 0.5) == 0.001
    assert late_quantile_s(late, 0.99) == 0.002
    assert late_quantile_s(late, 0.995) == 0.005


def test_the_order_of_the_bounds_does_not_matter():
    assert late_quantile_s({INFINITY: 10, 0.002: 10, 0.001: 3}, 0.99) == 0.002


def test_events_beyond_the_last_bound_have_no_end():
    assert late_quantile_s({0.001: 0, 0.5: 98, INFINITY: 100}, 0.99) == INFINITY


def test_without_events_nothing_was_measured():
    assert late_quantile_s({0.001: 0, INFINITY: 0}, 0.99) is None


def test_two_milliseconds_are_the_last_that_count():
    assert (validity(0.002), is_void(0.002)) == ("ok", False)
    assert (validity(0.003), is_void(0.003)) == ("void", True)
    assert (validity(INFINITY), is_void(INFINITY)) == ("void", True)


def test_a_row_without_events_is_void():
    assert (validity(None), is_void(None)) == ("void", True)


@pytest.mark.parametrize("measured_s", [0.0951, 0.1, 0.1049])
def test_five_percent_either_way_pass(measured_s):
    assert compared(measured_s).verdict == "pass"


@pytest.mark.parametrize("measured_s", [0.0949, 0.1051])
def test_more_than_that_fails(measured_s):
    assert compared(measured_s).verdict == "FAIL"


def test_the_difference_is_a_share_of_the_profile():
    assert compared(0.103).difference == pytest.approx(0.03)


def test_a_time_of_a_late_machine_is_neither_pass_nor_fail():
    assert compared(0.1, late_s=0.003).verdict == "void"
    assert compared(0.2, late_s=None).verdict == "void"
