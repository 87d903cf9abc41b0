"""The log of events of a thread."""

from overt.capture.state import EventLog


def test_events_since_a_mark():
    log = EventLog()
    log.add(1)
    mark = log.last
    log.add(2)
    log.add(3)
    assert log.since(mark) == [2, 3]
    assert log.since(None) == [1, 2, 3]


def test_discarded_events_leave_their_node():
    log = EventLog()
    log.add("a")
    mark = log.last
    log.add(1)
    log.add("b")
    log.discard(int)
    assert log.since(mark) == ["b"] and log.since(None) == ["a", "b"]
