"""Primitives against published vectors, secret sharing, and the canonical encoding."""

import contextlib
import itertools
import os
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtail.secure import Client, Participant, Refused, Session, centre_residues, masks, shamir
from fedtail.secure.encoding import U8, U16, U64, Blob, Key, decode, encode
from fedtail.secure.frames import decode_frame, encode_frame
from fedtail.secure.masks import add_masks, row_from_bytes, row_to_bytes, to_residues, word_dtype
from fedtail.secure.messages import KeyList, Keys
from fedtail.secure.primitives import (
    derive_key,
    fill_with_key_stream,
    identity_public_key,
    is_signed_by,
    key_stream,
    make_key_agreement,
    public_key,
    seal,
    sign,
    system,
    unseal,
)

h = bytes.fromhex

# Published vectors. They are facts, quoted with their source.


@pytest.mark.parametrize(("scalar", "point", "product"), [      # RFC 7748, section 5.2
    ("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
     "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
     "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"),
    ("4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
     "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
     "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957"),
])
def test_x25519_products(scalar, point, product):
    assert make_key_agreement(h(scalar))(h(point)).hex() == product


def test_x25519_agreement():                                    # RFC 7748, section 6.1
    alice = h("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = h("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    assert public_key(alice).hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert public_key(bob).hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert make_key_agreement(alice)(public_key(bob)).hex() == make_key_agreement(bob)(public_key(alice)).hex() == shared


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31), h("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f")])
def test_a_public_key_of_small_order_is_refused(point):
    with pytest.raises(Refused, match="agrees on zero"):
        make_key_agreement(bytes(range(32)))(point)


@pytest.mark.parametrize(("shared", "salt", "info", "size", "key"), [      # RFC 5869, appendix A.1 to A.3
    ("0b" * 22, "000102030405060708090a0b0c", "f0f1f2f3f4f5f6f7f8f9", 42,
     "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"),
    (bytes(range(80)).hex(), bytes(range(0x60, 0xb0)).hex(), bytes(range(0xb0, 0x100)).hex(), 82,
     "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3"
     "db71cc30c58179ec3e87c14c01d5c1f3434f1d87"),
    ("0b" * 22, "", "", 42, "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"),
])
def test_hkdf(shared, salt, info, size, key):
    assert derive_key(h(shared), h(salt), h(info), size).hex() == key


def test_aes_in_counter_mode():                                 # NIST SP 800-38A, F.5.5
    key = h("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    text = h("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e5130c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710")
    sealed = "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c52b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    stream = np.zeros(8, np.uint64)
    fill_with_key_stream(key_stream(key, h("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")), stream, np.zeros(8, np.uint64))
    assert bytes(a ^ b for a, b in zip(stream.tobytes(), text, strict=True)).hex() == sealed


def test_chacha20_poly1305():                                   # RFC 8439, section 2.8.2
    key, about = bytes(range(0x80, 0xa0)), h("50515253c0c1c2c3c4c5c6c7")
    number = int.from_bytes(h("070000004041424344454647"), "big")
    text = b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would be it."
    box = h("d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b1a71de0a9e060b2905d6a5b67ecd3b36"
            "92ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc3ff4def08e4b7a9de576d26586cec64b61161ae10b594f09e26a7e902ecbd0600691")
    assert seal(key, number, text, about) == box
    assert unseal(key, number, box, about) == text
    for wrong in ((key, number + 1, box, about), (key, number, box[:-1] + b"\0", about), (key, number, box, about + b"\0"), (key, number, b"", about)):
        with pytest.raises(Refused, match="do not open"):
            unseal(*wrong)


@pytest.mark.parametrize(("secret", "public", "text", "signature"), [      # RFC 8032, section 7.1, tests 1 and 2
    ("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
     "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a", "",
     "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"),
    ("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
     "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c", "72",
     "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"),
])
def test_ed25519(secret, public, text, signature):
    assert identity_public_key(h(secret)).hex() == public
    assert sign(h(secret), h(text)).hex() == signature
    assert is_signed_by(h(public), h(signature), h(text))
    assert not is_signed_by(h(public), h(signature), h(text) + b"\0")
    assert not is_signed_by(bytes(32), h(signature), h(text))
    assert not is_signed_by(h(public), b"short", h(text))


# Shares


def counting(start=0):
    """Bytes that count up, for known answers."""
    numbers = itertools.count(start)
    return lambda size: bytes(next(numbers) % 256 for _ in range(size))


def is_prime(n, bases=range(2, 60)):
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(any(pow(a, odd << k, n) == (1 if k == 0 and pow(a, odd, n) == 1 else n - 1) for k in range(twos)) for a in bases)


def test_the_field_is_a_prime_above_all_secrets():
    assert is_prime(shamir.PRIME)
    assert 2**256 < shamir.PRIME < 2 ** (8 * shamir.SIZE)
    assert not any(is_prime(2**264 - below) for below in range(1, 275, 2))      # the largest of 33 bytes, as it says


def test_shares_are_values_of_the_polynomial():
    secret, drawn = bytes(range(32)), counting(5)
    shares = shamir.split_secret(secret, 3, [1, 2, 7], drawn)
    again = counting(5)
    top, middle = (int.from_bytes(again(33), "big") for _ in range(2))
    expected = [(top * x * x + middle * x + int.from_bytes(secret, "big")) % shamir.PRIME for x in (1, 2, 7)]
    assert [int.from_bytes(one, "big") for one in shares] == expected


@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.data())
def test_any_threshold_of_shares_gives_the_secret(secret, count, data):
    threshold = data.draw(st.integers(1, count))
    points = data.draw(st.lists(st.integers(1, 2**14), min_size=count, max_size=count, unique=True))
    shares = dict(zip(points, shamir.split_secret(secret, threshold, points), strict=True))
    chosen = data.draw(st.permutations(points))[:threshold]
    assert shamir.restore_secret({x: shares[x] for x in chosen}) == secret
    assert shamir.restore_secret({x: shares[x] for x in chosen}, shamir.lagrange_weights(chosen)) == secret


