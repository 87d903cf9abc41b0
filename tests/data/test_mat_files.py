import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import loadmat, savemat

from overt.data.mat_files import ArraySpec, read_arrays
from overt.errors import CorruptFileError, UserError

HEAD = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
TABLE = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
SPECS = {"a": ArraySpec((2, 3, 4), ("uint8",)), "b": ArraySpec((2, 1))}


def write_mat(path: Path, compressed: bool = True, **changes: object) -> Path:
    arrays = {"other": "words", "a": TABLE, "b": np.array([[1.5], [-2.0]]), **changes}
    savemat(path, arrays, do_compression=compressed)
    return path


def make_element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def make_matrix(data: bytes, shape: tuple[int, ...] = (2, 3, 4), flags: int = 9) -> bytes:
    """The bytes of an array named a, built after the format description."""
    sizes = struct.pack(f"<{len(shape)}i", *shape)
    name = struct.pack("<HH", 1, 1) + b"a\0\0\0"
    return make_element(
        14, make_element(6, struct.pack("<II", flags, 0)) + make_element(5, sizes) + name + data
    )


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize(
    "kind", "uint8 int8 uint16 int16 uint32 int32 uint64 int64 float32 float64".split()
)
def test_arrays_agree_with_scipy(tmp_path, compressed, kind):
    values = np.random.default_rng(0).integers(0, 100, (5, 2, 3)).astype(kind)
    path = write_mat(tmp_path / "x.mat", compressed, values=values, one=np.ones((1, 1), kind))
    name = {"float32": "single", "float64": "double"}.get(kind, kind)
    specs = {"one": ArraySpec((1, 1), (name,)), "values": ArraySpec((5, 2, 3), (name,))}
    found = read_arrays(path, specs)
    expected = loadmat(path)
    assert list(found) == ["values", "one"] and found["values"].dtype == np.dtype(kind)
    for each in specs:
        np.testing.assert_array_equal(found[each], expected[each])


def test_hand_built_element_is_read(tmp_path):
    path = tmp_path / "x.mat"
    path.write_bytes(HEAD + make_matrix(make_element(2, TABLE.tobytes(order="F"))))
    np.testing.assert_array_equal(read_arrays(path, {"a": SPECS["a"]})["a"], TABLE)


def test_big_endian_files_are_read(tmp_path):
    def big_endian(kind: int, data: bytes) -> bytes:
        return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)

    values = np.array([[258.0, -1.0]])
    name = struct.pack(">HH", 1, 1) + b"a\0\0\0"
    described = (
        big_endian(6, struct.pack(">II", 6, 0)) + big_endian(5, struct.pack(">ii", 1, 2)) + name
    )
    path = tmp_path / "x.mat"
    head = HEAD[:124] + b"\x01\x00MI"
    path.write_bytes(
        head + big_endian(14, described + big_endian(3, values.astype(">i2").tobytes()))
    )
    found = read_arrays(path, {"a": ArraySpec((1, 2), ("double",))})["a"]
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(found, loadmat(path)["a"])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"a": TABLE[:1]}, r"a is uint8 .*1 x 3 x 4.*2 x 3 x 4"),
        ({"a": TABLE.astype(np.int16)}, r"a is int16 of"),
        ({"a": TABLE * 1j}, r"a .*complex"),
        ({"a": "text"}, r"a .*else"),
        ({"a": np.array([1, "two"], dtype=object)}, r"a .*else"),
        ({"a": {"field": 1}}, r"a .*else"),
        ({"b": np.ones((2, 2))}, r"b .*double.*2 x 2"),
    ],
)
def test_array_of_another_dtype_or_shape_raises(tmp_path, changes, match):
    with pytest.raises(CorruptFileError, match=match):
        read_arrays(write_mat(tmp_path / "x.mat", **changes), SPECS)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (make_element(2, bytes(23)), "23 bytes .*24"),
        (make_element(2, bytes(24))[:20], "shorter"),
        (make_element(9, bytes(8 * 24)), "float64.*uint8"),
        (make_element(14, bytes(24)), "numbers"),
        (struct.pack("<II", 2, 0xFFFFFFF0), "bytes.* 24"),
        (struct.pack("<HH", 2, 24) + bytes(4), "broken"),
    ],
)
def test_data_that_does_not_match_its_header_raises(tmp_path, data, match):
    path = tmp_path / "x.mat"
    path.write_bytes(HEAD + make_matrix(data))
    with pytest.raises(CorruptFileError, match=match):
        read_arrays(path, {"a": SPECS["a"]})


