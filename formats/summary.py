"""What a folder holds, in a few numbers."""

from collections import Counter
from pathlib import Path
from typing import Any

from formats.reader import open_ftw


def summarize(path: Path) -> dict[str, Any]:
    """Describe an FTW folder.

    Returns:
        Plain values: ``path, format, model_type, fingerprint, fingerprint_kind, quant_format, expert_layers, experts,
        banks`` (name to dtype, row shape and row bytes), ``row_bytes`` of one expert over all banks, ``tensors``,
        ``bytes_by_dtype``, ``resident_bytes``, ``expert_bytes``, ``total_bytes`` with padding and ``shards``.

    Raises:
        FormatError: the folder is not what its index says.
    """
    reader = open_ftw(path)
    index = reader.index
    bytes_by_dtype: Counter[str] = Counter()
    bytes_by_kind: Counter[str] = Counter()
    for entry in index.entries:
        bytes_by_dtype[entry.dtype] += entry.nbytes
        bytes_by_kind[entry.kind] += entry.nbytes
    banks = {bank: reader.row_format(bank) for bank in reader.banks}
    return {
        "path": str(path),
        "format": "ftw",
        "model_type": reader.config.get("model_type"),
        "fingerprint": index.fingerprint,
        "fingerprint_kind": index.extra.get("fingerprint_kind", "foreign"),
        "quant_format": reader.quant_format,
        "expert_layers": reader.layers,
        "experts": reader.experts,
        "banks": {
            name: {"dtype": row.dtype, "row": list(row.shape), "row_bytes": row.nbytes} for name, row in banks.items()
        },
        "row_bytes": sum(row.nbytes for row in banks.values()),
        "tensors": len(index.entries),
        "bytes_by_dtype": dict(sorted(bytes_by_dtype.items())),
        "resident_bytes": bytes_by_kind["weight"],
        "expert_bytes": bytes_by_kind["experts_bank"],
        "total_bytes": index.total_bytes,
        "shards": len(index.shards),
    }
