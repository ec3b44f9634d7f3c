from launcher.logs import Line, Lines, parse


def test_a_ranked_line_is_a_process_s_and_every_other_the_agent_s() -> None:
    assert parse(1, "[3] step 2") == Line(1, 3, "step 2")
    assert parse(1, "[3]") == Line(1, 3, "")
    assert parse(1, "agent 1: waiting for host 2") == Line(1, None, "agent 1: waiting for host 2")
    assert parse(1, "[x] y").rank is None


def test_a_prefix_survives_the_way_there_and_back() -> None:
    assert parse(0, Line(0, 12, "[not a rank] text").prefixed()) == Line(0, 12, "[not a rank] text")


def test_lines_are_whole_however_the_bytes_come() -> None:
    lines = Lines()
    text = "one\ntwo ünd\n\nlast".encode()
    found = [line for byte in text for line in lines.feed(bytes([byte]))] + lines.end()
    assert found == ["one", "two ünd", "", "last"]
    assert lines.end() == []


def test_a_line_that_never_ends_takes_bounded_memory() -> None:
    lines = Lines(limit=10)
    assert lines.feed(b"x" * 11) == ["x" * 11]
    assert lines.feed(b"y\n") == ["y"]