def test_decompression_bomb_is_not_decompressed(tmp_path):
    """The header claims two gigabytes, for a requested array and for another one."""
    zeros = zlib.compressobj()
    packed = zeros.compress(
        make_matrix(make_element(2, bytes(24)))[:-32] + struct.pack("<II", 2, 1 << 31)
    )
    packed += b"".join(zeros.compress(bytes(1 << 20)) for _ in range(64)) + zeros.flush()
    path = tmp_path / "x.mat"
    path.write_bytes(HEAD + struct.pack("<II", 15, len(packed)) + packed)
    with pytest.raises(CorruptFileError, match=r"2147483648.* 24"):
        read_arrays(path, {"a": SPECS["a"]})
    with pytest.raises(CorruptFileError, match="no array z"):
        read_arrays(path, {"z": SPECS["a"]})


def test_corrupt_compressed_elements_raise(tmp_path):
    whole = zlib.compress(make_matrix(make_element(2, TABLE.tobytes())))
    long = zlib.compress(make_matrix(make_element(2, TABLE.tobytes())) + bytes(100))
    path = tmp_path / "x.mat"
    for packed, match in [
        (whole[:-1] + bytes([whole[-1] ^ 1]), "check"),
        (whole[:-4], "ends early"),
        (long, "longer"),
        (zlib.compress(bytes(64)), "not an array"),
        (b"nonsense", "x.mat: "),
    ]:
        path.write_bytes(HEAD + struct.pack("<II", 15, len(packed)) + packed)
        with pytest.raises(CorruptFileError, match=match):
            read_arrays(path, {"a": SPECS["a"]})


def test_missing_files_and_other_formats_raise(tmp_path):
    path = tmp_path / "x.mat"
    with pytest.raises(UserError, match="missing"):
        read_arrays(path, SPECS)
    later = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(400)
    for content in (
        b"",
        b"GIF89a",
        bytes(500),
        b"\x89HDF\r\n\x1a\n" + bytes(500),
        later,
        HEAD[:127],
    ):
        path.write_bytes(content)
        with pytest.raises(CorruptFileError, match="MATLAB 5"):
            read_arrays(path, SPECS)
    path.write_bytes(HEAD)
    with pytest.raises(CorruptFileError, match="no array a"):
        read_arrays(path, SPECS)


@pytest.mark.parametrize("compressed", [True, False])
def test_truncated_file_raises_one_sentence(tmp_path, compressed):
    path = write_mat(tmp_path / "x.mat", compressed)
    data = path.read_bytes()
    for cut in range(len(data) - 8):
        path.write_bytes(data[:cut])
        with pytest.raises(CorruptFileError) as caught:
            read_arrays(path, SPECS)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=300)
@given(place=st.integers(120, 10_000), value=st.integers(0, 255), compressed=st.booleans())
def test_changed_byte_gives_arrays_or_raises(tmp_path_factory, place, value, compressed):
    path = write_mat(tmp_path_factory.mktemp("mat") / "x.mat", compressed)
    data = bytearray(path.read_bytes())
    data[120 + place % (len(data) - 120)] = value
    path.write_bytes(data)
    try:
        found = read_arrays(path, SPECS)
    except CorruptFileError:
        return
    assert found["a"].shape == (2, 3, 4) and found["b"].shape == (2, 1)
