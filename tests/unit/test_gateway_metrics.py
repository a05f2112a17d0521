from hetero_llm.model import Target
from hetero_llm.telemetry.metrics import GatewayMetrics, Histogram


def target(name: str) -> Target:
    return Target(replica=name, model="m", kind="cpu", accelerator="x", host="h", port=1)


def metrics(*names: str) -> GatewayMetrics:
    made = GatewayMetrics(lambda: {"a": 3})
    made.update([target(name) for name in names])
    return made


def test_requests_are_counted_by_replica_and_status():
    made = metrics("a")
    made.of(target("a")).answered(200)
    made.of(target("a")).answered(200)
    line = 'hetero_llm_requests_total{kind="cpu",model="m",replica="a",status="200"} 2.0'
    assert line in made.exposition().decode().splitlines()


def test_requests_under_way_are_asked_at_the_scrape():
    assert 'hetero_llm_in_flight{kind="cpu",model="m",replica="a"} 3.0' in metrics("a").exposition().decode()


def test_series_of_a_replica_vanish_with_it():
    made = metrics("a", "b")
    made.of(target("a")).answered(200)
    made.update([target("b")])
    assert 'replica="a"' not in made.exposition().decode()


def test_counters_of_a_replica_survive_an_update():
    made = metrics("a")
    made.of(target("a")).answered(200)
    made.update([target("a"), target("b")])
    assert made.of(target("a")).statuses == {200: 1}


def test_times_to_the_first_token_outlive_a_replica_of_the_same_kind():
    made = metrics("a", "b")
    made.of(target("a")).first_token.observe(0.1)
    made.update([target("b")])
    assert "hetero_llm_time_to_first_token_seconds_count" in made.exposition().decode()
    assert sum(made.of(target("b")).first_token.counts) == 1


def test_a_replica_that_just_left_can_still_be_counted_on():
    made = metrics("a")
    made.of(target("gone")).answered(200)
    assert "gone" not in made.exposition().decode()


def test_the_process_reports_its_own_memory():
    assert "process_resident_memory_bytes" in metrics().exposition().decode()


def test_buckets_are_cumulative_and_the_last_one_is_open():
    histogram = Histogram()
    for seconds in (0.005, 0.3, 1000.0):
        histogram.observe(seconds)
    buckets = histogram.buckets()
    assert buckets[0] == ("0.005", 1)
    assert buckets[-1] == ("+Inf", 3)
