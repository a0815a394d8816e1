"""The command line as a user meets it: exit codes, one line on stderr, JSON on the last line of stdout."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
TINY = ROOT / "examples" / "tiny_k3"


def run(*args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "cli.py"), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout.splitlines()[-1])


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("rowstream: "), done.stderr
    return lines[0]


def test_generate_streams_and_reports() -> None:
    done = run("generate", "--model", TINY, "--prompt", "Hello", "--max-tokens", 4)
    assert done.stdout.strip() and "tok/s" in done.stderr and "MiB read" in done.stderr


def test_generate_json_repeats() -> None:
    args = ("generate", "--model", TINY, "--prompt", "Hello", "--max-tokens", 5, "--seed", 3, "--json")
    first, second = last_json(run(*args)), last_json(run(*args, "--prefill-chunk", 3))
    want = {
        "text",
        "token_ids",
        "prompt_tokens",
        "completion_tokens",
        "finish_reason",
        "ttft_s",
        "tokens_per_s",
        "bytes_read",
    }
    assert want <= set(first)
    assert first["token_ids"] == second["token_ids"] and len(first["token_ids"]) == first["completion_tokens"] <= 5
    assert first["finish_reason"] in ("stop", "length") and first["bytes_read"] > 0


def test_token_ids_raw_and_stop() -> None:
    ids = last_json(
        run("generate", "--model", TINY, "--token-ids", "5,6,7", "--max-tokens", 3, "--temperature", 0, "--json")
    )
    assert ids["prompt_tokens"] == 3
    raw = last_json(run("generate", "--model", TINY, "--prompt", "Hello", "--raw", "--max-tokens", 3, "--json"))
    stopped = run(
        "generate",
        "--model",
        TINY,
        "--prompt",
        "Hello",
        "--raw",
        "--max-tokens",
        3,
        "--json",
        "--stop",
        raw["text"][:1],
    )
    assert last_json(stopped)["text"] == "" and last_json(stopped)["finish_reason"] == "stop"


def test_score(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A row is read once.", encoding="utf-8")
    logits = tmp_path / "logits.npy"
    report = last_json(run("score", "--model", TINY, "--text-file", text, "--logits", logits, "--json"))
    values = np.load(logits)
    assert values.dtype == np.float32 and len(values) == len(report["token_ids"])
    shifted = values[:-1].astype(np.float64)
    log_z = np.log(np.exp(shifted - shifted.max(1, keepdims=True)).sum(1)) + shifted.max(1)
    want = shifted[np.arange(len(shifted)), report["token_ids"][1:]] - log_z
    assert report["log_probs"][0] is None and np.allclose(report["log_probs"][1:], want, atol=1e-5)
    assert np.isclose(report["perplexity"], np.exp(-want.mean()), rtol=1e-5)
    assert list(tmp_path.iterdir()) == [logits, text] or set(tmp_path.iterdir()) == {logits, text}


def test_inspect_and_verify() -> None:
    report = last_json(run("inspect", TINY, "--json"))
    assert report["quant_format"] == "nvfp4" and report["experts"] >= 32 and len(report["fingerprint"]) == 16
    assert set(report["banks"]) >= {"gate_up_packed", "down_global"} and report["bytes_by_dtype"]["float8_e4m3fn"] > 0
    assert "fingerprint" in run("inspect", TINY).stdout
    assert last_json(run("verify", TINY, "--json"))


def test_convert_and_damage(tmp_path: Path) -> None:
    from tests.reference.models import KINDS, make_model

    assert "k3" in KINDS
    ftw = make_model("k3", tmp_path)
    again = tmp_path / "again"
    report = last_json(run("convert", tmp_path / "source", again, "--shard-gib", 0.0001, "--json"))
    assert report["fingerprint"] == last_json(run("inspect", ftw, "--json"))["fingerprint"]
    shard = sorted(ftw.glob("*.ftw"))[0]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert shard.name in one_line(run("verify", ftw, code=1))
    shard.write_bytes(data[:-1])
    assert shard.name in one_line(run("generate", "--model", ftw, "--token-ids", "1", code=1))
    assert "again" in one_line(run("convert", tmp_path / "source", again, code=1))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("generate", "--model", "/nowhere", "--prompt", "x"), "/nowhere"),
        (("generate", "--model", TINY, "--token-ids", "99999999"), "token id 1 is 99999999"),
        (("generate", "--model", TINY, "--prompt", "x", "--temperature", "-1"), "temperature is -1"),
        (("generate", "--model", TINY, "--prompt", "x", "--top-p", "2"), "top_p is 2"),
        (("score", "--model", TINY, "--token-ids", "1"), "at least two"),
        (("score", "--model", TINY, "--text-file", "/nowhere.txt"), "/nowhere.txt"),
        (("inspect", "/nowhere"), "/nowhere"),
        (("verify", ROOT / "examples"), "examples"),
        (("convert", "/nowhere", "/tmp/never"), "/nowhere"),
    ],
)
def test_failures_are_one_line(args: tuple[object, ...], words: str) -> None:
    assert words in one_line(run(*args, code=1))


@pytest.mark.parametrize(
    "args",
    [
        ("generate", "--model", TINY),
        ("generate", "--model", TINY, "--prompt", "x", "--token-ids", "1"),
        ("generate", "--model", TINY, "--token-ids", "1,x"),
        ("generate", "--prompt", "x"),
        ("score", "--model", TINY),
        ("nonsense",),
        (),
    ],
)
def test_wrong_usage_is_2(args: tuple[object, ...]) -> None:
    assert run(*args, code=2).stderr


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("rowstream ")
    assert "generate" in run("-h").stdout


def test_interrupt_is_130() -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "cli.py",
        "generate",
        "--model",
        str(TINY),
        "--prompt",
        "x",
        "--max-tokens",
        "999",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stdout.read(1)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in stderr
