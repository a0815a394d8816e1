"""Values, fingerprints and interrupted runs of the converter."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import formats.convert
from formats.checkpoint import open_checkpoint
from formats.convert import convert
from formats.dtypes import DTYPES
from formats.errors import FormatError
from formats.ftw import INDEX_NAME
from formats.journal import JOURNAL_NAME
from formats.layout import padded
from formats.reader import FtwReader, open_ftw
from formats.safetensors import Tensor, read, read_header, write_safetensors
from formats.synthetic import write_checkpoint
from formats.verify import verify
from tests.reference.sources import K3, KINDS, make_source

SHARD_LIMIT = 256 * 1024
BANKS = {
    "nvfp4": ("gate_up_packed", "gate_up_scale", "gate_up_global", "down_packed", "down_scale", "down_global"),
    "mxfp4_triton": ("gate_up_blocks", "gate_up_scales", "gate_up_bias", "down_blocks", "down_scales", "down_bias"),
    "bf16": ("gate_up", "down"),
}


@pytest.fixture(scope="module", autouse=True)
def no_fsync() -> Iterator[None]:
    """A kill does not lose what the kernel holds, so only the test of their order needs the slow calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _fd: None)
        yield


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def source(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(kind, tmp_path_factory.mktemp(kind) / "source")


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source("k3", tmp_path_factory.mktemp("k3") / "source")


@pytest.fixture(scope="module")
def whole(k3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted conversion of ``k3``."""
    out = tmp_path_factory.mktemp("whole") / "ftw"
    convert(k3, out, shard_limit=SHARD_LIMIT)
    return out


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def as_torch(tensor: Tensor) -> torch.Tensor:
    return torch.from_numpy(read(tensor)).view(getattr(torch, tensor.dtype))


def dequantised(tensors: dict[str, Tensor], name: str) -> torch.Tensor:
    weight = as_torch(tensors[name]).float()
    scale = as_torch(tensors[f"{name}_scale"])
    scale = scale.reshape(scale.shape[0], -1) if scale.ndim == 2 else scale[:, 0, :, 0]
    blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return (weight * blocks).bfloat16()


def wanted_residents(tensors: dict[str, Tensor]) -> dict[str, torch.Tensor]:
    """ftw.md, section 3, in torch."""
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." in name or name.endswith((".weight_scale", ".up_proj.weight")):
            continue
        if tensor.dtype == "float8_e4m3fn":
            if ".kv_b_proj." in name or any(n % 128 for n in tensor.shape):
                wanted[name] = dequantised(tensors, name)
                continue
            scale = as_torch(tensors[f"{name}_scale"])
            wanted[f"{name}_scale_inv"] = scale.reshape(tensor.shape[0] // 128, tensor.shape[1] // 128)
        value = as_torch(tensor)
        if name.endswith(".gate_proj.weight"):
            value = torch.cat([value, as_torch(tensors[name.replace("gate_proj", "up_proj")])])
        target = name.replace("gate_proj", "gate_up_proj").replace("gate.e_score", "e_score")
        wanted[target] = value
    return wanted


def wanted_row(tensors: dict[str, Tensor], bank: str, prefix: str) -> np.ndarray:
    """One expert's row by ftw.md, sections 1.6 and 2."""
    names = ("w1", "w3") if bank.startswith("gate_up") else ("w2",)

    def stack(part: str) -> np.ndarray:
        return np.concatenate([read(tensors[f"{prefix}{name}.{part}"]) for name in names])

    if bank.endswith("_global"):
        rows = tensors[f"{prefix}{names[0]}.weight"].shape[0]
        values = [np.float16(read(tensors[f"{prefix}{name}.weight_scale_2"]).item()) for name in names]
        return np.concatenate([np.full(rows, value) for value in values])
    if bank.endswith("_bias"):
        return np.zeros(sum(tensors[f"{prefix}{name}.weight_packed"].shape[0] for name in names), np.uint16)
    part, transposed = {
        "packed": ("weight", False),
        "scale": ("weight_scale", False),
        "blocks": ("weight_packed", True),
        "scales": ("weight_scale", True),
    }.get(bank.rpartition("_")[2], ("weight", False))
    return stack(part).T if transposed else stack(part)


def test_residents(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", shard_limit=SHARD_LIMIT)
    reader = open_ftw(tmp_path / "out")
    wanted = wanted_residents(open_checkpoint(source).tensors)
    assert reader.names == set(wanted)
    for name, value in wanted.items():
        dtype, array = reader.tensor(name)
        assert dtype == str(value.dtype).removeprefix("torch."), name
        assert array.shape == tuple(value.shape), name
        assert array.tobytes() == value.contiguous().view(torch.uint8).numpy().tobytes(), name


def test_both_kinds_of_fp8_occur(whole: Path) -> None:
    reader = open_ftw(whole)
    attention = "model.layers.0.self_attn"
    assert reader.tensor(f"{attention}.q_proj.weight")[0] == "float8_e4m3fn"
    assert reader.tensor(f"{attention}.q_proj.weight_scale_inv")[1].shape == (3, 2)
    assert reader.tensor(f"{attention}.b_proj.weight")[0] == "bfloat16"
    assert reader.tensor("model.layers.3.self_attn.kv_b_proj.weight")[0] == "bfloat16"
    assert reader.shape(f"{attention}.A_log") == (128,)
    assert "model.layers.1.block_sparse_moe.e_score_correction_bias" in reader.names


def test_expert_rows(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", shard_limit=SHARD_LIMIT)
    reader, checkpoint = open_ftw(tmp_path / "out"), open_checkpoint(source)
    assert reader.banks == BANKS[str(reader.quant_format)]
    assert (reader.layers, reader.experts) == (3, 5)
    for bank in reader.banks:
        for layer in range(3):
            for expert in range(5):
                prefix = f"model.layers.{layer + 1}.block_sparse_moe.experts.{expert}."
                want = wanted_row(checkpoint.tensors, bank, prefix)
                got = reader.expert_row(bank, layer, expert)
                assert got.dtype == want.dtype
                np.testing.assert_array_equal(got, want, err_msg=f"{bank} {layer} {expert}")


def test_index_and_files(k3: Path, whole: Path) -> None:
    """Entries in order without gaps, SparkLab's rules; what lies beside them."""
    document = json.loads((whole / INDEX_NAME).read_bytes())
    end = 0
    for tensor in document["tensors"]:
        assert tensor["global_off"] == end
        end += -(-tensor["nbytes"] // 4096) * 4096
    assert end == document["total_bytes"]
    assert document["counts"] == {"weight": len(document["tensors"]) - 18, "experts_bank": 18}
    assert document["fingerprint_kind"] == "rowstream-content-sha256"
    assert document["source_model_path"] == str(k3)
    assert document["expert_quantization"] is None
    copied = document["copied_metadata"]
    assert copied == sorted(copied)
    assert {"config.json", "tiktoken.model", "code/model.py"} <= set(copied)
    shards = {shard["file"] for shard in document["shards"]}
    assert set(contents(whole)) == {*copied, *shards, INDEX_NAME, "rowstream_digests.npy"}
    for name in copied:
        assert (whole / name).read_bytes() == (k3 / name).read_bytes()
        assert (whole / name).stat().st_mtime == (k3 / name).stat().st_mtime


def test_report_and_progress(k3: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    report = convert(k3, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert report.inexact_globals == 0
    assert (report.resumed_bytes, report.shards, report.quant_format) == (0, 1, "nvfp4")
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert {call[1] for call in calls} == {report.total_bytes}
    assert report.total_bytes - 4096 < done[-1] <= report.total_bytes
    assert calls[-1][2] == "down_global#L00002"


def test_fingerprint_is_of_the_content(k3: Path, whole: Path, tmp_path: Path) -> None:
    small = convert(k3, tmp_path / "small", shard_limit=4096)
    assert open_ftw(tmp_path / "small").index.fingerprint == open_ftw(whole).index.fingerprint == small.fingerprint
    assert small.shards > len(open_ftw(whole).index.shards)
    other = make_source("k3", tmp_path / "other", seed=4)
    assert convert(other, tmp_path / "third").fingerprint != small.fingerprint


RUN = """
import os, signal, sys
os.fsync = lambda fd: None
from formats.convert import convert
source, out, limit, budget = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def progress(done, total, name):
    if done >= budget:
        os.kill(os.getpid(), signal.SIGKILL)
convert(source, out, shard_limit=limit, resume=True, progress=progress)
"""


def run_killed(source: Path, out: Path, budget: int) -> int:
    command = [sys.executable, "-c", RUN, str(source), str(out), str(SHARD_LIMIT), str(budget)]
    return subprocess.run(command, cwd=Path(__file__).parents[2], timeout=60).returncode


def test_killed_at_20_points(k3: Path, whole: Path, tmp_path: Path) -> None:
    total = open_ftw(whole).index.total_bytes
    rng = random.Random(5)
    for budget in (1, *(rng.randrange(total - 4096) for _ in range(19))):
        out = tmp_path / str(budget)
        assert run_killed(k3, out, budget) == -signal.SIGKILL
        assert not (out / INDEX_NAME).exists()
        report = convert(k3, out, shard_limit=SHARD_LIMIT, resume=True)
        assert report.resumed_bytes <= padded(budget)
        # The entry that was being written is the only one lost.
        assert budget - report.resumed_bytes <= 200 * 1024
        assert contents(out) == contents(whole)
        shutil.rmtree(out)


def test_killed_again_and_again(k3: Path, whole: Path, tmp_path: Path) -> None:
    total, out = open_ftw(whole).index.total_bytes, tmp_path / "out"
    for budget in range(total // 8, total - 4096, total // 8):
        assert run_killed(k3, out, budget) == -signal.SIGKILL
    assert run_killed(k3, out, total + 1) == 0
    assert contents(out) == contents(whole)


def stop_at(k3: Path, out: Path, budget: int) -> None:
    """Interrupt a conversion by an exception."""

    def progress(done: int, _total: int, _name: str) -> None:
        if done >= budget:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(k3, out, shard_limit=SHARD_LIMIT, resume=True, progress=progress)


def test_torn_journal_and_garbage_behind_it(k3: Path, whole: Path, tmp_path: Path) -> None:
    """Whatever a crash leaves behind the last whole line is made again."""
    stop_at(k3, tmp_path / "stopped", 300_000)
    journal = (tmp_path / "stopped" / JOURNAL_NAME).read_bytes()
    last = journal.rstrip(b"\n").rfind(b"\n") + 1
    lines = journal.splitlines(keepends=True)
    cuts = [
        b"".join(lines[:3] + lines[4:]),
        b"",
        journal[:10],
        journal[: last + 5],
        journal[:-1],
        journal[:last] + b"\0" * 40 + b"\n",
        journal + b"{",
    ]
    for i, text in enumerate(cuts):
        out = shutil.copytree(tmp_path / "stopped", tmp_path / str(i))
        (out / JOURNAL_NAME).write_bytes(text)
        newest = max(out.glob("*.ftw"))
        newest.write_bytes(newest.read_bytes() + b"garbage" * 999)
        (out / "freetoken-00099.ftw").unlink(missing_ok=True)
        convert(k3, out, shard_limit=SHARD_LIMIT, resume=True)
        assert contents(out) == contents(whole), i


def test_progress_after_a_torn_line_is_kept(k3: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stop_at(k3, out, 300_000)
    with (out / JOURNAL_NAME).open("ab") as file:
        file.write(b'{"entry": 1')
    stop_at(k3, out, 900_000)
    assert convert(k3, out, shard_limit=SHARD_LIMIT, resume=True).resumed_bytes > 600_000
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("step", ["save_digests", "index_bytes", "fingerprint"])
def test_stopped_while_finishing(
    step: str, k3: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def fail(*args: Any) -> bytes:
        nonlocal calls
        calls += 1
        if step == "index_bytes" and calls == 1:
            return original(*args)
        raise OSError("drive is gone")

    original = getattr(formats.convert, step)
    with monkeypatch.context() as patch:
        patch.setattr(formats.convert, step, fail)
        with pytest.raises(OSError, match="drive is gone"):
            convert(k3, tmp_path / "out", shard_limit=SHARD_LIMIT)
    assert not (tmp_path / "out" / INDEX_NAME).exists()
    report = convert(k3, tmp_path / "out", shard_limit=SHARD_LIMIT, resume=True)
    assert report.resumed_bytes == report.total_bytes
    assert contents(tmp_path / "out") == contents(whole)


def test_bytes_reach_the_drive_before_the_journal(k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No journal line and no index without an fsync of the bytes it speaks for, and of the files' names."""
    dirty: set[str] = set()
    written: set[str] = set()
    listed: set[str] = set()
    synced: Counter[str] = Counter()
    fsync, pwrite, replace = os.fsync, os.pwrite, Path.replace

    def path_of(fd: int) -> str:
        return Path(f"/proc/self/fd/{fd}").readlink().name

    def noted_pwrite(fd: int, data: memoryview, offset: int) -> int:
        dirty.add(path_of(fd))
        written.add(path_of(fd))
        return pwrite(fd, data, offset)

    def noted_fsync(fd: int) -> None:
        dirty.discard(path_of(fd))
        synced[path_of(fd)] += 1
        if path_of(fd) in (JOURNAL_NAME, f"{INDEX_NAME}.tmp"):
            assert not dirty
            assert written <= listed
        if path_of(fd) == "out":
            listed.update(os.listdir(fd))
        fsync(fd)

    def noted_replace(path: Path, target: Path) -> Path:
        beside = {"config.json", "tiktoken.model", "rowstream_digests.npy", path.name}
        assert beside <= synced.keys()
        assert synced[JOURNAL_NAME] == 1 + len(json.loads(path.read_bytes())["tensors"])
        return replace(path, target)

    monkeypatch.setattr(os, "pwrite", noted_pwrite)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    # Small files, so that most entries lie in several.
    convert(k3, tmp_path / "out", shard_limit=16 * 1024)
    assert listed > written


def test_short_writes(k3: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    convert(k3, tmp_path / "out", shard_limit=SHARD_LIMIT)
    assert contents(tmp_path / "out") == contents(whole)


def test_resume_wants_the_same_source_and_options(k3: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stop_at(k3, out, 200_000)
    before = contents(out)
    with pytest.raises(FormatError, match="unfinished conversion, want --resume"):
        convert(k3, out, shard_limit=SHARD_LIMIT)
    with pytest.raises(FormatError, match="another source, other options"):
        convert(k3, out, shard_limit=2 * SHARD_LIMIT, resume=True)
    other = make_source("k3", tmp_path / "other", seed=4)
    with pytest.raises(FormatError, match="another source, other options"):
        convert(other, out, shard_limit=SHARD_LIMIT, resume=True)
    assert contents(out) == before
    shard = max(out.glob("*.ftw"))
    os.truncate(min(out.glob("*.ftw")), 4096)
    with pytest.raises(FormatError, match=r"00000.ftw is 4096 bytes long, want \d+ that the journal calls finished"):
        convert(k3, out, shard_limit=SHARD_LIMIT, resume=True)
    assert shard.exists()


def test_one_writer_at_a_time(k3: Path, tmp_path: Path) -> None:
    refused = []

    def progress(_done: int, _total: int, _name: str) -> None:
        if not refused:
            with pytest.raises(FormatError, match="another conversion is writing"):
                convert(k3, tmp_path / "out", resume=True)
            refused.append(True)

    convert(k3, tmp_path / "out", progress=progress)
    assert refused
    verify(tmp_path / "out")


def test_folders_that_are_refused(k3: Path, whole: Path, tmp_path: Path) -> None:
    before = contents(whole)
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    cases = (
        (whole, tmp_path / "out", "is an FTW folder already"),
        (k3, k3 / "ftw", "lies in the source"),
        (k3, k3, "lies in the source"),
        (k3, whole, "is not empty and holds no unfinished conversion"),
        (k3, tmp_path / "full", "is not empty"),
        (k3, tmp_path / "file", "is a file, want a new folder"),
        (tmp_path / "absent", tmp_path / "out", "config.json is missing"),
    )
    for source, out, message in cases:
        for resume in (False, True):
            with pytest.raises(FormatError, match=message):
                convert(source, out, resume=resume)
    assert not (tmp_path / "out").exists()
    assert contents(whole) == before


def test_memory_holds_less_than_a_layer_of_experts(tmp_path: Path) -> None:
    config = K3 | {"text_config": K3["text_config"] | {"num_experts": 64, "moe_intermediate_size": 256}}
    config["text_config"] |= {"routed_expert_hidden_size": 256}
    write_checkpoint(tmp_path / "source", config, seed=1, experts="nvfp4", attention="fp8")
    tracemalloc.start()
    try:
        convert(tmp_path / "source", tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    reader = open_ftw(tmp_path / "out")
    layer = sum(reader.row_format(bank).nbytes for bank in reader.banks) * reader.experts
    assert layer > 6 << 20 and reader.layers == 3
    assert peak < layer


def test_full_drive(k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=500_000))
    with pytest.raises(FormatError, match=r"has 0\.00 GiB free, want 0\.\d+ GiB more"):
        convert(k3, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def rewrite(path: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> None:
    tensors = read_header(path)
    write_safetensors(path, {name: (t.dtype, change(name, read(t))) for name, t in tensors.items()})


def test_inexact_global_scales_are_counted(k3: Path, tmp_path: Path) -> None:
    """Those of one expert of five, in three layers: rounded, and said so."""
    source = shutil.copytree(k3, tmp_path / "source")
    name = ".experts.2.w3.weight_scale_2"
    for path in source.glob("*.safetensors"):
        rewrite(path, lambda full, array: np.full_like(array, 3e-5) if full.endswith(name) else array)
    assert convert(source, tmp_path / "out").inexact_globals == 3
    halves = open_ftw(tmp_path / "out").expert_row("gate_up_global", 1, 2).reshape(2, -1)
    assert np.unique(halves[1]) == np.float16(3e-5) != np.float32(3e-5)
    assert np.unique(halves[0]) != halves[1, 0]


@pytest.mark.parametrize("value", [0.0, 1e-8, 1e5, -0.5, float("inf"), float("nan")])
def test_global_scales_that_float16_cannot_hold(value: float, k3: Path, tmp_path: Path) -> None:
    source = shutil.copytree(k3, tmp_path / "source")
    name = "layers.2.block_sparse_moe.experts.3.w3.weight_scale_2"
    for path in source.glob("*.safetensors"):
        rewrite(path, lambda full, array: np.full_like(array, value) if full.endswith(name) else array)
    with pytest.raises(
        FormatError, match=rf"safetensors: model\.{name} is {value:g}, want a number that float16 holds"
    ):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_source(k3: Path, tmp_path: Path) -> None:
    source = shutil.copytree(k3, tmp_path / "source")
    path = min(source.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FormatError, match=f"{path.name} .*missing"):
        convert(source, tmp_path / "out")
    path.unlink()
    with pytest.raises(FormatError, match=f"{path.name} is missing"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_source_that_shrinks_while_it_is_read(k3: Path, tmp_path: Path) -> None:
    """A read error in the thread that reads ahead ends the conversion."""
    source = shutil.copytree(k3, tmp_path / "source")

    def progress(_done: int, _total: int, _name: str) -> None:
        for path in source.glob("*.safetensors"):
            os.truncate(path, 100)

    with pytest.raises(FormatError, match=r"ends at byte \d+, want \d+ more of"):
        convert(source, tmp_path / "out", progress=progress)
    assert not (tmp_path / "out" / INDEX_NAME).exists()


def test_reader_reads_what_was_written(whole: Path) -> None:
    """Storage dtypes are numpy's own, so that engine code can view them."""
    reader: FtwReader = open_ftw(whole)
    for name in reader.names:
        dtype, array = reader.tensor(name)
        assert array.dtype == DTYPES[dtype].storage