def test_fewer_shares_fit_every_secret():
    """With one share missing, each secret has exactly one polynomial: so each is as likely as before."""
    secret, points = b"s" * 32, [1, 2, 3]
    shares = shamir.split_secret(secret, 3, points)
    for other in (bytes(32), b"o" * 32, b"\xff" * 32):
        counts = shamir.lagrange_weights(points)
        known = sum(counts[x] * shamir.share_as_integer(shares[x - 1]) for x in (1, 2))
        third = (int.from_bytes(other, "big") - known) * pow(counts[3], -1, shamir.PRIME) % shamir.PRIME
        assert shamir.restore_secret({1: shares[0], 2: shares[1], 3: third.to_bytes(33, "big")}) == other


def test_draws_beyond_the_field_are_drawn_again():
    drawn = [b"\xff" * 33, (7).to_bytes(33, "big")]
    assert shamir.split_secret(bytes(32), 2, [1, 2], lambda size: drawn.pop(0)) == [(7 * x).to_bytes(33, "big") for x in (1, 2)]


def test_the_field_ends_below_its_prime_for_draws_and_for_shares():
    prime, last = ((2**264 - 275 - less).to_bytes(33, "big") for less in (0, 1))
    drawn = [prime, last]
    assert shamir.split_secret(bytes(32), 2, [1, 2], lambda size: drawn.pop(0))[0] == last      # of -1 x
    assert shamir.share_as_integer(last) == 2**264 - 276
    with pytest.raises(Refused, match="not a number of the field"):
        shamir.share_as_integer(prime)


def test_wrong_shares_are_refused_or_give_another_secret():
    shares = shamir.split_secret(b"s" * 32, 2, [1, 2, 3])
    for wrong in (shares[0][:-1], b"\xff" * 33, b""):
        with pytest.raises(Refused, match="not a number of the field"):
            shamir.restore_secret({1: wrong, 2: shares[1]})
    try:
        assert shamir.restore_secret({1: shares[1], 2: shares[0]}) != b"s" * 32
    except Refused as why:
        assert "do not belong together" in str(why)      # noqa: PT017      # 255 times in 256


@pytest.mark.parametrize(("secret", "threshold", "points", "text"), [
    (b"short", 2, [1, 2], "a secret of 32 bytes and a threshold in 1..2"), (bytes(32), 3, [1, 2], "a threshold in 1..2"),
    (bytes(32), 0, [1, 2], "a threshold in 1..2"), (bytes(32), 2, [1, 1], "distinct and positive"), (bytes(32), 2, [0, 1], "distinct and positive"),
])
def test_sharing_says_what_it_needs(secret, threshold, points, text):
    with pytest.raises(ValueError, match=text):
        shamir.split_secret(secret, threshold, points)


# Encoding


@dataclass(frozen=True)
class Inner:
    number: U16
    key: Key


@dataclass(frozen=True)
class Outer:
    small: U8
    names: tuple[U64, ...]
    text: Blob
    inner: tuple[Inner, ...]


inners = st.builds(Inner, st.integers(0, 2**16 - 1), st.binary(min_size=32, max_size=32))
outers = st.builds(Outer, st.integers(0, 255), st.lists(st.integers(0, 2**64 - 1), max_size=5).map(tuple), st.binary(max_size=9),
                   st.lists(inners, max_size=3).map(tuple))


def test_encoding_is_as_documented():
    value = Outer(7, (1, 258), b"ab", (Inner(3, b"k" * 32),))
    assert encode(value) == h("07" "00000002" "0000000000000001" "0000000000000102" "00000002" "6162" "00000001" "0003") + b"k" * 32


@given(outers)
def test_what_is_written_is_read_again(value):
    assert decode(Outer, encode(value)) == value


