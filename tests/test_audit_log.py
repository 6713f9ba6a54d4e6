"""Audit logs: lines that were cut, changed, moved or left out are found, and nothing is lost in a crash or on a full disk."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os

import pytest

from fedtail.deployment import audit_log
from fedtail.deployment.audit_log import TEXT, AuditLog, ChainedFile, Head, LogDamaged, holds, line_digest, read_head, verify


def written(path, lines=6):
    log = AuditLog(path)
    for k in range(lines):
        log.write("asked", safely=True, round=k)
    return log


def test_each_line_names_the_digest_of_the_one_before(tmp_path):
    written(tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines()
    assert [json.loads(one)["line"] for one in lines] == list(range(6))
    assert [json.loads(one)["before"] for one in lines[1:]] == [line_digest(one) for one in lines[:-1]]
    assert read_head(tmp_path / "a.jsonl.head") == (6, sum(len(one) + 1 for one in lines), line_digest(lines[-1]))
    assert verify(tmp_path / "a.jsonl")[1] == []


def rewritten(lines, first):
    """The lines with digests made anew from line `first` on, as whoever changes a line would."""
    for k in range(first, len(lines)):
        entry = json.loads(lines[k])
        entry["before"] = line_digest(lines[k - 1])
        lines[k] = json.dumps(entry).encode()
    return lines


@pytest.mark.parametrize(("change", "problem"), [
    (lambda lines: lines[:-1], "1 lines are missing at the end: a.jsonl.head knows of 6"),
    (lambda lines: lines[:2] + lines[4:], "lines 3 to 4 are missing"),
    (lambda lines: lines[:3] + lines[4:], "line 4 is missing"),
    (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], "line 5 was written as line 3: lines were moved or repeated"),
    (lambda lines: [*lines, lines[3]], "line 7 was written as line 4: lines were moved or repeated"),
    (lambda lines: [one.replace(b'"round": 2', b'"round": 9') for one in lines], "line 3 or the digest of it in line 4 was changed"),
    (lambda lines: [one.replace(b'"round": 5', b'"round": 9') for one in lines], "line 6 is not the one that a.jsonl.head names"),
    (lambda lines: [*lines[:2], b"{garbage", *lines[3:]], "line 3 is no line of a log"),
    (lambda lines: rewritten([*lines[:2], lines[2].replace(b"2}", b"9}"), *lines[3:]], 3), "line 6 is not the one that a.jsonl.head names"),
    (lambda lines: [], "6 lines are missing at the end")])
def test_what_was_done_to_a_log_is_said_and_nothing_is_appended_to_it(tmp_path, change, problem):
    path = tmp_path / "a.jsonl"
    written(path)
    lines = change(path.read_bytes().splitlines())
    path.write_bytes(b"".join(one + b"\n" for one in lines))
    assert any(problem in one for one in verify(path)[1]), verify(path)[1]
    with pytest.raises(LogDamaged, match=r"the record a\.jsonl is not what was written"):
        ChainedFile(path).read_new()


def test_a_log_that_was_written_anew_with_its_head_differs_from_what_was_noted_elsewhere(tmp_path):
    path = tmp_path / "a.jsonl"
    noted = written(path).head
    assert holds(path, noted)
    assert verify(path, [("elsewhere", noted)])[1] == []
    for one in (path, path.with_name("a.jsonl.head")):
        one.unlink()
    log = AuditLog(path)
    for k in range(6):
        log.write("asked", safely=True, round=k + (k == 2))
    assert verify(path)[1] == []
    assert not holds(path, noted)
    assert verify(path, [("elsewhere", noted)])[1] == ["line 6 is not the one that elsewhere names: the log was written anew"]


def test_a_line_that_a_crash_has_cut_is_removed_and_a_head_that_is_behind_is_one_still(tmp_path):
    path = tmp_path / "a.jsonl"
    log = written(path)
    log.write("answered", round=6)                                   # not forced to disk: the head is of the line before
    assert read_head(path.with_name("a.jsonl.head")).lines == 6
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"line": 7, "before": "a cra')
    assert verify(path)[1] == []
    AuditLog(path).write("asked", safely=True, round=7)
    assert path.read_bytes().startswith(whole)
    entries, problems = verify(path)
    assert ([one.get("round") for one in entries], problems) == ([0, 1, 2, 3, 4, 5, 6, 7], [])


def test_on_a_full_disk_nothing_is_written_in_part(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    log, real = written(path), os.write

    def full(file, content):
        if len(content) > 20:
            return real(file, content[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(audit_log.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        log.write("asked", safely=True, round=6)
    assert path.read_bytes() == before
    monkeypatch.undo()
    log.write("asked", safely=True, round=6)
    assert verify(path)[1] == []


def writes(path, name):
    for k in range(20):
        AuditLog(path).write("asked", safely=k % 3 == 0, who=name, round=k)


def test_several_processes_write_one_log(tmp_path):
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=writes, args=(tmp_path / "a.jsonl", name)) for name in "abc"]
    for one in workers:
        one.start()
    for one in workers:
        one.join(60)
    entries, problems = verify(tmp_path / "a.jsonl")
    assert problems == []
    assert sorted((one["who"], one["round"]) for one in entries) == sorted((name, k) for name in "abc" for k in range(20))


def test_a_text_is_cut_and_a_refusal_that_repeats_is_one_line(tmp_path):
    log = AuditLog(tmp_path / "a.jsonl")
    for _ in range(3):
        log.write_once("refused", why="x" * 5000)
    log.write_once("refused", why="another")
    entries = verify(tmp_path / "a.jsonl")[0]
    assert [one["why"] for one in entries] == ["x" * TEXT, "another"]
    assert Head(*log.head).lines == 2
