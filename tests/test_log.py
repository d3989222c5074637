"""log.jsonl: what is read from one, whatever happened to it."""
import json

from plumbing.log import read_log


def test_a_log_is_read_whatever_happened_to_it(tmp_path):
    """A torn or foreign line that ends in a traceback, and curves of two runs drawn as one."""
    path = tmp_path / "log.jsonl"
    assert read_log(str(tmp_path / "none")) == read_log(str(tmp_path)) == []
    line = lambda step, seconds: json.dumps(dict(step=step, seconds=seconds)).encode()
    for again in ((20, 3.0), (30, 1.9)):                               # another run: fewer steps, less time
        path.write_bytes(line(20, 2.0) + b"\n" + line(*again))
        assert read_log(str(path)) == [dict(step=again[0], seconds=again[1])]
    lines = [line(15, 1.5), b"\xff\x00{", b"7", b"[[]]", b'{"step": "x", "seconds": 1}',
             b'{"step": Infinity}', b"[" * 100_000, b'{"step": 25, "sec' + line(30, 3.0), line(30, 3.0),
             line(40, 4.0)[:-3]]
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + b"\n".join(lines))
        assert read_log(str(path)) == [dict(step=15, seconds=1.5), dict(step=30, seconds=3.0)]
