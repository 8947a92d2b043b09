"""The bytes of one Trinity-RFT experience: fields and tensors, read without running anything.

Since version 0.5.2 they are `TRXP`, a version byte, two lengths, a pickle of plain fields, and tensors in the
safetensors format. Earlier versions pickled the object with its tensors inside, each as a small file of `torch.save`;
both are taken apart here by hand (`trinity/common/experience.py` of the packages on PyPI shows how they are written).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from buffer_engine.exchange.pickle_tree import Kept, Made, Name, UnreadablePickle, named, plain, read_tree

MAGIC = b"TRXP"
_HEADER = struct.Struct("<BQQ")
Tensor = npt.NDArray[np.generic]

_SAFE_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "BOOL": "?",
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": "<u2", "LongStorage": "<i8",
    "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "?",
}  # fmt: skip
_EXPERIENCE = Name("trinity.common.experience", "Experience")
_DAMAGE = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError, struct.error)
"""What taking apart bytes of another structure raises."""

_EID = Name("trinity.common.experience", "EID")
_SCALARS = (Name("numpy.core.multiarray", "scalar"), Name("numpy._core.multiarray", "scalar"))
_NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C


@dataclass(frozen=True, slots=True)
class Payload:
    """One experience: plain fields by Trinity's names (`eid` is a dict), tensors beside them."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_payload(data: bytes) -> Payload:
    """The experience in `data`.

    Raises:
        UnreadablePickle: the bytes are damaged, hold several experiences, or something that only running a pickle would
            turn into a value; says what.
    """
    try:
        return _read_packed(data) if data.startswith(MAGIC) else _read_pickled(data)
    except UnreadablePickle:
        raise
    except _DAMAGE as error:
        raise UnreadablePickle(f"the bytes are not those of an experience ({type(error).__name__}: {error})") from error


def _read_packed(data: bytes) -> Payload:
    start = len(MAGIC) + _HEADER.size
    if len(data) < start:
        raise UnreadablePickle("the bytes end inside the header")
    version, fields_bytes, tensor_bytes = _HEADER.unpack_from(data, len(MAGIC))
    if version != 1:
        raise UnreadablePickle(f"serialization version {version}; this package reads 1")
    if start + fields_bytes + tensor_bytes != len(data):
        raise UnreadablePickle(f"{len(data)} bytes where the header says {start + fields_bytes + tensor_bytes}")
    found: object = plain(read_tree(data[start : start + fields_bytes]), known=_number)
    items = cast("dict[str, Any]", found).get("items") if isinstance(found, dict) else None
    if not isinstance(items, list) or len(cast("list[Any]", items)) != 1 or not isinstance(items[0], dict):
        raise UnreadablePickle("the fields are not those of one experience")
    tensors = read_safetensors(data[start + fields_bytes :])
    return Payload(
        cast("dict[str, Any]", items[0]),
        {name.removeprefix("0:"): tensor for name, tensor in tensors.items()},
    )


def read_safetensors(data: bytes) -> dict[str, Tensor]:
    """Tensors of a safetensors file; bfloat16 comes as float32.

    Raises:
        UnreadablePickle: the header is none, or a tensor lies outside the bytes.
    """
    if len(data) < 8:
        raise UnreadablePickle("the tensors end inside their header")
    (length,) = struct.unpack_from("<Q", data)
    try:
        header: object = json.loads(data[8 : 8 + length])
        entries = cast("dict[str, dict[str, Any]]", header).items()
        tensors: dict[str, Tensor] = {}
        for name, entry in entries:
            if name == "__metadata__":
                continue
            first, end = entry["data_offsets"]
            body = data[8 + length + first : 8 + length + end]
            if first < 0 or len(body) != end - first:
                raise UnreadablePickle(f"tensor {name} lies outside the bytes")
            tensors[name] = _array(body, _SAFE_DTYPES[entry["dtype"]], bfloat=entry["dtype"] == "BF16").reshape(
                entry["shape"]
            )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UnreadablePickle(f"the tensors cannot be read ({error})") from error
    return tensors


