"""Public sets are fetched from a real server on this machine: cut connections, ranges, wrong files, nothing at all; then prepared.

The files are small ones in the true formats, written here.
"""

import hashlib
import http.server
import io
import json
import lzma
import sqlite3
import struct
import threading
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedtail
from fedtail.cli import app
from fedtail.data import Population
from fedtail.data.fetching import CATALOGUE, PublicFile, Wishes, download, fetch, find_public_set
from fedtail.data.fetching.client_database import read_features
from fedtail.data.fetching.downloading import WrongFile
from fedtail.data.fetching.shakespeare import OTHER, cut_windows, letter_codes
from fedtail.data.fetching.words import WordVectors
from fedtail.data.opening import open_any_data

CONTENT = np.random.default_rng(0).bytes(700_000)


@dataclass
class Site:
    """What the server has, how it behaves, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cut_after: list[int] = field(default_factory=list)      # of the next replies, how many bytes are sent before the line goes dead
    status: list[int] = field(default_factory=list)         # of the next replies
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        site = self.server.site
        wanted = self.headers.get("Range")
        site.asked.append((self.path, wanted))
        content = site.files.get(self.path.lstrip("/"))
        status = site.status.pop(0) if site.status else 200 if content is not None else 404
        if status != 200:
            self.send_error(status)
            return
        begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and site.ranges else 0
        if begin >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if wanted and site.ranges else 200)
        if wanted and site.ranges:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        end = begin + site.cut_after.pop(0) if site.cut_after else len(content)
        self.wfile.write(content[begin:end])

    def log_message(self, *_):
        pass


@pytest.fixture
def site():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.site = Site({"file.bin": CONTENT}, address=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.site
    server.shutdown()
    server.server_close()
    thread.join()


def source(site: Site, content: bytes = CONTENT, **changes) -> PublicFile:
    made = PublicFile("file.bin", (f"{site.address}/file.bin",), len(content), sha(content), "nobody", ("else",))
    return replace(made, **changes)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def got(path: Path) -> bytes:
    return path.read_bytes()


# Downloads


def test_a_file_comes_whole_with_its_progress_and_is_not_asked_for_again(site, tmp_path):
    seen = []
    path = download(source(site), tmp_path, lambda done, total: seen.append((done, total)))
    assert got(path) == CONTENT
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.bin"]
    assert (seen[0], seen[-1]) == ((0, len(CONTENT)), (len(CONTENT), len(CONTENT)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    download(source(site), tmp_path)
    assert len(site.asked) == 1


def test_a_connection_that_is_cut_is_taken_up_where_it_ended(site, tmp_path):
    site.cut_after = [300_000, 0, 150_000]
    assert got(download(source(site), tmp_path, pause=0)) == CONTENT
    assert [wanted for _, wanted in site.asked] == [None, "bytes=300000-", "bytes=300000-", "bytes=450000-"]


def test_what_an_earlier_command_left_is_continued(site, tmp_path):
    site.cut_after = [250_000, *[0] * 10]
    with pytest.raises(ConnectionError, match=r"250,000 bytes are kept in .*file.bin.part, and the same command goes on"):
        download(source(site), tmp_path, tries=2, pause=0)
    assert (tmp_path / "file.bin.part").stat().st_size == 250_000
    site.cut_after, site.asked = [], []
    assert got(download(source(site), tmp_path)) == CONTENT
    assert site.asked == [("/file.bin", "bytes=250000-")]


def test_what_has_come_is_on_disk_at_once(site, tmp_path):
    """A process that is killed loses nothing: every call of `progress` finds its bytes in the part."""
    sizes = []
    download(source(site), tmp_path, lambda done, total: sizes.append((done, (tmp_path / "file.bin.part").stat().st_size)))
    assert all(done == kept for done, kept in sizes)


def test_a_server_without_ranges_starts_again_from_the_beginning(site, tmp_path):
    site.ranges, site.cut_after = False, [400_000]
    assert got(download(source(site), tmp_path, pause=0)) == CONTENT


def test_a_part_of_another_file_is_thrown_away_and_the_file_fetched_anew(site, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"older" * 1000)
    assert got(download(source(site), tmp_path, pause=0)) == CONTENT
    assert [wanted for _, wanted in site.asked] == ["bytes=5000-", None]


@pytest.mark.parametrize("kept", [len(CONTENT), len(CONTENT) + 7])
def test_a_part_that_is_whole_or_too_long_does_no_harm(site, tmp_path, kept):
    (tmp_path / "file.bin.part").write_bytes((CONTENT + b"1234567")[:kept])
    assert got(download(source(site), tmp_path, pause=0)) == CONTENT
    for other in (tmp_path / "a", tmp_path / "b"):                       # without a known size the server is asked
        other.mkdir()
        (other / "file.bin.part").write_bytes((CONTENT + b"1234567")[:kept])
        assert got(download(source(site, size=1), other, sha256=sha(CONTENT), pause=0)) == CONTENT


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(site, tmp_path):
    wrong = source(site, sha256="0" * 64)
    with pytest.raises(WrongFile, match=f"its SHA-256 is {sha(CONTENT)}, published is 0000.*pass --sha256 {sha(CONTENT)}"):
        download(wrong, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert got(download(wrong, tmp_path, sha256=sha(CONTENT).upper())) == CONTENT
    with pytest.raises(WrongFile, match="published is 0000"):
        download(wrong, tmp_path)                                        # what lies there is looked at too


def test_a_wrong_size_is_refused_before_it_is_downloaded(site, tmp_path):
    with pytest.raises(ConnectionError, match=r"the server has 700,000 bytes, the published file 700,001: it was replaced"):
        download(source(site, size=len(CONTENT) + 1), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_address_after_another_is_tried_and_all_are_named(site, tmp_path):
    gone = (f"{site.address}/gone", "http://127.0.0.1:9/none", "http://nowhere.invalid/file.bin")
    with pytest.raises(ConnectionError) as refused:
        download(source(site, urls=gone), tmp_path)
    text = str(refused.value)
    assert f"{gone[0]}: HTTP 404, Not Found" in text
    assert f"{gone[1]}: [Errno 111] Connection refused" in text
    assert f"{gone[2]}: " in text
    assert "Is this machine offline? Or get the file by other means (0.7 MB, from " in text
    assert "pass --from FILE, where FILE is file.bin or else." in text
    assert got(download(source(site, urls=(*gone, f"{site.address}/file.bin")), tmp_path)) == CONTENT


def test_a_server_in_trouble_is_asked_again_but_not_for_ever(site, tmp_path):
    site.status = [503, 500]
    assert got(download(source(site), tmp_path / "a", pause=0)) == CONTENT
    site.status, site.asked = [503] * 9, []
    with pytest.raises(ConnectionError, match="HTTP 503, Service Unavailable, 3 times in a row"):
        download(source(site), tmp_path / "b", tries=3, pause=0)
    assert len(site.asked) == 3


# Files in the formats of the published ones


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def sized(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(**held) -> bytes:
    """A serialised tf.train.Example."""
    entries = b""
    for name, value in held.items():
        if isinstance(value, bytes):
            feature = sized(1, sized(1, value))
        elif isinstance(value, int):
            feature = sized(3, sized(1, varint(value)))
        else:
            feature = sized(2, sized(1, struct.pack(f"<{len(value)}f", *value)))
        entries += sized(1, sized(1, name.encode()) + sized(2, feature))
    return sized(1, entries)


def database(rows: list[tuple[str, str, bytes]], path: Path) -> bytes:
    """As TensorFlow Federated has it, (split, client, example), under LZMA."""
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        connection.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        connection.execute("INSERT INTO client_metadata SELECT client_id, split_name, COUNT(*) FROM examples GROUP BY 1, 2")
    connection.close()
    return lzma.compress(path.read_bytes(), format=lzma.FORMAT_ALONE)


def pictures(path: Path) -> tuple[bytes, dict[str, list]]:
    """Three writers whose images stand in no order; digits appear again in splits of their own, as in the published file."""
    random = np.random.default_rng(1)
    rows, held = [], {"f0001_01": ([], []), "f0000_14": ([], []), "f0002_00": ([], [])}
    for place in range(40):
        writer = list(held)[place % 3 if place < 35 else 0]
        pixels, label, part = random.random(784).astype(np.float32), int(random.integers(62)), place % 5 == 0
        rows.append((("all_train", "all_test")[part], writer, example(label=label, pixels=pixels.tolist())))
        rows.append(("digits_only_train", writer, example(label=1, pixels=[0.5] * 784)))
        held[writer][part].append((pixels.reshape(28, 28), label))
    return database(rows, path), {writer: first + last for writer, (first, last) in sorted(held.items())}


def fetched(site: Site, name: str, content: bytes, out: Path, **wishes) -> dict:
    site.files["it"] = content
    notes: list[str] = []
    record = fetch(name, out, Wishes(url=f"{site.address}/it", sha256=sha(content), **wishes), out.parent / "cache", note=notes.append)
    return {**record, "notes": notes}


def test_features_are_read_packed_or_not_and_damage_is_named():
    read = read_features(example(label=300, pixels=[0.25, 1.0], text=b"abc"))
    assert (read["label"].tolist(), read["pixels"].tolist(), read["text"]) == ([300], [0.25, 1.0], [b"abc"])
    loose = sized(1, sized(1, sized(1, b"v") + sized(2, sized(2, b"".join(b"\x0d" + struct.pack("<f", x) for x in (1.5, 2.5))))))
    assert read_features(loose)["v"].tolist() == [1.5, 2.5]
    numbers = sized(1, sized(1, sized(1, b"n") + sized(2, sized(3, b"\x08\x05\x08" + varint(2**64 - 1)))))
    assert read_features(numbers)["n"].tolist() == [5, -1]
    for cut in (example(label=3)[:-1], example(pixels=[0.5])[:-3], b"\x0a\xff"):
        with pytest.raises(ValueError, match="an example is damaged"):
            read_features(cut)


def test_femnist_becomes_a_population_of_writers(site, tmp_path):
    content, held = pictures(tmp_path / "it.sqlite")
    record = fetched(site, "femnist", content, tmp_path / "femnist")
    people = open_any_data(tmp_path / "femnist")
    assert (people.names.tolist(), people.size.tolist()) == (list(held), [len(images) for images in held.values()])
    for k, images in enumerate(held.values()):
        x, y = people.client(k)
        np.testing.assert_array_equal(x.numpy(), np.stack([image for image, _ in images]))      # training part first
        assert (x.dtype, y.tolist()) == (torch.float32, [label for _, label in images])
    assert record["notes"] == ["this file holds 3 clients, the published one 3,400.", "this file holds 40 examples, the published one 749,068."]
    assert (record["sha256"], record["clients"], record["examples"]) == (sha(content), 3, 40)
    assert json.loads((tmp_path / "femnist" / "source.json").read_text())["sha256"] == sha(content)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cache", "femnist", "it.sqlite"]
    few = fetch("femnist", tmp_path / "few", Wishes(file=tmp_path / "it.sqlite", at_least=15))
    assert few["clients"] == sum(len(images) >= 15 for images in held.values()) == 1


def test_a_database_that_does_not_hold_what_it_says_is_refused(site, tmp_path):
    content, _ = pictures(tmp_path / "it.sqlite")
    with sqlite3.connect(tmp_path / "it.sqlite") as connection:
        connection.execute("DELETE FROM examples WHERE rowid = (SELECT MIN(rowid) FROM examples)")
    connection.close()
    with pytest.raises(ValueError, match=r"it\.sqlite has fewer images than it says"):
        fetch("femnist", tmp_path / "out", Wishes(file=tmp_path / "it.sqlite"))
    other = database([("train", "A", example(snippets=b"no"))], tmp_path / "other.sqlite")
    (tmp_path / "other.lzma").write_bytes(other)
    with pytest.raises(ValueError, match="has no clients in all_train or all_test; it has train"):
        fetch("femnist", tmp_path / "out", Wishes(file=tmp_path / "other.lzma"))
    (tmp_path / "cut.lzma").write_bytes(content[:-1000])
    for bad in ("cut.lzma", "test.txt"):
        (tmp_path / "test.txt").write_text("something else entirely")
        with pytest.raises(ValueError, match=f"{bad} is neither a SQLite database nor one under LZMA"):
            fetch("femnist", tmp_path / "out", Wishes(file=tmp_path / bad))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_shakespeare_becomes_windows_by_role(site, tmp_path):
    speeches = {"LEAR_KING": ["Blow, winds, and crack your cheeks! rage! blow!", "Rumble thy bellyful!"], "LEAR_FOOL": ["short"],
                "HAMLET_GHOST": ["Mark me. I am thy father's spirit"]}
    rows = [("test" if place else "train", role, example(snippets=text.encode())) for role, said in speeches.items()
            for place, text in reversed(list(enumerate(said)))]                                  # the test part stands first
    content = database(rows, tmp_path / "it.sqlite")
    record = fetched(site, "shakespeare", content, tmp_path / "shakespeare")
    people = Population.open(tmp_path / "shakespeare")
    assert people.names.tolist() == ["HAMLET_GHOST", "LEAR_KING"]                               # no window fits into the fool's words
    joined = "\n".join(speeches["LEAR_KING"])
    x, y = people.client(1)
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    codes = [alphabet.index(c) if c in alphabet else 52 for c in joined]
    assert x.tolist() == [codes[i:i + 20] for i in range(len(codes) - 20)]
    assert y.tolist() == codes[20:]
    assert record["holds"] == {"clients": 3, "snippets": 4}
    task = fedtail.Task(fedtail.models.CharacterGRU(hidden=4))
    assert fedtail.train(fedtail.fedavg(2, learning_rate=0.1), task, people, rounds=1).state.round == 1


def test_letters_have_fifty_three_classes():
    assert letter_codes("azAZ 9\u20ac").tolist() == [0, 25, 26, 51, OTHER, OTHER, OTHER]
    x, y = cut_windows(letter_codes("abcd"), 3)
    assert (x.tolist(), y.tolist()) == ([[0, 1, 2]], [3])
    assert [part.shape for part in cut_windows(letter_codes("abc"), 3)] == [(0, 3), (0,)]


def glove_zip(dimension: int = 50) -> tuple[bytes, dict[str, np.ndarray]]:
    random, words = np.random.default_rng(2), ["the", ",", "good", "bad", "n't", "do", "day", "!"]
    vectors = {word: random.normal(size=dimension).round(5).astype(np.float32) for word in words}
    text = "".join(f"{word} {' '.join(f'{x:.5f}' for x in vector)}\n" for word, vector in vectors.items())
    return zipped({f"glove.6B.{dimension}d.txt": text.encode(), "glove.6B.100d.txt": b"the 1 2\n"}), vectors


def zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def tweets_zip(rows: list[tuple[int, str, str]]) -> bytes:
    text = "".join(f'"{label}","{place}","Mon Apr 06","NO_QUERY","{account}","{said}"\n' for place, (label, account, said) in enumerate(rows))
    return zipped({"training.1600000.processed.noemoticon.csv": text.encode("latin-1"), "testdata.manual.2009.06.14.csv": b"2,x"})


TWEETS = [(4, "ann", "Good day!"), (0, "bob", "bad, bad http://t.co/x"), (4, "ann", "@bob don't"), (0, "ann", "caf\xe9"), (4, "zed", "day"),
          (0, "bob", " ".join(["good"] * 30))]


def test_sent140_becomes_mean_vectors_and_words_by_account(site, tmp_path):
    packed, vectors = glove_zip()
    fetched(site, "glove", packed, tmp_path / "glove")
    record = fetched(site, "sent140", tweets_zip(TWEETS), tmp_path / "sent140", at_least=2)
    means, words = (Population.open(tmp_path / "sent140" / form) for form in ("means", "words"))
    assert (means.size.tolist(), means.targets.tolist(), words.targets.tolist()) == ([3, 2], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0])
    said = [["good", "day", "!"], ["do", "n't"], [], ["bad", ",", "bad"], ["good"] * 30]         # no address, no account, no unknown word
    zero = np.zeros(50, np.float32)
    np.testing.assert_allclose(means.inputs.numpy(), [np.mean([vectors[w] for w in text], 0) if text else zero for text in said], atol=1e-6)
    known = WordVectors.open(tmp_path / "sent140")
    spelt = [[known.words[token] for token in row[:length]] for row, length in
             zip(words.inputs["sequence"].tolist(), words.inputs["lengths"].tolist(), strict=True)]
    assert spelt == [text[:25] for text in said]
    np.testing.assert_array_equal(known.vectors[known.words.index("good")], vectors["good"])
    assert (record["holds"], record["words"]) == ({"tweets": 6, "accounts": 3}, 7)
    assert means.names.tolist() == [0, 1]                                                        # no account names
    model = fedtail.models.LSTMClassifier(torch.tensor(np.array(known.vectors)), hidden=4)
    assert fedtail.train(fedtail.fedavg(2, learning_rate=0.1), fedtail.Task(model), words, rounds=1).state.round == 1


def test_without_word_vectors_sent140_fetches_them_first_and_says_how_to_hand_them_over(site, tmp_path, monkeypatch):
    packed, tweets = glove_zip()[0], tweets_zip(TWEETS)      # once: a zip holds the time it was made
    glove = find_public_set("glove")
    here = replace(glove, source=replace(glove.source, urls=(f"{site.address}/glove",), size=len(packed), sha256=sha(packed)))
    monkeypatch.setattr("fedtail.data.fetching.catalogue.CATALOGUE", tuple(here if s is glove else s for s in CATALOGUE))
    with pytest.raises(ConnectionError, match=r"glove.6B.zip could not be (.|\n)*404(.|\n)*fetch glove --from FILE --out .*glove, then sent140 again"):
        fetched(site, "sent140", tweets, tmp_path / "sent140", at_least=1)
    site.files["glove"] = packed
    assert fetched(site, "sent140", tweets, tmp_path / "sent140", at_least=1)["clients"] == 3
    assert (tmp_path / "glove" / "vectors.npy").is_file()
    with pytest.raises(FileNotFoundError, match=r"there are no word vectors in .*elsewhere: it lacks words.txt"):
        fetched(site, "sent140", tweets, tmp_path / "again", vectors=tmp_path / "elsewhere")


def test_files_of_another_kind_are_refused_by_name(site, tmp_path):
    packed, _ = glove_zip()
    fetched(site, "glove", packed, tmp_path / "glove")
    (tmp_path / "one.csv").write_text('"4","1","d","q","ann"\n')
    (tmp_path / "vectors.txt").write_text("the 1 2 3\n")
    for name, file, text in [("sent140", "one.csv", "row 1: six columns are needed, the first 0, 2 or 4"),
                             ("glove", "vectors.txt", "line 1: 3 numbers for 'the', 50 are needed"),
                             ("femnist", "nothing", "there is nothing at .*Pass emnist_all.sqlite.lzma, emnist_all.sqlite or a folder")]:
        with pytest.raises((ValueError, FileNotFoundError), match=text):
            fetch(name, tmp_path / "out", Wishes(file=tmp_path / file, vectors=tmp_path / "glove"))
    with pytest.raises(ValueError, match=r"there is no public set called 'femnst'; .* Did you mean femnist\?"):
        fetch("femnst", tmp_path / "out")


def test_leaf_folders_are_prepared_too(tmp_path):
    def leaf(name: str, **users) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
        (folder / "all.json").write_text(json.dumps({"users": list(data), "num_samples": [len(d["y"]) for d in data.values()],
                                                     "user_data": data}))
        return folder

    images = leaf("images", f1=([[0.0] * 784, [1.0] * 784], [3, 61]), f2=([[0.5] * 784], [0]))
    assert fetch("femnist", tmp_path / "a", Wishes(file=images, at_least=2))["clients"] == 1
    assert Population.open(tmp_path / "a").inputs.shape == (2, 28, 28)
    text = "To be, or not to be: that is the question. " * 3
    plays = leaf("plays", HAM=([text[i:i + 80] for i in range(9)], list(text[80:89])))
    fetch("shakespeare", tmp_path / "b", Wishes(file=plays, window=5))
    assert Population.open(tmp_path / "b").inputs.tolist() == [letter_codes(text[i + 75:i + 80]).tolist() for i in range(9)]
    said = leaf("said", ann=([["1", "d", "q", "ann", "good day"], ["2", "d", "q", "ann", "bad"]], [1, 0]))
    packed, _ = glove_zip()
    (tmp_path / "glove.zip").write_bytes(packed)
    fetch("glove", tmp_path / "glove", Wishes(file=tmp_path / "glove.zip"))
    assert fetch("sent140", tmp_path / "c", Wishes(file=said, at_least=1))["examples"] == 2


# The command


def command(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["data", "fetch", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_fetches_says_where_from_and_does_not_write_twice(site, tmp_path):
    content, _ = pictures(tmp_path / "it.sqlite")
    site.files["it"] = content
    given = ("femnist", "--out", tmp_path / "femnist", "--url", f"{site.address}/it", "--sha256", sha(content), "--cache", tmp_path / "cache")
    code, out, err = command(*given)
    assert code == 0, err
    assert f"Wrote {tmp_path / 'femnist'}: 3 clients, 40 examples. Look: fedtail data describe {tmp_path / 'femnist'}" in out
    assert f"From emnist_all.sqlite.lzma, SHA-256 {sha(content)}." in out
    assert "Licence: NIST" in out
    assert "MB" in err
    code, _, err = command(*given)
    assert (code, "holds femnist already. Use it, or pass --again" in err) == (2, True)
    code, out, _ = command(*given, "--again", "--json", "--at-least", "15")
    assert (code, json.loads(out)["clients"]) == (0, 1)
    assert len(Population.open(tmp_path / "femnist")) == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    code, _, err = command("femnist", "--from", tmp_path / "it.sqlite", "--out", tmp_path / "mine")
    assert (code, "holds other files. Choose another folder with --out" in err) == (2, True)
    described = CliRunner().invoke(app, ["data", "describe", str(tmp_path / "femnist")])
    assert described.exit_code == 0, described.output


def test_a_file_at_hand_must_be_the_published_one_or_be_vouched_for(tmp_path):
    content, _ = pictures(tmp_path / "it.sqlite")
    (tmp_path / "emnist_all.sqlite.lzma").write_bytes(content)
    given = ("femnist", "--out", tmp_path / "femnist", "--from", tmp_path / "emnist_all.sqlite.lzma")
    code, _, err = command(*given)
    assert (code, f"its SHA-256 is {sha(content)}, published is c3aaf91b" in err) == (2, True)
    assert f"It has {len(content):,} bytes, the published one 170,507,172." in err
    assert command(*given, "--sha256", sha(content))[0] == 0


def test_offline_the_command_says_what_to_do(tmp_path):
    code, out, err = command("shakespeare", "--url", "http://127.0.0.1:9/gone", "--out", tmp_path / "s", "--cache", tmp_path)
    assert (code, out) == (2, "")
    assert "shakespeare.sqlite.lzma could not be downloaded. Tried:\n  http://127.0.0.1:9/gone: [Errno 111] Connection refused" in err
    assert "pass --from FILE, where FILE is shakespeare.sqlite.lzma, shakespeare.sqlite or a folder of LEAF's json files." in err


def test_the_list_has_source_size_licence_and_what_it_becomes():
    code, out, _ = command("--list")
    assert code == 0
    for public in CATALOGUE:
        for text in (public.name, public.source.urls[0], f"{public.source.size / 1e6:,.1f} MB", public.licence, public.becomes,
                     public.source.sha256, public.source.checked_by):
            assert text in out
        assert len(bytes.fromhex(public.source.sha256)) == 32
    code, out, _ = command("--list", "--json")
    assert [entry["name"] for entry in json.loads(out)["sets"]] == ["femnist", "shakespeare", "sent140", "glove"]
