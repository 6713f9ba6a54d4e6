"""One file from the web, whole or not at all: parts are kept and continued, sizes and checksums compared.

Written here rather than taken from pooch, which begins an interrupted download anew: word vectors have 862 MB.
"""

from __future__ import annotations

import hashlib
import http.client
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtail.data.fetching.catalogue import PublicFile
from fedtail.version import __version__

Progress = Callable[[int, int], None]          # bytes so far, bytes in all
_BLOCK = 1 << 18
_CUT = (http.client.HTTPException, ConnectionError, TimeoutError, EOFError, ssl.SSLError)


class WrongFile(ValueError):
    """A file whose checksum is neither the published one nor the one that the user gave."""


class _Refused(Exception):
    """One address cannot give the file; another one is to be tried."""


def download(
    source: PublicFile, folder: Path, progress: Progress = lambda done, total: None, sha256: str | None = None, tries: int = 4,
    pause: float = 1.0, timeout: float = 30.0,
) -> Path:
    """Download the file that `source` describes into `folder` unless it is there, and check it; returns its path.

    A part left by an earlier call is continued. Where the connection is cut, the rest is requested again, after `pause` seconds
    that double with each failure in a row; after `tries` failures without a new byte the next address is tried. `timeout` is in
    seconds. `progress` is called with the bytes so far and in all. Raises WrongFile where the file does not have the published
    checksum (or `sha256`, if given): a download is then deleted, a file that was there stays. Raises ConnectionError, which says
    what was tried, where no address gives the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target, part = folder / source.file, folder / f"{source.file}.part"
    if target.exists():
        check_sha256(target, source, sha256)
        return target
    resumed = part.exists() and part.stat().st_size > 0
    _download_part(source, part, progress, sha256 is None, tries, pause, timeout)
    try:
        check_sha256(part, source, sha256)
    except WrongFile:
        part.unlink()
        if not resumed:
            raise
        _download_part(source, part, progress, sha256 is None, tries, pause, timeout)      # the part may be of an older file
        check_sha256(part, source, sha256, remove=True)
    part.rename(target)
    return target


def check_sha256(path: Path, source: PublicFile, sha256: str | None = None, remove: bool = False) -> str:
    """Raise WrongFile unless the file at `path` has the SHA-256 published in `source`, or `sha256` if given.

    Returns the checksum in hexadecimal. With `remove` the wrong file is deleted before the error is raised.
    """
    found, wanted, size = file_sha256(path), (sha256 or source.sha256).lower(), path.stat().st_size
    if found == wanted:
        return found
    if remove:
        path.unlink()
    length = "" if sha256 or size == source.size else f" It has {size:,} bytes, the published one {source.size:,}."
    whose = "--sha256 says" if sha256 else "published is"
    raise WrongFile(f"{path.name} is not the file it should be: its SHA-256 is {found}, {whose} {wanted}.{length} Fetch "
                    f"it again; if you know where it is from and trust it, pass --sha256 {found}.")


def file_sha256(path: Path) -> str:
    """The SHA-256 checksum of the file at `path` in hexadecimal; the file is read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download_part(source: PublicFile, part: Path, progress: Progress, sized: bool, tries: int, pause: float,
                   timeout: float) -> None:
    """Try the source's addresses in turn until one has completed the file `part`.

    What is already in `part` is kept and continued. With `sized`, the server's file must have the published size. `tries`,
    `pause` and `timeout` are for each address; `progress` is called with the bytes so far and in all. Raises ConnectionError with
    every address's reason where none succeeds; what has come stays in `part`.
    """
    reasons = []
    for url in source.urls:
        try:
            _request_with_retries(url, part, progress, source.size if sized else None, tries, pause, timeout)
            return
        except _Refused as reason:
            reasons.append(f"  {url}: {reason}")
    kept = f" {part.stat().st_size:,} bytes are kept in {part}, and the same command goes on from there." if part.exists() else ""
    tried = "\n".join(reasons)
    raise ConnectionError(f"{source.file} could not be downloaded. Tried:\n{tried}\nIs this machine offline?{kept} Or get the "
                          f"file by other means ({source.size / 1e6:.1f} MB, from {source.urls[0]}) and pass --from FILE, "
                          f"where FILE is {source.accepted_files}.")