@given(outers, st.integers(0, 10**6), st.binary(max_size=3))
def test_anything_else_is_refused_or_is_another_value(value, place, extra):
    data = encode(value)
    cut = data[:place % len(data)]
    for other in (cut, data + b"\0", cut + extra, cut + extra + data[len(cut):]):
        try:
            read = decode(Outer, other)
        except Refused:
            continue
        assert encode(read) == other      # one value, one way to write it


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_canonical(data):
    with contextlib.suppress(Refused):
        assert encode(decode(Outer, data)) == data


def test_a_list_that_cannot_end_is_not_begun():
    with pytest.raises(Refused, match="announces 4294967295 values and has 4 bytes left"):
        decode(Outer, h("07" "ffffffff" "00000000"))


@pytest.mark.parametrize("value", [Outer(256, (), b"", ()), Outer(-1, (), b"", ()), Outer(1, (2**64,), b"", ()), Outer(1, (), b"", (Inner(1, b"x"),))])
def test_values_that_do_not_fit_are_refused(value):
    with pytest.raises(Refused):
        encode(value)


# Rows


@given(st.integers(1, 62), st.lists(st.integers(-2**63, 2**63 - 1), max_size=20))
def test_rows_cross_modulo_m(bits, values):
    row = to_residues(np.array(values, dtype=np.int64), bits)
    assert [int(x) for x in row] == [x % 2**bits for x in values]
    data = row_to_bytes(row, bits)
    assert len(data) == len(values) * ((bits + 7) // 8)
    assert (row_from_bytes(data, len(values), bits) == row).all()
    assert [int(x) for x in centre_residues(row, bits)] == [(x + 2**(bits - 1)) % 2**bits - 2**(bits - 1) for x in values]


@pytest.mark.parametrize(("data", "width", "bits"), [(b"\x20", 1, 5), (b"\1\x20\2", 3, 5), (b"\1", 2, 8), (b"\1\1", 1, 8), (b"\0" * 7 + b"\x40", 1, 62)])
def test_rows_of_another_length_or_beyond_m_are_refused(data, width, bits):
    with pytest.raises(Refused, match="a row has"):
        row_from_bytes(data, width, bits)


@pytest.mark.parametrize("row", [np.ones(3), np.ones((2, 2), int), [True], ["1"]])
def test_rows_are_vectors_of_integers(row):
    with pytest.raises(TypeError, match="a row must be a vector of integers"):
        to_residues(row, 8)


@settings(max_examples=20)
@given(st.integers(1, 62), st.integers(0, 70_000), st.integers(0, 3), st.integers(0, 3))
def test_masks_are_the_stream_whatever_the_blocks(bits, width, plus, minus):
    """Several blocks, both word sizes; the stream by itself is the oracle."""
    keys = [bytes([k]) * 32 for k in range(plus + minus)]
    row = np.arange(width).astype(word_dtype(bits))
    expected = row.copy()
    for number, key in enumerate(keys):
        stream = np.frombuffer(key_stream(key).update(bytes(width * row.itemsize)), row.dtype)
        expected = expected + stream if number < plus else expected - stream
    add_masks(row, keys[:plus], keys[plus:])
    assert (row == expected).all()


@pytest.mark.parametrize("together", [1, 2, 3, 7])
def test_masks_are_added_once_each_however_many_streams_are_open(monkeypatch, together):
    keys, row = [bytes([k]) * 32 for k in range(7)], np.arange(5).astype(word_dtype(20))
    streams = [np.frombuffer(key_stream(key).update(bytes(20)), row.dtype) for key in keys]
    expected = row + sum(streams[:4], np.zeros_like(row)) - sum(streams[4:], np.zeros_like(row))
    monkeypatch.setattr(masks, "STREAMS", together)
    add_masks(row, keys[:4], keys[4:])
    assert (row == expected).all()


def secrets_drawn(**settings):
    """All secrets that a client draws in a session and the shares that it gives of them, with every generator of the process seeded."""
    random.seed(0)
    np.random.seed(0)      # noqa: NPY002 (the generator that everybody shares)
    session = Session(b"run", 0, (0, 1), 2, queries=2)
    clients = [Client(session, one, **settings) for one in session.members]
    keys = KeyList(tuple(decode_frame(Keys, one.keys(), session.id, 10**6) for one in clients))
    shares = clients[0].shares(encode_frame(session.id, keys))
    state = clients[0].state
    return {state.sealing, shares, *(part for one in state.secrets for part in (one.mask, one.seed, one.own))}


def test_mask_keys_are_the_operating_systems_and_nobodys_seed():
    """Not from a generator in the process: whoever knows its seed, or a few hundred of its draws, would know every mask."""
    assert secrets_drawn().isdisjoint(secrets_drawn())
    assert system is os.urandom
    assert Participant(0, b"run")._random is os.urandom
    assert secrets_drawn(random=random.randbytes) == secrets_drawn(random=random.randbytes)      # the defect put back in
