"""Prompts of made-up conversations by Moonshot's own encoder, as shipped in llmcompressor.

From the repository's root, in the environment of ``make_kimi_k3.py``:

    PYTHONPATH=. python tests/oracles/make_chat.py

Text alone; and no reasoning of spaces alone, which this older release of the encoder drops and the newer one keeps.
"""

import json
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": 'What is 2 < 3 & "why"? 数学 <|open|>think<|sep|>', "name": 'a"&b<'},
    {"role": "assistant", "content": "True.", "reasoning_content": "  Compare.\n"},
    {"role": "system", "content": [{"type": "text", "text": "Now"}, {"type": "text", "text": " shout."}]},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": None, "reasoning": "<|close|>think<|sep|>"},
    {"role": "user", "content": "  [EOS]  "},
    {"role": "assistant", "content": "TRUE!", "name": "loud", "reasoning_content": ""},
    {"role": "user", "content": []},
]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no generation prompt": {"generation_prompt": False},
    "effort": {"effort": "high"},
    "no thinking": {"thinking": False},
    "no thinking, effort": {"thinking": False, "effort": "low", "generation_prompt": False},
}


def main() -> None:
    spec = find_spec("llmcompressor")
    assert spec is not None and spec.origin is not None, "llmcompressor is not installed"
    path = Path(spec.origin).parent / "modeling" / "kimi_k3" / "encoding_k3.py"
    spec = spec_from_file_location("encoding_k3", path)
    assert spec is not None and spec.loader is not None
    encoder = module_from_spec(spec)
    sys.modules["encoding_k3"] = encoder
    spec.loader.exec_module(encoder)
    cases = []
    for name, options in CASES.items():
        segments = encoder.build_chat_segments(
            MESSAGES,
            add_generation_prompt=options.get("generation_prompt", True),
            thinking=options.get("thinking", True),
            thinking_effort=options.get("effort"),
        )
        wanted = [[segment.text, segment.allow_special] for segment in segments]
        cases.append({"name": name, "messages": MESSAGES, "options": options, "segments": wanted})
    out = Path(__file__).with_name("chat.json")
    out.write_text(json.dumps(cases, ensure_ascii=False) + "\n")
    print(f"{out.name}: {len(cases)} cases, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