def _array(body: bytes, dtype: str, *, bfloat: bool) -> Tensor:
    values = np.frombuffer(body, dtype=dtype)
    return (values.astype("<u4") << 16).view("<f4") if bfloat else values


def _read_pickled(data: bytes) -> Payload:
    tree = read_tree(data)
    if isinstance(tree, list) and len(cast("list[Any]", tree)) == 1:
        tree = tree[0]
    if not isinstance(tree, Made) or tree.what != _EXPERIENCE or not isinstance(tree.state, dict):
        what = named(tree.what) if isinstance(tree, Made) else type(tree).__name__
        raise UnreadablePickle(f"it holds {what}, not an experience")
    fields: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in cast("dict[str, Any]", tree.state).items():
        if isinstance(value, Made) and value.what == Name("torch._utils", "_rebuild_tensor_v2"):
            tensors[name] = _tensor(value)
        elif isinstance(value, Made) and value.what == _EID:
            fields[name] = plain(value.state)
        elif name == "multi_modal_inputs" and isinstance(value, dict):
            fields["multi_modal_input_keys"] = [str(key) for key in cast("dict[Any, Any]", value)]
        elif name != "custom_fields":  # names of info keys with a torch type each, which say nothing of the row
            try:
                fields[name] = plain(value, known=_number)
            except UnreadablePickle as error:
                raise UnreadablePickle(f"field {name}: {error}") from error
    return Payload(fields, tensors)


def _number(made: Made) -> Any:
    """A NumPy number or a tensor among plain fields, as a number or a list; anything else stays a call."""
    if made.what == Name("torch._utils", "_rebuild_tensor_v2"):
        return _tensor(made).tolist()
    if made.what in _SCALARS and isinstance(made.args, tuple):
        dtype, body = cast("tuple[Any, ...]", made.args)[:2]
        kind = dtype.args[0] if isinstance(dtype, Made) and dtype.what == Name("numpy", "dtype") else None
        if kind in _NUMBERS and isinstance(body, bytes):
            return np.frombuffer(body, dtype=f"<{kind}", count=1)[0].item()
    return made


def _tensor(made: Made) -> Tensor:
    """The tensor that torch would rebuild from a storage, an offset, a shape and strides."""
    storage, offset, shape, stride = made.args[:4]
    if not isinstance(storage, Made) or storage.what != Name("torch.storage", "_load_from_bytes"):
        raise UnreadablePickle("a tensor whose storage is not inside the row")
    values = _storage(storage.args[0])
    whole = tuple(int(one) for one in shape)
    if tuple(stride) != _dense(whole):
        raise UnreadablePickle(f"a tensor of shape {whole} and strides {tuple(stride)}, which is not contiguous")
    size = int(np.prod(whole))
    if not 0 <= offset <= offset + size <= len(values):
        raise UnreadablePickle("a tensor that lies outside its storage")
    return values[offset : offset + size].reshape(whole)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch counts them: an empty dimension counts like one of length 1."""
    return tuple(int(np.prod([max(one, 1) for one in shape[at + 1 :]])) for at in range(len(shape)))


def _storage(data: bytes) -> Tensor:
    """The numbers in a file of torch.save's older layout that holds one storage."""
    stream = BytesIO(data)
    if read_tree(stream) != _TORCH_MAGIC:
        raise UnreadablePickle("a tensor in a layout of torch.save that is not known here")
    protocol, _, kept, keys = (read_tree(stream) for _ in range(4))
    key: object = kept.key if isinstance(kept, Kept) else None
    if protocol != 1001 or not isinstance(key, tuple) or key[0] != "storage" or keys != [key[2]]:
        raise UnreadablePickle("a tensor in a layout of torch.save that is not known here")
    kind = cast("Name", key[1]).name
    if kind not in _STORAGES:
        raise UnreadablePickle(f"a tensor of {kind}")
    (count,) = struct.unpack("<q", stream.read(8))
    body = stream.read()
    values = _array(body, _STORAGES[kind], bfloat=kind == "BFloat16Storage")
    if len(values) != count:
        raise UnreadablePickle(f"a tensor of {len(values)} numbers that says it has {count}")
    return values
