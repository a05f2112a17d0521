from hetero_llm.routing.breaker import FIRST_COOL_DOWN_S, LONGEST_COOL_DOWN_S, Breaker


def test_it_begins_closed():
    breaker = Breaker()
    assert breaker.closed
    assert breaker.allows(0.0)


def test_one_refused_connection_opens_it():
    breaker = Breaker()
    breaker.fail(10.0, at_once=True)
    assert not breaker.allows(10.0)


def test_broken_answers_open_it_after_three_in_a_row():
    breaker = Breaker()
    breaker.fail(0.0, at_once=False)
    breaker.fail(0.0, at_once=False)
    assert breaker.closed
    breaker.fail(0.0, at_once=False)
    assert not breaker.closed


def test_a_success_between_failures_starts_the_count_anew():
    breaker = Breaker()
    for _ in range(5):
        breaker.fail(0.0, at_once=False)
        breaker.succeed()
    assert breaker.closed


def test_it_allows_one_probe_after_the_cool_down():
    breaker = Breaker()
    breaker.fail(0.0, at_once=True)
    assert breaker.allows(FIRST_COOL_DOWN_S)
    breaker.begin()
    assert not breaker.allows(FIRST_COOL_DOWN_S)


def test_a_failed_probe_doubles_the_cool_down():
    breaker = Breaker()
    breaker.fail(0.0, at_once=True)
    breaker.begin()
    breaker.fail(1.0, at_once=True)
    assert not breaker.allows(1.0 + FIRST_COOL_DOWN_S)
    assert breaker.allows(1.0 + 2 * FIRST_COOL_DOWN_S)


def test_the_cool_down_has_an_upper_bound():
    breaker = Breaker()
    breaker.fail(0.0, at_once=True)
    for _ in range(20):
        breaker.begin()
        breaker.fail(0.0, at_once=True)
    assert breaker.allows(LONGEST_COOL_DOWN_S)


def test_requests_under_way_when_it_opened_do_not_lengthen_the_cool_down():
    breaker = Breaker()
    for _ in range(50):
        breaker.fail(0.0, at_once=True)
    assert breaker.allows(FIRST_COOL_DOWN_S)


def test_a_probe_that_tells_nothing_lets_another_one_try():
    breaker = Breaker()
    breaker.fail(0.0, at_once=True)
    breaker.begin()
    breaker.give_up()
    assert breaker.allows(FIRST_COOL_DOWN_S)