def _request_with_retries(url: str, part: Path, progress: Progress, size: int | None, tries: int, pause: float,
                          timeout: float) -> None:
    """Request the bytes that `part` lacks from the address `url`, and again after a pause where the connection is cut.

    What comes is appended to `part`. A pause is `pause` seconds, doubled for each failure in a row without a new byte. Raises
    _Refused after `tries` failures without a new byte, and at once for an answer that will not change, such as 404. `size` is
    that of the whole file, None where unknown; `timeout` is in seconds, and `progress` is called with the bytes so far and in
    all.
    """
    failed = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _request_missing_bytes(url, part, progress, size, timeout)
            return
        except urllib.error.HTTPError as reason:
            reason.close()
            if reason.code < 500 and reason.code not in (408, 429):
                raise _Refused(f"HTTP {reason.code}, {reason.reason}") from None
            why = f"HTTP {reason.code}, {reason.reason}"
        except urllib.error.URLError as reason:
            if not isinstance(reason.reason, (TimeoutError, ConnectionResetError)):
                raise _Refused(str(reason.reason)) from None
            why = f"no connection ({reason.reason})"
        except _CUT as reason:
            why = f"the connection was cut ({type(reason).__name__}: {reason})"
        failed = 0 if part.exists() and part.stat().st_size > before else failed + 1
        if failed >= tries:
            raise _Refused(f"{why}, {tries} times in a row")
        time.sleep(pause * 2 ** failed)


def _request_missing_bytes(url: str, part: Path, progress: Progress, size: int | None, timeout: float) -> None:
    """Make one request to `url` for the bytes that `part` lacks, and append them to it.

    Nothing is requested where it has `size` bytes already. `size` is that of the whole file, None where unknown; `timeout` is in
    seconds, and `progress` is called with the bytes so far and in all. A part longer than the file is deleted. Raises what urllib
    raises where the request fails, and ConnectionResetError where the server says that the part is too long.
    """
    have = part.stat().st_size if part.exists() else 0
    if size is not None and have == size:
        return
    if size is not None and have > size:
        part.unlink()
        have = 0
    headers = {"User-Agent": f"fedtail/{__version__}", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers={**headers, "Range": f"bytes={have}-"} if have else headers)
    try:
        reply = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as reason:
        if reason.code != 416:                          # nothing is left to send, or the part is longer than the file
            raise
        whole = _length_from_content_range(reason.headers.get("Content-Range"))
        reason.close()
        if whole != have:
            part.unlink()
            raise ConnectionResetError("the part kept is longer than the file") from None
        return
    with reply:
        _append_reply(reply, part, have, progress, size)


def _append_reply(reply: Any, part: Path, have: int, progress: Progress, size: int | None) -> None:
    """Append the content of `reply`, an open HTTP response, to the file `part`, after its first `have` bytes.

    Where the server sends the whole file instead, it replaces `part`. Raises EOFError where the connection ends early, _Refused
    where the server's file is not of `size` or it sends other bytes than requested, OSError where the disk is too full.
    `progress` is called with the bytes so far and in all (0 where unknown).
    """
    span = reply.headers.get("Content-Range", "")
    if reply.status == 206 and not span.startswith(f"bytes {have}-"):
        raise _Refused(f"requested were the bytes from {have} on, the server sent {span!r}")
    have = have if reply.status == 206 else 0           # else the server sends all of it, whatever was requested
    length = reply.headers.get("Content-Length")
    total = have + int(length) if length is not None else size
    if size is not None and total is not None and total != size:
        raise _Refused(f"the server has {total:,} bytes, the published file {size:,}: it was replaced, or this is a page that "
                       "asks for something. --sha256 accepts another file")
    if total is not None and shutil.disk_usage(part.parent).free < total - have:
        raise OSError(f"{part.parent} has too little room for {(total - have) / 1e9:.1f} GB more.")
    with part.open("ab" if have else "wb", buffering=0) as file:      # what has come is kept, however this ends
        progress(have, total or 0)
        while block := reply.read1(_BLOCK):
            file.write(block)
            have += len(block)
            progress(have, total or 0)
    if total is not None and have < total:
        raise EOFError(f"{have:,} of {total:,} bytes")


def _length_from_content_range(span: str | None) -> int | None:
    """The length of the whole file in bytes, from `span`, a Content-Range header such as `bytes */1234`.

    None where there is no header, or it does not say.
    """
    end = (span or "").rpartition("/")[2]
    return int(end) if end.isdigit() else None
