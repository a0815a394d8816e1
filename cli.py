"""The command line: parse, call, print. Each command imports what it needs, so that the cheap ones start at once."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ModelPath = Annotated[Path, typer.Option("--model", help="FTW folder, as made by 'rowstream convert'.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line of stdout.")]
Chunk = Annotated[int, typer.Option("--prefill-chunk", min=1, help="Most prompt tokens in one step.")]
TokenIds = Annotated[str | None, typer.Option("--token-ids", help="Token ids such as 1,2,3 in place of text.")]
Fast = Annotated[bool, typer.Option("--fast", help="Chunked prefill kernels: prefill and decode may differ in bits.")]


def main() -> None:
    """Entry point: every failure is one line on stderr and exit code 1, an interrupt is 130."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        fail(" ".join(str(error).split()) or type(error).__name__)


def fail(message: str) -> NoReturn:
    print(f"rowstream: {message}", file=sys.stderr)
    sys.exit(1)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr with rate and time left; gives the callback that moves it: (done, total bytes, label)."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: tuple[ProgressColumn, ...] = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True))
    console = Console(stderr=True)
    columns += (TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, label: bar.update(task, completed=done, total=total, description=label)


def show_version(wanted: bool) -> None:
    """Print the installed version and stop."""
    if wanted:
        print(f"rowstream {version('rowstream')}")
        raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool, typer.Option("--version", "-V", is_eager=True, callback=show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run Kimi K3 on one machine that cannot hold it."""


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder: config.json and safetensors.")],
    out: Annotated[Path, typer.Argument(help="New FTW folder.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a conversion that was interrupted.")] = False,
    shard_gib: Annotated[float, typer.Option("--shard-gib", help="Largest shard file in GiB.")] = 8.0,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint to an FTW folder whose expert rows can be streamed."""
    from formats.convert import convert as run

    with progress_bar() as progress:
        report = run(source, out, shard_limit=int(shard_gib * 2**30) // 4096 * 4096, resume=resume, progress=progress)
    show(report._asdict(), as_json)


@app.command()
def inspect(path: Annotated[Path, typer.Argument(help="FTW folder.")], as_json: AsJson = False) -> None:
    """Say what is in a folder: fingerprint, layers, experts, banks, bytes by dtype."""
    from formats.summary import summarize

    show(summarize(path), as_json)


@app.command()
def verify(path: Annotated[Path, typer.Argument(help="FTW folder.")], as_json: AsJson = False) -> None:
    """Check a folder's structure, then every checksum."""
    from formats.verify import verify as run

    with progress_bar() as progress:
        report = run(path, progress=progress)
    show(report._asdict(), as_json)


@app.command()
def generate(
    model: ModelPath,
    prompt: Annotated[str | None, typer.Option("--prompt", help="What to say to the model.")] = None,
    token_ids: TokenIds = None,
    system: Annotated[str | None, typer.Option("--system", help="System message before the prompt.")] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking/--no-thinking", help="Let it reason before it answers.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat encoding.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 128,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0: the most likely token.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="0: off.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends the answer; may be repeated.")
    ] = None,
    prefill_chunk: Chunk = 8192,
    fast: Fast = False,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt, streaming the text; a last line on stderr says how fast."""
    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give either --prompt or --token-ids")
    ids = None if token_ids is None else parse_ids(token_ids)
    from engine.device import open_device

    device = open_device()
    from engine.answer import complete
    from engine.chat import Frame, prompt_ids
    from engine.generate import open_model
    from engine.parser import Delta, PlainParser, parser_for
    from engine.requests import Request, sampling_for
    from engine.tokenizer import load_tokenizer

    chosen = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    sampling = sampling_for(model, chosen)
    opened = open_model(model, device, exact=not fast)
    tokenizer = load_tokenizer(model, opened.cfg.vocab)
    kind, chat = opened.cfg.model_type, prompt is not None and not raw
    if ids is None:
        assert prompt is not None
        turns = {"system": system, "user": prompt}
        messages = [{"role": role, "content": text} for role, text in turns.items() if text is not None]
        frame = Frame(thinking=thinking)
        ids = tuple(tokenizer.encode_text(prompt)) if raw else prompt_ids(tokenizer, kind, messages, frame)
    request = Request(ids, sampling, max_tokens, tokenizer.end_ids | set(opened.cfg.eos_ids), prefill_chunk)
    parser = parser_for(tokenizer, kind, thinking=thinking) if chat else PlainParser(tokenizer)
    for event in complete(opened, parser, request, stop or ()):
        if not isinstance(event, Delta):
            finish = event
        elif not as_json:
            dim = event.channel == "reasoning" and sys.stdout.isatty()
            print(f"\x1b[2m{event.text}\x1b[0m" if dim else event.text, end="", flush=True)
    if as_json:
        print(json.dumps(finish._asdict() | {"tool_calls": [call._asdict() for call in finish.tool_calls]}))
        return
    print()
    print(finish.summary(), file=sys.stderr)


@app.command()
def serve(
    model: ModelPath,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8000,
    max_running: Annotated[int, typer.Option("--max-running-requests", min=1)] = 4,
    max_queued: Annotated[int, typer.Option("--max-queued-requests", min=0)] = 64,
    num_tokens: Annotated[int, typer.Option("--num-tokens", min=64, help="Cache, in tokens of all requests.")] = 16384,
    prefill_chunk: Chunk = 512,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="ROWSTREAM_API_KEY")] = None,
    cors: Annotated[str | None, typer.Option("--cors", help="Origin that browsers may call from, or *.")] = None,
    drain_s: Annotated[float, typer.Option("--drain-seconds", min=0, help="Running answers may end in.")] = 30.0,
    fast: Fast = False,
) -> None:
    """Serve OpenAI's chat and text completions and Anthropic's messages over HTTP."""
    import socket

    from engine.device import open_device

    device = open_device()
    from engine.config import PAGE, load_config
    from engine.generate import open_model
    from engine.handlers import Service
    from engine.loop import Engine
    from engine.server import serve as run
    from engine.tokenizer import load_tokenizer

    cfg = load_config(model)
    tokenizer = load_tokenizer(model, cfg.vocab)
    pages = num_tokens // PAGE
    sock = socket.create_server((host, port))
    engine = Engine(
        lambda: open_model(model, device, exact=not fast),
        slots=max_running, pages=pages, step_tokens=prefill_chunk, queue=max_queued,
    )  # fmt: skip
    print(f"listening on http://{host}:{sock.getsockname()[1]}", file=sys.stderr, flush=True)
    positions = min(cfg.max_positions, pages * PAGE)
    run(Service(engine, model, cfg, tokenizer, positions, api_key=api_key, cors=cors, drain_s=drain_s), sock)


@app.command()
def chat(
    url: Annotated[str, typer.Option("--url", help="Address of a running server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="ROWSTREAM_API_KEY")] = None,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="Let it reason before it answers.")] = True,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
) -> None:
    """Talk to a running server; Ctrl-C stops an answer, /quit ends."""
    from engine.terminal import Terminal

    options = {"max_tokens": max_tokens, "reasoning_effort": None if thinking else "none"}
    terminal = Terminal(url, api_key, options, sys.stdout, dim=sys.stdout.isatty())
    terminal.begin()
    going = True
    while going:
        try:
            going = terminal.say(input("> " if sys.stdin.isatty() else "").strip())
        except EOFError:
            going = False


@app.command()
def score(
    model: ModelPath,
    text_file: Annotated[Path | None, typer.Option("--text-file", help="UTF-8 text to score.")] = None,
    token_ids: TokenIds = None,
    logits: Annotated[Path | None, typer.Option("--logits", help="Write fp32 logits [tokens, vocab] here.")] = None,
    prefill_chunk: Chunk = 512,
    fast: Fast = False,
    as_json: AsJson = False,
) -> None:
    """Log-probability of each token of a text given those before it, and the text's perplexity."""
    if (text_file is None) == (token_ids is None):
        raise typer.BadParameter("give either --text-file or --token-ids")
    ids = None if token_ids is None else parse_ids(token_ids)
    from engine.device import open_device

    device = open_device()
    from engine.generate import open_model
    from engine.score import score_text
    from engine.tokenizer import load_tokenizer

    if ids is None:
        assert text_file is not None
        ids = tuple(load_tokenizer(model).encode_text(text_file.read_text(encoding="utf-8")))
    report = score_text(open_model(model, device, exact=not fast), ids, prefill_chunk, logits)
    if not as_json:
        for token, log_prob in zip(report.token_ids, report.log_probs, strict=True):
            print(f"{token:>8} {'' if log_prob is None else f'{log_prob:.4f}'}")
    show({"tokens": len(ids), "perplexity": report.perplexity} if not as_json else report._asdict(), as_json)


def parse_ids(text: str) -> tuple[int, ...]:
    """Read ``1,2,3``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--token-ids is {text!r}, want whole numbers such as 1,2,3") from None


def show(report: dict[str, Any], as_json: bool) -> None:
    """Print a report: one JSON object, or a line a field; what has fields of its own is indented."""
    if as_json:
        print(json.dumps(report, default=str))
        return
    for name, value in report.items():
        if isinstance(value, dict):
            print(f"{name.replace('_', ' ')}:")
            for key, part in value.items():
                print(f"  {key}: {', '.join(f'{k} {v}' for k, v in part.items()) if isinstance(part, dict) else part}")
        else:
            print(f"{name.replace('_', ' ')}: {value}")


if __name__ == "__main__":
    main()
